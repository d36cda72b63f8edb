"""Workloads as in the public benches of serving engines, for comparison with their results.

`multi_turn`: clients ask in rounds; each prompt is the whole conversation so far and new tokens
(the multi-turn benches of SGLang and vLLM). `shared_prefix`: groups of prompts with a common
prefix, repeated at rates that rise by stages (llm-d's and inference-perf's benches).
"""

import numpy as np

from hicache.clock import to_ns
from hicache.config import PrefixesConfig, RoundsConfig, TraceTokens
from hicache.request import Request
from hicache.workload.runs import Runs, append_run, runs_len
from hicache.workload.turns import Turn, to_requests


def multi_turn(config: RoundsConfig, *, seed: int) -> list[Request]:
    del seed  # only the gaps are random, and the feeder draws them
    turns: list[Turn] = []
    fresh = 0
    clients = config.num_sessions
    for number in range(config.rounds * clients):
        before = number - clients if number >= clients else None
        prompt = [] if before is None else list(turns[before].prompt)
        added = config.turn_tokens
        if before is None:
            added = config.first_tokens or added
        else:
            added += config.answer_tokens
        append_run(prompt, fresh, added)
        fresh += added
        turns.append(_turn(config, number / config.request_rate, prompt, number % clients, before))
    return to_requests(turns, first_fresh=fresh, tokens=TraceTokens.reconstructed)


def shared_prefix(config: PrefixesConfig, *, seed: int) -> list[Request]:
    """Return requests whose prompts come in groups; all prompts of a group share a prefix.

    The prompts follow one another in a random order that is drawn once and repeated. In each load
    stage the requests arrive as a Poisson process, at the rate of the stage.
    """
    rng = np.random.default_rng(seed)
    num_prompts = config.groups * config.group_prompts
    order = rng.permutation(num_prompts).tolist()
    own_ids = config.groups * config.prefix_tokens
    turns: list[Turn] = []
    for stage, rate in enumerate(config.stage_rates):
        num_requests = rng.poisson(rate * config.stage_s)
        for offset in np.sort(rng.uniform(0, config.stage_s, num_requests)).tolist():
            number = order[len(turns) % num_prompts]
            prompt: Runs = []
            group = number // config.group_prompts
            append_run(prompt, group * config.prefix_tokens, config.prefix_tokens)
            append_run(prompt, own_ids + number * config.own_tokens, config.own_tokens)
            turns.append(_turn(config, stage * config.stage_s + offset, prompt, len(turns)))
    if not turns:
        raise ValueError(
            f"workload.stage_rates={list(config.stage_rates)} with "
            f"workload.stage_s={config.stage_s} give no request"
        )
    first_fresh = own_ids + num_prompts * config.own_tokens
    return to_requests(turns, first_fresh=first_fresh, tokens=TraceTokens.reconstructed)


def _turn(
    config: RoundsConfig | PrefixesConfig,
    arrival_s: float,
    prompt: Runs,
    session: int,
    before: int | None = None,
) -> Turn:
    prompt_len = runs_len(prompt)
    return Turn(
        arrival_ns=to_ns(arrival_s),
        prompt=prompt,
        full_len=prompt_len,
        prompt_len=prompt_len,
        output_len=config.answer_tokens,
        session=session,
        waits_for=() if before is None else (before,),
        continues=before,
    )

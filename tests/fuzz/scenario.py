"""A scenario: one value of every knob, and the run that they describe."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hicache.cache.kinds import model_kinds
from hicache.cli.schema import config_of
from hicache.config import ExperimentConfig
from hicache.models import GIB
from hicache.workload.workload import Workload, load_workload
from tests.fuzz.knobs import BARRED, KNOBS, WORKLOAD, Knob
from tests.fuzz.talk import NUM_REQUESTS, TALK, Talk, make_talk, unit_tokens

BASE = (
    "workload=chat",
    "model=tiny_hybrid",
    "storage=memory",
    "tracker.wandb_mode=disabled",
    "tracker.interval_s=0.02",
)
OURS = ("pools", "talk", "pages")  # areas whose keys are no knobs of a run
CHAT_UNITS = {
    "chat": 512,
    "agents": 2048,
    "multi_turn": 1024,
    "shared_prefix": 512,
}  # thinned so, a prompt has a dozen units or so

Choices = Mapping[str, str]
SEED = "seed"  # of requests and storage delays: a choice too, which is another in every scenario
PLAIN: Choices = {SEED: "0", **{knob.name: knob.plain for knob in KNOBS}}


def draw(seed: int, number: int) -> dict[str, str]:
    """The choices of the numbered scenario, whatever was drawn before it."""
    rng = Random(f"{seed}/{number}")
    choices = {SEED: str(number), **{knob.name: _draw_value(knob, rng) for knob in KNOBS}}
    for (name, value), (other, barred) in BARRED:
        if choices[name] == value and choices[other] == barred:
            choices[other] = PLAIN[other]
    return choices


def parse(name: str) -> tuple[int, int]:
    """Seed and number of a scenario's name."""
    seed, number = map(int, name.split("/"))
    return seed, number


def _draw_value(knob: Knob, rng: Random) -> str:
    plain, *others = knob.values
    if knob.plain_share is None:
        return rng.choice([plain, *others])
    return plain if rng.random() < knob.plain_share else rng.choice(others)


def overrides_of(choices: Choices) -> dict[str, object]:
    """What the choices override, in the order of the knobs."""
    merged: dict[str, object] = {"seed": int(choices[SEED])}
    for knob in KNOBS:
        merged |= knob.values[choices[knob.name]]
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that is ready: its configuration, its requests, and the knobs that make it so."""

    config: ExperimentConfig
    workload: Workload
    overrides: Mapping[str, object]

    @property
    def command(self) -> str | None:
        """How to ask for it elsewhere; None if no command line can name its requests."""
        if self.workload.name == TALK:
            return None
        words = [*BASE, "engine.check_invariants=true", *_words(self.overrides)]
        return shlex.join(["python", "-m", "experiments.run", *words])


def plan_of(choices: Choices, limit: int | None = None) -> Plan:
    """What to run; `limit`: the first requests only."""
    told = overrides_of(choices)
    ours = {key: value for key, value in told.items() if key.split(".")[0] in OURS}
    overrides = {key: value for key, value in told.items() if key not in ours}
    config = config_of(*BASE, *_words(overrides))
    page = config.cache.page_size
    overrides |= {
        "prefetch.threshold": page * int(ours["pages.prefetch.threshold"]),
        "scheduler.chunk_tokens": page * int(ours["pages.scheduler.chunk_tokens"]),
        "cache.checkpoint_tokens": 2 * unit_tokens(page),
    }
    if choices[WORKLOAD] == TALK:
        workload = make_talk(
            Talk(
                page_size=page,
                namespaces=int(ours["talk.namespaces"]),
                gap_s=float(ours["talk.gap_s"]),
                giants=int(ours["talk.giants"]),
                longest_answer=int(ours["talk.longest_answer"]),
                seed=config.seed,
            )
        )
    else:
        overrides |= _thinned(choices[WORKLOAD], page, float(ours["talk.gap_s"]))
        overrides["workload.limit"] = limit or NUM_REQUESTS
        settings = config_of(*BASE, *_words(overrides)).workload
        workload = load_workload(settings, data_dir=None, seed=config.seed)
    overrides |= _pools(config, workload, ours, overrides)
    return Plan(
        config=config_of(*BASE, *_words(overrides)),
        workload=replace(workload, requests=workload.requests[:limit]),
        overrides=overrides,
    )


def _thinned(kind: str, page: int, gap_s: float) -> dict[str, object]:
    """Generated conversations, as long as a talk's and as close together."""
    return {
        "workload.num_sessions": 16,
        "workload.session_rate": 0.05,
        "workload.token_stride": max(CHAT_UNITS[kind] // unit_tokens(page), 4),
        "workload.time_scale": gap_s / 20,
    }


def _pools(
    config: ExperimentConfig,
    workload: Workload,
    ours: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> dict[str, object]:
    """Memory for so many pages of each pool, in terms of what a long request takes."""
    model, page = config.model, config.cache.page_size
    sizes = model_kinds(model, page, config.tp).page_bytes
    longest = _longest_pages(workload, page)
    lens = (model.window_len, *(part.window_len for part in model.parts if part.window_len))
    windows = [-(-length // page) + 2 for length in lens]
    on_device = [round(each + 1 + longest * ours["pools.swa_device"]) for each in windows]
    on_host = [round((longest + each * 2) * ours["pools.swa_host"]) for each in windows]
    device = (
        round(longest * ours["pools.full_device"]) + 2,
        on_device[0],
        int(ours["pools.slots_device"]),
        *on_device[1:],
    )
    host = (
        round(longest * ours["pools.full_host"]),
        on_host[0],
        int(ours["pools.slots_host"]),
        *on_host[1:],
    )
    derived: dict[str, Any] = {}
    for tier, counts in (("device", device), ("host", host)):
        parts = [count * size for count, size in zip(counts, sizes, strict=True)]
        total = sum(parts) + sum(sizes) // 2
        derived[f"cache.{tier}_gib"] = total / GIB
        for kind, place in (("swa", 1), ("mamba", 2)):
            share = (parts[place] + sizes[place] // 4) / total if sizes[place] else None
            derived[f"cache.{kind}_{tier}_share"] = share
        told = [dict(each) for each in derived.get("model.parts", overrides.get("model.parts", ()))]
        windows_told = [each for each in told if "window_len" in each]
        for place, each in enumerate(windows_told, 3):
            each[f"{tier}_share"] = (parts[place] + sizes[place] // 4) / total
        if told:
            derived["model.parts"] = told
    page_total = sum(sizes)
    if ours["pools.storage"]:
        derived["storage.capacity_gib"] = longest * ours["pools.storage"] * page_total / GIB
    derived["storage.write_queue_gib"] = longest * ours["pools.write_queue"] * page_total / GIB
    return derived


def _longest_pages(workload: Workload, page: int) -> int:
    """Pages that a request takes which is longer than most."""
    lengths = sorted(each.prompt_len + each.output_len for each in workload.requests)
    return -(-lengths[len(lengths) * 19 // 20] // page) + 1


def _words(overrides: Mapping[str, object]) -> list[str]:
    return [f"{key}={_word(value)}" for key, value in overrides.items()]


def _word(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        objects = (",".join(f"{key}:{held}" for key, held in each.items()) for each in value)
        return f"[{','.join(f'{{{each}}}' for each in objects)}]"
    if isinstance(value, list | tuple):
        return str(list(value)).replace(" ", "")
    return str(value).replace(":", "\\:")

"""Inputs of a comparison: requests of a workload, pools that suit it, bytes of a model."""

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import islice

from experiments.diff import edges, odd
from experiments.diff.protocol import Pools, SideError
from hicache.config import WORKLOADS, TraceConfig, WorkloadConfig
from hicache.request import Request
from hicache.runs.schema import CONF, config_of
from hicache.workload.workload import load_workload

# pools small enough for evictions in each trace, as in docs/validity.md
ROOMS = {
    "weka_agentic": Pools(device_tokens=1_310_720, host_tokens=3_932_160, max_len=262_144),
    edges.NAME: edges.POOLS,
    odd.NAME: odd.POOLS,
}
ROOM = Pools(device_tokens=524_288, host_tokens=1_572_864, max_len=131_072)
WINDOW_LEN = 1024
CHUNK = 8192  # SGLang's default on a GPU of 80 GB
SWA_TOKENS = {
    "weka_agentic": 393_216,
    edges.NAME: edges.SWA_TOKENS,
    odd.NAME: odd.SWA_TOKENS,
}
NUM_STATES = {"weka_agentic": 64, edges.NAME: edges.NUM_STATES, odd.NAME: odd.NUM_STATES}
# the model that gives the bytes of a token or state, unless --model is given
MODELS = {
    "full": "llama3_8b",
    "swa": "gemma3_27b",
    "mamba": "qwen3_next_80b",
    "swa+mamba": "hymba_1b5",
}


def chosen(
    kind: str, count: int, pools: Pools, path: str | None = None, seed: int = 0
) -> list[Request]:
    """Return the first requests of a workload, without those too long for the pools.

    Args:
        kind: name of the workload.
        count: maximum number of requests.
        pools: `max_len` is the maximum of prompt and answer together, in tokens. The lengths in
            a generated workload depend on `page_size`.
        path: path of the trace file. None means to search for the file.
        seed: draws the requests of the `odd` workload.

    Raises:
        SideError: all requests are too long.
    """
    every: Sequence[Request]
    max_len = pools.max_len
    if kind == edges.NAME:
        every = edges.edges()
    elif kind == odd.NAME:
        every = odd.odd(count, seed, pools.page_size)
    else:
        chosen = WORKLOADS.get(kind, WorkloadConfig)
        is_trace = chosen is TraceConfig
        config = TraceConfig(kind=kind, path=path) if is_trace else chosen(kind=kind)
        every = load_workload(config, data_dir=os.environ.get("HICACHE_DATA"), seed=0).requests
    fitting = (each for each in every if each.prompt_len + each.output_len <= max_len)
    requests = list(islice(fitting, count))
    if not requests:
        shortest = min(each.prompt_len + each.output_len for each in every)
        raise SideError(
            f"no request of {kind} fits: the shortest has {shortest:,} tokens, but max_len is"
            f" {max_len:,}"
        )
    return requests


def pools_for(
    kind: str,
    components: str,
    changes: str,
    copies: str,
    *,
    chunk: int = CHUNK,
    has_storage: bool = True,
) -> Pools:
    """Return pool sizes that suit a workload.

    `kind` is the name of the workload. `components` lists the cached kinds, as in `full+swa+mamba`.
    `changes` overrides sizes, as in `device_tokens=262144,host_tokens=0`. `copies` is `instant`, or
    `delayed:N` if a copy completes N requests later. `chunk` is the number of prompt tokens that
    are computed at once. `has_storage` is True if the engine has a storage tier.

    Raises:
        SideError: a name in `changes` is unknown, or a number is invalid.
    """
    pools = ROOMS.get(kind, ROOM)
    if "swa" in components:
        swa_tokens = SWA_TOKENS.get(kind, 196_608)
        pools = replace(pools, window_len=WINDOW_LEN, swa_tokens=swa_tokens)
    if "mamba" in components:
        pools = replace(pools, num_states=NUM_STATES.get(kind, 160))
    known = {each.name: each.type for each in fields(Pools)}
    values: dict[str, object] = {"chunk_tokens": chunk}
    for part in filter(None, changes.split(",")):
        name, _, value = part.partition("=")
        if name not in known or not value.isdigit():
            raise SideError(f"--pools must be NAME=NUMBER,... of {', '.join(known)}, got {part!r}")
        values[name] = bool(int(value)) if name == "has_storage" else int(value)
    how, _, delay = copies.partition(":")
    if copies != "instant":
        if how != "delayed" or not delay.isdigit():
            raise SideError(f"--copies must be instant or delayed:N, got {copies!r}")
        values["copy_delay"] = int(delay)
    pools = replace(pools, **values)  # type: ignore[arg-type]
    if pools.host_tokens == 0 or not has_storage:
        pools = replace(pools, has_storage=False)
    if pools.chunk_tokens < 1 or pools.chunk_tokens % pools.page_size:
        raise SideError(
            f"--chunk must be a multiple of page_size={pools.page_size}, got {pools.chunk_tokens}"
        )
    needed = pools.num_running * pools.page_size
    if pools.device_tokens < needed:
        raise SideError(
            f"device_tokens={pools.device_tokens} must be at least {needed}: one page for each of"
            f" {pools.num_running} requests"
        )
    if pools.max_len > pools.device_tokens:
        raise SideError(
            f"requests of up to max_len={pools.max_len:,} tokens do not fit in"
            f" device_tokens={pools.device_tokens:,}"
        )
    return pools


def bytes_of(model: str, component: str) -> dict[str, int]:
    """Return the bytes per token of full-attention and sliding-window KV, and per Mamba state.

    The keys are `full`, `swa` and `mamba`. `component` lists those that the model must have, as in
    `full+swa`.

    Raises:
        SideError: there is no file for the model in `conf/model`, or the model lacks one of them.
    """
    path = CONF / "model" / f"{model}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in path.parent.glob("*.yaml")))
        raise SideError(f"--model must be one of {known}, got {model!r}")
    shape = config_of(f"model={model}").model
    unit_bytes = {
        "full": shape.full_token_bytes,
        "swa": shape.swa_token_bytes,
        "mamba": shape.mamba_slot_bytes,
    }
    for kind in component.split("+"):
        if unit_bytes[kind] == 0:
            raise SideError(f"--model {model} has no {kind} layers")
    return unit_bytes

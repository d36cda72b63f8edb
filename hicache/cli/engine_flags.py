"""The changes that `hicache advise` tries, with the options of SGLang 0.5.23 and vLLM 0.33.

A part is one thing that can be changed, such as the host cache. Its first choice is what the server
does today. An arm has one choice of each part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hicache.models import GIB

COMPAT = {"sglang": "sglang_0_5_23", "vllm": "vllm_0_33"}
# the settings of each part, by the beginnings of their names
SETTINGS = {
    "host": ("cache.host_gib", "cache.host."),
    "storage": ("storage",),
    "write": ("cache.write_policy",),
    "stop": ("prefetch.stop",),
    "states": ("cache.checkpoint", "scheduler.chunk_tokens"),
}
# what a server does if the user names no other choice: no host cache, and no storage
TODAY = "as today"
OFF = {"host": ("cache.host_gib=0",), "storage": ("storage=none",)}
EXTRA = "--kv-transfer-config.kv_connector_extra_config"  # vLLM
TOKENS = (2048, 16384)  # between two states
# by engine: a part, its values (empty: as the user or the model says), the choice in words, the
# settings of a run, and the options of the engine
Form = tuple[str, tuple[Any, ...], str, tuple[str, ...], str]
HOST = "host", (), "host cache of {x:g} GiB", ("cache.host_gib={x:g}",)
# fmt: off
FORMS: dict[str, list[Form]] = {
    "sglang": [
        (*HOST, "--enable-hierarchical-cache --hicache-size {gb}"),
        ("storage", (), "storage ({x})", ("storage={x}",), "--hicache-storage-backend file"),
        ("write", ("write_through_selective", "write_back", "write_through"),
         "write policy {x}", ("cache.write_policy={x}",), "--hicache-write-policy {x}"),
        ("stop", ("best_effort", "wait_complete", "timeout"),
         "prefetch stops by {x}", ("prefetch.stop={x}",), "--hicache-storage-prefetch-policy {x}"),
        ("states", (), "a state at the end of each chunk of {x:,} tokens",
         ("scheduler.chunk_tokens={x}",), "--chunked-prefill-size {x}"),
    ],
    "vllm": [
        (*HOST, "--kv-offloading-size {x:g}"),
        ("storage", (), "storage ({x})", ("storage={x}", "prefetch.stop=wait_complete"),
         f"{EXTRA}.spec_name TieringOffloadingSpec {EXTRA}.secondary_tiers "
         """'[{{"type": "fs", "root_dir": "DIRECTORY"}}]'"""),
        ("write", (2,), "copies to the host what is computed twice",
         ("cache.write_policy=write_through_selective",), EXTRA + ".store_threshold {x}"),
        ("states", (), "{kept} kept every {x:,} tokens, too",
         ("cache.checkpoints=every", "cache.checkpoint_tokens={x}"),
         "--prefix-cache-retention-interval {x}"),
    ],
}
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value of a part.

    Attributes:
        part: a key of `SETTINGS`.
        what: the choice in words.
        overrides: the settings of a run.
        flags: the options of the engine.
        host_gib: size of the host cache of an engine in GiB.
        is_on: False if the part is not used, such as a server without storage.
    """

    part: str
    what: str
    overrides: tuple[str, ...] = ()
    flags: str = ""
    host_gib: float = 0.0
    is_on: bool = True


Arm = tuple[Choice, ...]  # one choice of each part, in the order of the parts
Grid = dict[str, list[Choice]]


def todays(typed: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the settings of each part today."""
    return {
        part: tuple(each for each in typed if each.startswith(names)) or OFF.get(part, ())
        for part, names in SETTINGS.items()
    }


def grid_of(
    engine: str,
    now: dict[str, tuple[str, ...]],
    *,
    host_gib: float,
    has_storage: bool,
    kept: str | None,
    sizes: Sequence[float],
    storage: str,
    num_devices: int,
) -> Grid:
    """Return the choices of each part, first that of today.

    Args:
        engine: a key of `COMPAT`.
        now: the settings of each part today.
        host_gib, has_storage: the host cache and the storage of the server today.
        kept: what the model keeps at some positions: states, windows, or None for neither.
        sizes: sizes in GiB of the host cache of one engine.
        storage: the storage to try, a file of `conf/storage/`.
        num_devices: number of devices of an engine.
    """
    grid: Grid = {}
    for part, overrides in now.items():
        is_on = {"host": host_gib > 0, "storage": has_storage}.get(part, True)
        gib = host_gib if part == "host" else 0
        grid[part] = [Choice(part=part, what=TODAY, overrides=overrides, is_on=is_on, host_gib=gib)]
    has_states = kept == "states" or (engine == "vllm" and kept is not None)
    wanted: dict[str, Sequence[Any]] = {"host": sizes, "storage": (storage,)}
    wanted["states"] = TOKENS if has_states else ()
    for part, values, what, told, flags in FORMS[engine]:
        for x in values or wanted[part]:
            gib = x if part == "host" else 0.0
            # SGLang's gigabytes are 10**9 bytes of each device
            named = {"x": x, "kept": kept, "gb": int(gib * GIB / num_devices / 1e9)}
            what_now, flags_now = what.format(**named), flags.format(**named)
            overrides = tuple(each.format(**named) for each in told)
            grid[part].append(
                Choice(part=part, what=what_now, overrides=overrides, flags=flags_now, host_gib=gib)
            )
    return grid


def neighbors(grid: Grid, arm: Arm) -> list[Arm]:
    """Return the arms that differ from `arm` in one part.

    Storage needs a host cache. If `arm` has none, storage comes with the smallest one.
    """
    found = []
    for choice in (each for part in grid.values() for each in part):
        new = {each.part: each for each in arm} | {choice.part: choice}
        if choice.part == "storage" and choice.is_on and not new["host"].is_on:
            new["host"] = next(each for each in grid["host"] if each.is_on)
        if choice not in arm and is_possible(tuple(new.values()), grid):
            found.append(tuple(new.values()))
    return found


def is_possible(arm: Arm, grid: Grid) -> bool:
    """False if a choice of the arm, other than that of today, has no effect."""
    used = {each.part: each.is_on for each in arm}
    needs = {"storage": "host", "write": "host", "stop": "storage"}
    return all(
        used[needs[each.part]]
        for each in arm
        if each.part in needs
        and each.is_on
        and (each.part == "storage" or each != grid[each.part][0])
    )

"""A scenario: one value of every knob, and the run that they describe."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from random import Random
from types import MappingProxyType
from typing import Any

from hicache.config import WORKLOADS, ExperimentConfig
from hicache.memory import model_kinds
from hicache.models import GIB
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload, load_workload
from tests.fuzz.knobs import BARRED, KNOBS, WORKLOAD, Knob, overrides_of
from tests.fuzz.talk import NUM_REQUESTS, TALK, Talk, unit_tokens

BASE_KIND = "chat"
BASE = (
    f"workload={BASE_KIND}",
    "model=tiny_hybrid",
    "storage=memory",
    "tracker.wandb_mode=disabled",
    "tracker.interval_s=0.02",
)
# thinned so, a prompt has a dozen units or so
CHAT_UNITS = {"chat": 512, "agents": 2048, "multi_turn": 1024, "shared_prefix": 512}

Choices = Mapping[str, str]
SEED = "seed"  # of requests and storage delays: a choice too, which is another in every scenario
PLAIN: Choices = {SEED: "0", **{knob.name: next(iter(knob.values)) for knob in KNOBS}}


def choices_of(words: Sequence[str]) -> dict[str, str]:
    """Return the plain choices, changed by `words`, each of which is `knob=value`.

    Raises:
        ValueError: there is no such knob or value.
    """
    choices = dict(PLAIN)
    values = {knob.name: knob.values for knob in KNOBS}
    for word in words:
        knob, _, value = word.partition("=")
        if knob not in PLAIN:
            raise ValueError(f"there is no {knob}; scenarios differ in {', '.join(PLAIN)}")
        if value not in values.get(knob, [value]):
            raise ValueError(f"{knob} is one of {', '.join(values[knob])}, not {value}")
        choices[knob] = value
    return choices


def draw(seed: int, number: int, fixed: Choices = MappingProxyType({})) -> dict[str, str]:
    """Draw the choices of scenario `number`; none depends on another scenario or knob.

    Choices of `fixed` are not drawn, and a drawn choice that conflicts with them becomes plain.
    """
    choices = {SEED: str(number)}
    for knob in KNOBS:
        choices[knob.name] = _draw_value(knob, Random(f"{seed}/{number}/{knob.name}"))
    choices |= fixed
    for (name, value), (other, barred) in BARRED:
        if choices[name] == value and choices[other] == barred:
            gives_way = name if other in fixed else other
            choices[gives_way] = PLAIN[gives_way]
    return choices


def _draw_value(knob: Knob, rng: Random) -> str:
    plain, *others = knob.values
    if knob.plain_share is None:
        return rng.choice([plain, *others])
    return plain if rng.random() < knob.plain_share else rng.choice(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The configuration and the requests of a run, and the overrides that they follow from."""

    config: ExperimentConfig
    workload: Workload
    overrides: Mapping[str, object]


def plan_of(choices: Choices, limit: int | None = None) -> Plan:
    """Return the run of these choices, with its first `limit` requests (None: all)."""
    overrides: dict[str, Any] = {"seed": int(choices[SEED])}
    for knob in KNOBS:
        overrides |= overrides_of(knob.values[choices[knob.name]])
    overrides |= {
        "workload.num_sessions": 16,
        "workload.session_rate": 0.05,
    }
    # only settings that this kind of workload has
    kind = BASE_KIND if choices[WORKLOAD] == TALK else choices[WORKLOAD]
    own = {f"workload.{each.name}" for each in fields(WORKLOADS[kind])}
    overrides = {
        key: value
        for key, value in overrides.items()
        if not key.startswith("workload.") or key in own
    }
    pools, talk, pages = (_split_off(overrides, area) for area in ("pools", "talk", "pages"))
    config = config_of(*BASE, *_words(overrides))
    page = config.cache.page_size
    overrides |= {
        **{key: page * count for key, count in pages.items()},
        "cache.checkpoint_tokens": 2 * unit_tokens(page),
    }
    if choices[WORKLOAD] == TALK:
        workload = Talk(page_size=page, seed=config.seed, **talk).workload()
    else:
        # generated conversations, as long as a talk's and as close together
        stride = max(CHAT_UNITS[choices[WORKLOAD]] // unit_tokens(page), 4)
        overrides |= {
            "workload.token_stride": stride,
            "workload.time_scale": talk["gap_s"] / 20,
            "workload.limit": limit or NUM_REQUESTS,
        }
        settings = config_of(*BASE, *_words(overrides)).workload
        workload = load_workload(settings, data_dir=None, seed=config.seed)
    overrides |= _pools(config, workload, pools)
    return Plan(
        config=config_of(*BASE, *_words(overrides)),
        workload=replace(workload, requests=workload.requests[:limit]),
        overrides=overrides,
    )


def _in_tokens(
    tier: str, counts: Sequence[int], sizes: Sequence[int], page: int
) -> dict[str, object]:
    """Overrides that give the pools of a tier in tokens and states instead of shares."""
    numbers = (counts[0] * page, counts[1] * page, counts[2])
    names = ("tokens.full", "tokens.swa", "states")
    least = 1 if tier == "device" else 0
    return {
        f"cache.{tier}.{name}": max(number, least)
        for name, number, size in zip(names, numbers, sizes, strict=False)
        if size
    }


def _split_off(overrides: dict[str, Any], area: str) -> dict[str, Any]:
    """Remove the numbers whose keys begin with `area`; return them by the rest of the key."""
    keys = [key for key in overrides if key.startswith(f"{area}.")]
    return {key.partition(".")[2]: json.loads(overrides.pop(key)) for key in keys}


def _pools(
    config: ExperimentConfig, workload: Workload, wanted: Mapping[str, Any]
) -> dict[str, object]:
    """Overrides for the sizes of all pools; `wanted` gives them relative to a long request."""
    model, page = config.model, config.cache.page_size
    sizes = model_kinds(model, page, config.tp).page_bytes
    longest = _longest_pages(workload, page)
    lens = (model.window_len, *(part.window_len for part in model.parts if part.window_len))
    windows = [-(-length // page) + 2 for length in lens]
    swa, *others = [round(each + 1 + longest * wanted["swa_device"]) for each in windows]
    device = round(longest * wanted["full_device"]) + 2, swa, wanted["slots_device"], *others
    swa, *others = [round((longest + each * 2) * wanted["swa_host"]) for each in windows]
    host = round(longest * wanted["full_host"]), swa, wanted["slots_host"], *others
    derived: dict[str, Any] = {}
    parts = [{name: value for name, value in asdict(each).items() if value} for each in model.parts]
    for tier, counts in (("device", device), ("host", host)):
        in_bytes = [count * size for count, size in zip(counts, sizes, strict=True)]
        total = sum(in_bytes) + sum(sizes) // 2
        shares = [
            (num_bytes + size // 4) / total for num_bytes, size in zip(in_bytes, sizes, strict=True)
        ]
        derived[f"cache.{tier}_gib"] = total / GIB
        for name, share, size in zip(("swa", "mamba"), shares[1:], sizes[1:], strict=False):
            if size:
                derived[f"cache.{tier}.share.{name}"] = share
        if wanted["in_tokens"]:
            derived |= _in_tokens(tier, counts, sizes, page)
        windowed = [each for each in parts if "window_len" in each]
        for each, share in zip(windowed, shares[3:], strict=True):
            each[f"{tier}_share"] = share
    if parts:
        derived["model.parts"] = parts
    longest_gib = longest * sum(sizes) / GIB
    if wanted["storage"]:
        derived["storage.capacity_gib"] = wanted["storage"] * longest_gib
    derived["storage.write_queue_gib"] = wanted["write_queue"] * longest_gib
    return derived


def _longest_pages(workload: Workload, page: int) -> int:
    """The number of pages of a request that is longer than 95 % of all requests."""
    lengths = sorted(each.prompt_len + each.output_len for each in workload.requests)
    return -(-lengths[len(lengths) * 19 // 20] // page) + 1


def _words(overrides: Mapping[str, object]) -> list[str]:
    return [f"{key}={_word(value)}" for key, value in overrides.items()]


def _word(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_word(held)}' for key, held in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_word, value))}]"
    return "null" if value is None else str(value)

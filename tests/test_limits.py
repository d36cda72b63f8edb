"""Every numeric setting has limits, at both ends."""

import re
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass, replace
from math import inf, nan
from typing import Any

import pytest

from hicache.config import LEAST_FLOAT, MOST_FLOAT, MOST_INT, ExperimentConfig
from hicache.engine.deployment import deploy
from hicache.models.shapes import Part
from hicache.runs.schema import config_of


def numeric(schema: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            yield from numeric(item.type, f"{prefix}{item.name}.")
        elif re.search(r"\b(int|float)\b", str(item.type)) and item.name != "policy_args":
            yield prefix + item.name, item


FIELDS = dict(numeric(ExperimentConfig))
# their bounds are in `hicache.models.plausible`, since they depend on each other
MODELS = ("model.", "hardware.")
KNOBS = [name for name in FIELDS if not name.startswith(MODELS)]


BASE = config_of("model=qwen3_next_80b", "hardware=h200")
WITH_PART = config_of("model=glm5_3", "hardware=h200")


def with_value(config: Any, name: str, value: object) -> Any:
    """The same settings, but for the one of this name."""
    first, _, rest = name.partition(".")
    held = getattr(config, first)
    if rest:
        value = with_value(held, rest, value)
    elif isinstance(held, tuple):
        value = (value,)
    elif isinstance(held, dict):
        value = {"full": value}
    return replace(config, **{first: value})


def is_whole(name: str) -> bool:
    return "float" not in str(FIELDS[name].type)


def test_every_numeric_setting_is_walked() -> None:
    assert len(KNOBS) > 100
    assert {"cache.page_size", "workload.stage_rates", "scheduler.clip_new_tokens"} <= set(KNOBS)


@pytest.mark.parametrize("name", KNOBS)
def test_a_setting_has_a_limit_at_both_ends(name: str) -> None:
    limits = FIELDS[name].metadata
    most = limits["most"] or (MOST_INT if is_whole(name) else MOST_FLOAT)
    low = limits["least"] if limits["above"] is None else limits["above"]
    wrong = [low - 1, -(10**30), most * 2 + 2, 10**300]
    if not is_whole(name):
        wrong += [float(each) for each in wrong] + [nan, inf, -inf]
    for value in wrong:
        with pytest.raises(ValueError, match=rf"^{name}(\.full)? must be "):
            with_value(BASE, name, value)


@pytest.mark.parametrize("name", KNOBS)
def test_a_setting_at_its_limits_is_accepted_or_refused_in_one_sentence(name: str) -> None:
    limits = FIELDS[name].metadata
    low = limits["least"]
    if limits["above"] is not None:
        low = 1 if is_whole(name) else LEAST_FLOAT
    most = limits["most"] or (MOST_INT if is_whole(name) else MOST_FLOAT)
    for value in (low, most):
        told = ""
        try:
            with_value(BASE, name, value)
        except ValueError as refused:  # it contradicts another setting
            told = str(refused)
        assert "\n" not in told
        assert not told.startswith(f"{name} must be at ")


@pytest.mark.parametrize("name", [name for name in FIELDS if name.startswith(MODELS)])
def test_a_number_of_a_model_or_machine_is_bounded(name: str) -> None:
    for value in (10**300, -1) if is_whole(name) else (nan, inf, 1e300, -1.0):
        with pytest.raises(ValueError, match=r"\w+"):
            with_value(BASE, name, value)
    for value in (0, 1, 10**18):
        works_or_is_refused(lambda value=value: with_value(BASE, name, value))


def works_or_is_refused(make: Callable[[], ExperimentConfig]) -> None:
    try:
        deploy(make()).cost.prefill_s(0, 1000)
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    assert "\n" not in refused


@pytest.mark.parametrize("item", [each for each in fields(Part) if each.type in (int, float)])
def test_a_number_of_a_part_works_or_is_refused(item: Field) -> None:
    (part,) = WITH_PART.model.parts

    def with_part(value: float) -> ExperimentConfig:
        parts = (replace(part, **{item.name: value}),)
        return replace(WITH_PART, model=replace(WITH_PART.model, parts=parts))

    for value in (10**300, -1) if item.type is int else (nan, inf, 1e300, -1.0):
        with pytest.raises(ValueError, match=r"\w+"):
            with_part(value)
    for value in (0, 1, 10**18):
        works_or_is_refused(lambda value=value: with_part(value))

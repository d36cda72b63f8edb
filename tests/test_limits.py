"""Every numeric setting has a lower and an upper limit."""

import re
from dataclasses import fields, is_dataclass, replace
from math import inf, nan

import pytest

from hicache.config import ExperimentConfig
from hicache.engine.deployment import deploy
from hicache.knob import LEAST_FLOAT, MOST_FLOAT, MOST_INT
from hicache.models.shapes import Part
from hicache.runs.schema import config_of


def numeric(schema, prefix=""):
    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            yield from numeric(item.type, f"{prefix}{item.name}.")
        elif re.search(r"\b(int|float)\b", str(item.type)) and item.name != "policy_args":
            yield prefix + item.name, item


FIELDS = dict(numeric(ExperimentConfig))
# their limits are in `hicache.models.plausible`, since they depend on each other
MODELS = ("model.", "hardware.")
KNOBS = [name for name in FIELDS if not name.startswith(MODELS)]
BASE = config_of("model=qwen3_next_80b", "hardware=h200")
WITH_PART = config_of("model=glm5_3", "hardware=h200")


def with_value(config, name, value):
    """The same settings, but with `value` for the setting `name`."""
    first, _, rest = name.partition(".")
    held = getattr(config, first)
    if rest:
        value = with_value(held, rest, value)
    elif isinstance(held, tuple):
        value = (value,)
    elif isinstance(held, dict):
        value = {"full": value}
    return replace(config, **{first: value})


def refusal(make):
    """The message with which a value is refused; empty if it is accepted."""
    try:
        make()
    except ValueError as refused:
        return str(refused)
    return ""


def is_whole(name):
    return "float" not in str(FIELDS[name].type)


def test_every_numeric_setting_is_found():
    assert len(KNOBS) > 70
    assert {"cache.page_size", "cache.device.share"} <= set(KNOBS)


@pytest.mark.parametrize("name", KNOBS)
def test_a_setting_beyond_its_limits_is_refused_by_name(name):
    limits = FIELDS[name].metadata
    most = limits["most"] or (MOST_INT if is_whole(name) else MOST_FLOAT)
    least = low = limits["least"]
    if limits["above"] is not None:
        low, least = limits["above"], 1 if is_whole(name) else LEAST_FLOAT
    wrong = [low - 1, -(10**30), most * 2 + 2, 10**300]
    if not is_whole(name):
        wrong += [float(each) for each in wrong] + [nan, inf, -inf]
    for value in wrong:
        with pytest.raises(ValueError, match=rf"^{name}(\.full)? must be "):
            with_value(BASE, name, value)
    for value in (least, most):
        told = refusal(lambda value=value: with_value(BASE, name, value))
        # a limit may contradict another setting
        assert "\n" not in told
        assert not told.startswith(f"{name} must be at ")


def check_bounded(make, *, is_whole):
    """Check that absurd values are refused, and that others work or are refused in one line."""
    for value in (10**300, -1) if is_whole else (nan, inf, 1e300, -1.0):
        with pytest.raises(ValueError, match=r"\w+"):
            make(value)
    for value in (0, 1, 10**18):
        told = refusal(lambda value=value: deploy(make(value)).cost.prefill_s(0, 1000))
        assert "\n" not in told


@pytest.mark.parametrize("name", [name for name in FIELDS if name.startswith(MODELS)])
def test_a_number_of_a_model_or_machine_is_bounded(name):
    check_bounded(lambda value: with_value(BASE, name, value), is_whole=is_whole(name))


@pytest.mark.parametrize("item", [each for each in fields(Part) if each.type in (int, float)])
def test_a_number_of_a_part_of_a_model_is_bounded(item):
    (part,) = WITH_PART.model.parts

    def with_part(value):
        parts = (replace(part, **{item.name: value}),)
        return replace(WITH_PART, model=replace(WITH_PART.model, parts=parts))

    check_bounded(with_part, is_whole=item.type is int)

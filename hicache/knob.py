"""What a setting (knob) is: a field of a frozen dataclass, with limits that are checked."""

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from enum import Enum
from math import isfinite
from operator import attrgetter
from typing import Any

# bounds of numbers that have no narrower ones: 30 years of seconds, 1e9 GiB or GB/s
MOST_INT, MOST_FLOAT, LEAST_FLOAT = (1 << 31) - 1, 1e9, 1e-6


def knob(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    ours: tuple[str, ...] | None = None,
    one_of: tuple[str, ...] | None = None,
    only: str | None = None,
) -> Any:
    """Return a dataclass field for a setting, with limits that `check_limits` enforces.

    `least` and `most` are inclusive bounds; `above` is an exclusive lower bound. A number without
    `most` is at most `MOST_INT` or `MOST_FLOAT`, and one above 0 at least `LEAST_FLOAT`: beyond,
    times and sizes leave the range of their types. `ours` lists the
    built-in names; a user's class, written `module:Class`, is allowed as well. `one_of` lists the
    only allowed values. None is allowed if the type of the field allows it. `only` names the
    settings with which this setting has an effect. It is `group.setting=VALUE,VALUE`, or several of
    these joined by ` or `; `1..` stands for 1 and all larger numbers.
    """
    limits = {"least": least, "above": above, "most": most, "ours": ours, "one_of": one_of}
    metadata = {**limits, "only": only}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def share(default: float | None) -> Any:
    """Return a dataclass field for a setting between 0 and 1, both included."""
    return knob(default, least=0, most=1)


def check_limits(group: str, config: Any) -> None:
    """Check that each setting in `config` lies within the limits of its dataclass field.

    `group` is the name of the group of settings, for error messages.

    Raises:
        ValueError: a value is outside its limits.
    """
    for item in fields(config):
        limits = item.metadata
        held, name = getattr(config, item.name), f"{group}.{item.name}".lstrip(".")
        values = (
            {f"{name}.{key}": each for key, each in held.items()}
            if isinstance(held, dict)
            else {name: held}
        )
        for place, value in values.items():
            for each in value if isinstance(value, tuple | list) else (value,):
                if limits and each is not None:
                    if isinstance(each, int | float) and not isinstance(each, bool):
                        _check_range(place, each, limits)
                    _check_limits(place, each, limits)


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if limits["one_of"] is not None and value not in limits["one_of"]:
        ours = ", ".join(limits["one_of"])
        hint = "; a class of your own goes in cache.policy" if ":" in str(value) else ""
        raise ValueError(f"{name} must be one of {ours}, got {value!r}{hint}")
    if limits["ours"] is not None and value not in limits["ours"] and ":" not in value:
        ours = ", ".join(limits["ours"])
        raise ValueError(f"{name} must be one of {ours} or module:Class, got {value!r}")


def _check_range(name: str, value: float, limits: Mapping[str, Any]) -> None:
    if not isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    least, above, most = limits["least"], limits["above"], limits["most"]
    if above is not None and value <= above:
        raise ValueError(f"{name} must be above {above}, got {value}")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} must be between {least} and {most}, got {value}")
    if above is not None and isinstance(value, float):
        least = max(least or 0, LEAST_FLOAT)
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    top = MOST_FLOAT if isinstance(value, float) else MOST_INT
    if value > top:
        raise ValueError(f"{name} must be at most {top:,}, got {value:g}")


def inert_knobs(
    config: Any, groups: Mapping[str, str], prefix: str = "", top: Any = None
) -> dict[str, str]:
    """Return the settings that have no effect in `config`, each with the setting that it needs.

    For example, `storage.write_hits` needs `storage.write=selective`. `groups` names the settings
    that whole groups need. Callers give only these two; the other parameters are for the recursion.
    """
    found: dict[str, str] = {}
    of_group = groups.get(prefix.partition(".")[0])
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            found |= inert_knobs(value, groups, f"{prefix}{item.name}.", top or config)
        for only in (item.metadata.get("only"), of_group):
            if only is None:
                continue
            needs = [need.partition("=") for need in only.split(" or ")]
            is_met = any(
                place == prefix + item.name or _is_met(place, values, top or config)
                for place, _, values in needs
            )
            if not is_met:
                found[prefix + item.name] = only
    return found


def _is_met(place: str, allowed: str, config: Any) -> bool:
    value = attrgetter(place.removesuffix(">"))(config)
    if place.endswith(">"):  # `place` and `allowed` are the two sides of "parallel.pp>=2"
        return bool(value >= int(allowed))
    name = value.name if isinstance(value, Enum) else str(value)
    return name in allowed.split(",") or (":" in name and ":" in allowed)

"""Policies by name: one of ours, or a class in a file of the user's own."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Policy = TypeVar("Policy")


def make_policy(
    knob: str,
    name: str,
    ours: Mapping[str, Callable[..., Policy]],
    *arguments: object,
    wants: Iterable[str],
    knobs: Mapping[str, float] | None = None,
) -> Policy:
    """Build the policy that a knob names, from `arguments`.

    Args:
        knob: for the messages, as it is typed.
        name: a key of `ours`, or `module:Class`.
        ours: what there is.
        arguments: what every policy of this sort is built with.
        wants: attributes that one of the user's own must have.
        knobs: of this policy alone; keyword arguments.

    Raises:
        ValueError: there is no such policy, it lacks an attribute, or has no such knobs.
    """
    module, _, attribute = name.partition(":")
    try:
        make = ours.get(name) or getattr(importlib.import_module(module), attribute)
        policy: Policy = make(*arguments, **(knobs or {}))
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{knob}={name} cannot be loaded: {error}") from error
    missing = [each for each in wants if not hasattr(policy, each)]
    if missing:
        raise ValueError(f"{knob}={name} has no {', '.join(missing)}")
    return policy

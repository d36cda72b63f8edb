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
) -> Policy:
    """Build the policy that a knob names, from `arguments`.

    Args:
        knob: for the messages, as it is typed.
        name: a key of `ours`, or `module:Class`.
        ours: what there is.
        arguments: what every policy of this sort is built with.
        wants: attributes that one of the user's own must have.

    Raises:
        ValueError: there is no such policy, or it lacks an attribute.
    """
    if name in ours:
        return ours[name](*arguments)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{knob} must be one of {', '.join(ours)} or module:Class, got {name!r}")
    try:
        policy: Policy = getattr(importlib.import_module(module), attribute)(*arguments)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{knob}={name} cannot be loaded: {error}") from error
    missing = [each for each in wants if not hasattr(policy, each)]
    if missing:
        raise ValueError(f"{knob}={name} has no {', '.join(missing)}")
    return policy

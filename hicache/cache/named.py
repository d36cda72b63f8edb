"""Policies by name: one of ours, or a class in a file of the user's own, which is held to its word.

What a user's class answers is checked each time. That it left alone what it was shown is checked
the first thousand times, and then now and again.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, TypeVar

import numpy as np

Policy = TypeVar("Policy")
ALL_COMPARED = 1_000  # questions to one method
COMPARED_EVERY = 64  # after those


class PolicyError(RuntimeError):
    """A class of the user's own broke its word: which, what it was asked, and what it did.

    `place` is the line of theirs to look at, as a traceback has it, where no exception tells it.
    """

    def __init__(self, told: str, place: str = "") -> None:
        super().__init__(told)
        self.place = place


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method has to return, or an attribute to be."""

    wanted: str
    fits: Callable[[Any], bool]


def is_number(value: object) -> bool:
    """Whether this is a finite number, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) < inf  # type: ignore[operator]


def is_whole(value: object) -> bool:
    """Whether this is a whole number."""
    return is_number(value) and value == int(value)  # type: ignore[call-overload]


FLAG = Answer("True or False", lambda value: isinstance(value, (bool, np.bool_)))
NUMBER = Answer("a finite number", is_number)
TOKENS = Answer("a whole number of tokens", lambda value: is_whole(value) and value >= 0)
MOMENT = Answer("None or a time in whole nanoseconds", lambda v: v is None or is_whole(v))
RANKING = Answer(
    "a tuple of finite numbers",
    lambda value: isinstance(value, tuple) and len(value) > 0 and all(map(is_number, value)),
)
LENGTHS = Answer("a list of whole numbers", lambda v: isinstance(v, list) and all(map(is_whole, v)))


def make_policy(
    knob: str,
    name: str,
    ours: Mapping[str, Callable[..., Policy]],
    *arguments: object,
    wants: Mapping[str, Answer],
    knobs: Mapping[str, float] | None = None,
) -> Policy:
    """Build the policy that a knob names, from `arguments`.

    Args:
        knob: for the messages, as it is typed.
        name: a key of `ours`, or `module:Class`.
        ours: what there is.
        arguments: what every policy of this sort is built with.
        wants: methods and attributes that one of the user's own must have, and what they give.
        knobs: of this policy alone; keyword arguments.

    Raises:
        ValueError: there is no such policy, or it has no such knobs.
        PolicyError: a class of the user's own cannot be built, or lacks an attribute.
    """
    module, _, attribute = name.partition(":")
    try:
        make = ours.get(name) or getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{knob}={name} cannot be loaded: {error}") from error
    try:
        policy: Policy = make(*arguments, **(knobs or {}))
    except Exception as error:
        if isinstance(error, TypeError) and not _is_inside(error):
            raise ValueError(f"{knob}={name} cannot be built: {error}") from error
        raise PolicyError(f"{knob}={name} cannot be built: {told(error)}") from error
    if name in ours:
        return policy
    missing = [each for each in wants if not hasattr(policy, each)]
    if missing:
        raise PolicyError(f"{knob}={name} lacks {', '.join(missing)}", _place_of(make))
    return _HeldToItsWord(f"{knob}={name}", policy, wants)  # type: ignore[return-value]


def told(error: BaseException) -> str:
    """An exception in a few words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _HeldToItsWord:
    """Stands for a policy, and checks what it gives."""

    def __init__(self, name: str, policy: object, wants: Mapping[str, Answer]) -> None:
        for attribute, answer in wants.items():
            given = getattr(policy, attribute)
            if callable(given):
                given = _checked(name, attribute, given, answer)
            else:
                _refuse_unless(answer, given, f"{name}: {attribute}", _place_of(type(policy)))
            setattr(self, attribute, given)


def _checked(
    name: str, method: str, ask: Callable[..., object], answer: Answer
) -> Callable[..., object]:
    num_asked = 0

    def asked(*arguments: object, **named: object) -> object:
        nonlocal num_asked
        num_asked += 1
        # it may be asked a thousand times a second of a run, and what it is shown may be long
        compares = num_asked <= ALL_COMPARED or num_asked % COMPARED_EVERY == 0
        shown = [_portrait(each) for each in arguments] if compares else None
        try:
            given = ask(*arguments, **named)
            if answer is LENGTHS and isinstance(given, Iterable):
                given = list(given)
        except Exception as error:
            call = _described(name, method, arguments, named)
            place = "" if _is_inside(error) else _place_of(ask)
            raise PolicyError(f"{call} raised {told(error)}", place) from error
        if not answer.fits(given):
            call = _described(name, method, arguments, named)
            _refuse_unless(answer, given, call, _place_of(ask))
        if shown is not None and shown != [_portrait(each) for each in arguments]:
            call = _described(name, method, arguments, named)
            raise PolicyError(
                f"{call} modified its arguments, which it must leave unchanged", _place_of(ask)
            )
        return given

    return asked


def _refuse_unless(answer: Answer, given: object, call: str, place: str = "") -> None:
    if not answer.fits(given):
        raise PolicyError(f"{call}: expected {answer.wanted}, got {given!r:.200}", place)


def _is_inside(error: BaseException) -> bool:
    """Whether it was raised in what was called, not by the call itself."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _place_of(thing: object) -> str:
    """Where a method or a class is written, in the form of a traceback; empty if nobody knows."""
    try:
        lines, number = inspect.getsourcelines(thing)  # type: ignore[arg-type]
        file = inspect.getsourcefile(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""
    name = getattr(thing, "__qualname__", "")
    return f'  File "{file}", line {number}, in {name}\n    {lines[0].strip()}'


def _described(
    name: str, method: str, arguments: tuple[object, ...], named: Mapping[str, object]
) -> str:
    parts = [f"{each!r:.80}" for each in arguments]
    parts += [f"{key}={value!r:.80}" for key, value in named.items()]
    return f"{name}: {method}({', '.join(parts)})"


def _portrait(thing: object) -> list[object] | None:
    """What an object of ours holds, as deep as numbers and lists go; None of other things."""
    if isinstance(thing, tuple) or not type(thing).__module__.startswith("hicache."):
        return None
    return [_flat(getattr(thing, name, None)) for name in attributes_of(thing)]


def attributes_of(thing: object) -> Iterable[str]:
    """The names of what an object holds, also of a named tuple and of a compiled class."""
    told = (
        getattr(type(thing), each, None) for each in ("__slots__", "_fields", "__mypyc_attrs__")
    )
    return next(filter(None, told), None) or vars(thing)


def _flat(value: object) -> object:
    if isinstance(value, (list, tuple)):
        if not value or isinstance(value[0], (int, bytes)):
            return list(value)  # of ids, lengths or names: thousands, and told at every look
        return [_flat(each) for each in value]
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return len(value) if isinstance(value, dict) else id(value)

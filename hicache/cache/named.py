"""Policies by name: a built-in one, or a class of the user's own, whose calls are checked.

The checks cover what it returns and raises. What it receives is read-only.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from numbers import Real
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np

Policy = TypeVar("Policy")


class PolicyError(RuntimeError):
    """A class of the user's own broke its word: which, what it was asked, and what it did.

    `place` is the line of theirs to look at, as a traceback has it, where no exception tells it.
    """

    def __init__(self, told: str, place: str = "") -> None:
        super().__init__(told)
        self.place = place


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method has to return, or an attribute to be.

    `shows`: whether the arguments of the method can be changed, so that it gets them as `shown`.
    """

    wanted: str
    fits: Callable[[Any], bool]
    shows: bool = True


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
    make = ours.get(name) or loaded(knob, name)
    policy: Policy = built(f"{knob}={name}", make, arguments, knobs or {})
    if name in ours:
        return policy
    missing = [each for each in wants if not hasattr(policy, each)]
    if missing:
        raise PolicyError(f"{knob}={name} lacks {', '.join(missing)}", _place_of(make))
    return checked(f"{knob}={name}", policy, wants)  # type: ignore[return-value]


def loaded(knob: str, name: str) -> Callable[..., Any]:
    """Return the class that `module:Class` names. Raises ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{knob}={name} cannot be loaded: {error}") from error
    return found


def built(
    name: str,
    make: Callable[..., Policy],
    arguments: tuple[object, ...],
    knobs: Mapping[str, float],
) -> Policy:
    """Return an object of a class; one without a constructor gets no `arguments`.

    Raises:
        ValueError: it does not take `knobs`.
        PolicyError: its constructor failed.
    """
    try:
        if getattr(make, "__init__", None) is object.__init__:
            return make(**knobs)
        return make(*arguments, **knobs)
    except Exception as error:
        if isinstance(error, TypeError) and not _is_inside(error):
            raise ValueError(f"{name} cannot be built: {error}") from error
        raise PolicyError(f"{name} cannot be built: {told(error)}") from error


def told(error: BaseException) -> str:
    """An exception in a few words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class ReadOnly:
    """Shows an object of hicache, and what is reached from it; attributes cannot be set."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        object.__setattr__(self, "_of", of)

    def __getattr__(self, name: str) -> Any:
        return shown(getattr(self._of, name))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set: a policy must not change {self._of!r:.80}")

    def __eq__(self, other: object) -> bool:
        return self._of is (other._of if isinstance(other, ReadOnly) else other)

    def __hash__(self) -> int:
        return hash(self._of)

    def __repr__(self) -> str:
        return repr(self._of)


def shown(thing: Any) -> Any:
    """Return a thing as a policy sees it: what it could change of ours, as `ReadOnly` or a copy."""
    if isinstance(thing, list | set):
        return tuple(thing)
    if isinstance(thing, dict):
        return MappingProxyType(thing)
    is_value = isinstance(thing, tuple | Enum | ReadOnly | MethodType)
    is_ours = type(thing).__module__.startswith("hicache.")
    return ReadOnly(thing) if is_ours and not is_value else thing


def checked(name: str, policy: object, wants: Mapping[str, Answer]) -> SimpleNamespace:
    """Return the attributes that are wanted of a policy; each call of a method is checked.

    Raises:
        PolicyError: an attribute has no such value. The methods raise it as well.
    """
    found: dict[str, object] = {}
    for attribute, answer in wants.items():
        given = getattr(policy, attribute)
        if callable(given):
            given = _checked(name, attribute, given, answer)
        elif not answer.fits(given):
            raise _unfit(answer, given, f"{name}: {attribute}", type(policy))
        found[attribute] = given
    return SimpleNamespace(**found)


def _checked(
    name: str, method: str, ask: Callable[..., object], answer: Answer
) -> Callable[..., object]:
    fits, shows = answer.fits, answer.shows

    def asked(*arguments: object, **named: object) -> object:
        try:
            given = ask(*(map(shown, arguments) if shows else arguments), **named)
            if answer is LENGTHS and isinstance(given, Iterable):
                given = list(given)
        except Exception as error:
            call = _described(name, method, arguments, named)
            place = "" if _is_inside(error) else _place_of(ask)
            raise PolicyError(f"{call} raised {told(error)}", place) from error
        if not fits(given):
            raise _unfit(answer, given, _described(name, method, arguments, named), ask)
        return given

    return asked


def _unfit(answer: Answer, given: object, call: str, place: object) -> PolicyError:
    return PolicyError(f"{call}: expected {answer.wanted}, got {given!r:.200}", _place_of(place))


def _is_inside(error: BaseException) -> bool:
    """Whether it was raised in what was called, not by the call itself."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _place_of(thing: object) -> str:
    """Where a method or a class is written, as in a traceback; empty if that is unknown."""
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

"""Calls a user's policy class with read-only arguments, and checks the values that it returns."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, MethodType
from typing import Any

import numpy as np

from hicache.user_code import Stopped, UserCodeError, place_of, told

PASSES = (KeyboardInterrupt, Stopped)  # end the program also inside a user's class


class PolicyError(UserCodeError):
    """Raised when a user's policy class fails or returns a wrong value."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Describes which values a method of a user's policy class may return.

    `wanted` describes the allowed values in words, for error messages. `fits` returns True for an
    allowed value. If `shows` is True, the method gets read-only versions of its arguments. If
    `is_list` is True, the method may return any iterable, which is then converted to a list.
    """

    wanted: str
    fits: Callable[[Any], bool]
    shows: bool = True
    is_list: bool = False


class ReadOnly:
    """Wraps an object so that a user's policy can read the object but not change it.

    Objects, lists and dictionaries that are read through the wrapper are read-only as well.
    """

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
    """Return `thing` in a form that a user's policy cannot change.

    Lists and sets become tuples, dictionaries read-only mappings, and arrays read-only views.
    Objects of this package are wrapped in a read-only view. Other values are returned unchanged.
    """
    if isinstance(thing, list | set):
        return tuple(thing)
    if isinstance(thing, dict):
        return MappingProxyType(thing)
    if isinstance(thing, np.ndarray):
        thing = thing.view()
        thing.setflags(write=False)
        return thing
    is_value = isinstance(thing, tuple | Enum | ReadOnly | MethodType)
    is_ours = type(thing).__module__.startswith("hicache.")
    return ReadOnly(thing) if is_ours and not is_value else thing


def checked(name: str, policy: object, wants: Mapping[str, Answer]) -> dict[str, Any]:
    """Return those attributes of a user's policy that `wants` names, by name.

    Each method of the result calls the policy's method and checks the value that it returns. `name`
    is the policy's name in error messages.

    Raises:
        PolicyError: an attribute has a wrong value. The methods of the result raise it as well.
    """
    found: dict[str, object] = {}
    for attribute, answer in wants.items():
        given = getattr(policy, attribute)
        if callable(given):
            given = _checked(name, attribute, given, answer)
        elif not answer.fits(given):
            raise _unfit(answer, given, f"{name}: {attribute}", type(policy))
        found[attribute] = given
    return found


def _checked(
    name: str, method: str, ask: Callable[..., object], answer: Answer
) -> Callable[..., object]:
    fits = answer.fits

    def called(*arguments: object) -> object:
        # called often; its arguments are entries, which are read-only
        try:
            given = ask(*arguments)
        except PASSES:
            raise
        except BaseException as error:
            raise _failed(error, _described(name, method, arguments, {}), ask) from error
        if fits(given):
            return given
        raise _unfit(answer, given, _described(name, method, arguments, {}), ask)

    def asked(*arguments: object, **named: object) -> object:
        try:
            given = ask(*map(shown, arguments), **named)
            if answer.is_list and isinstance(given, Iterable):
                given = list(given)
        except PASSES:
            raise
        except BaseException as error:
            raise _failed(error, _described(name, method, arguments, named), ask) from error
        if not fits(given):
            raise _unfit(answer, given, _described(name, method, arguments, named), ask)
        return given

    return asked if answer.shows else called


def _failed(error: BaseException, call: str, ask: object) -> PolicyError:
    place = "" if is_inside(error) else place_of(ask)
    return PolicyError(f"{call} raised {told(error)}", place)


def _unfit(answer: Answer, given: object, call: str, place: object) -> PolicyError:
    return PolicyError(f"{call}: expected {answer.wanted}, got {given!r:.200}", place_of(place))


def is_inside(error: BaseException) -> bool:
    # a failed call itself, with wrong arguments for example, has a traceback of one frame
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _described(
    name: str, method: str, arguments: tuple[object, ...], named: Mapping[str, object]
) -> str:
    parts = [f"{each!r:.80}" for each in arguments]
    parts += [f"{key}={value!r:.80}" for key, value in named.items()]
    return f"{name}: {method}({', '.join(parts)})"

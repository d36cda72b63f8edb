"""Builds the user's policy classes, and defines what their methods must return."""

from collections.abc import Callable, Mapping
from math import inf
from numbers import Real
from typing import TypeVar

import numpy as np

from hicache.cache.checked import PASSES, Answer, PolicyError, is_inside
from hicache.user_code import told

MOST_TOKENS = 1 << 31  # more than any pool holds
Policy = TypeVar("Policy")


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) < inf  # type: ignore[operator]


def is_rank(value: object) -> bool:
    if isinstance(value, tuple):
        return value != () and all(isinstance(each, str) or is_rank(each) for each in value)
    if type(value) in (float, int):  # asked often
        return -inf < value < inf  # type: ignore[operator]
    return isinstance(value, (bool, np.bool_)) or is_number(value)


def is_whole(value: object) -> bool:
    return is_number(value) and value == int(value)  # type: ignore[call-overload]


FLAG = Answer("True or False", lambda value: isinstance(value, (bool, np.bool_)))
NUMBER = Answer("a finite number", is_number)
TOKENS = Answer(
    "a whole number of tokens", lambda value: is_whole(value) and 0 <= value < MOST_TOKENS
)
MOMENT = Answer("None or a time in whole nanoseconds", lambda v: v is None or is_whole(v))
RANK = Answer(
    "None, a finite number, or a tuple of numbers, strings and tuples",
    lambda value: value is None or is_rank(value),
    shows=False,
)
LENGTHS = Answer(
    "a list of whole numbers",
    lambda v: isinstance(v, list) and all(map(is_whole, v)),
    is_list=True,
)


def built(
    name: str,
    make: Callable[..., Policy],
    arguments: tuple[object, ...],
    knobs: Mapping[str, float],
) -> Policy:
    """Build a user's policy by calling `make(*arguments, **knobs)`.

    If `make` is a class without a constructor of its own, the call leaves out `arguments`. `name`
    is the policy's name in error messages.

    Raises:
        ValueError: `make` does not accept the arguments.
        PolicyError: `make` raised an exception.
    """
    try:
        if getattr(make, "__init__", None) is object.__init__:
            return make(**knobs)
        return make(*arguments, **knobs)
    except PASSES:
        raise
    except BaseException as error:
        if isinstance(error, TypeError) and not is_inside(error):
            raise ValueError(f"{name} cannot be built: {error}") from error
        raise PolicyError(f"{name} cannot be built: {told(error)}") from error

"""Which answers of a user's policy are accepted, and which end the run."""

import math
import operator
from fractions import Fraction

import numpy as np
import pytest

from hicache.cache.checked import Answer, PolicyError, checked
from hicache.cache.named import FLAG, LENGTHS, MOMENT, NUMBER, RANK, TOKENS, built
from hicache.cache.tree.node import Node

ANSWERS = {
    "priority": Answer(RANK.wanted, RANK.fits),
    "rank": NUMBER,
    "tokens": TOKENS,
    "lengths": LENGTHS,
    "may_stop": FLAG,
    "deadline_ns": MOMENT,
}


def answer_of(method, given):
    """The answer of a checked policy whose own `method` returns `given`."""
    own = type("Own", (), {method: lambda *_, **__: given})()
    return checked("knob=Own", own, {method: ANSWERS[method]})[method](1, page=2)


REJECTED = {
    "priority": ["abc", (), (math.nan,), (1, None), (1, (math.inf,))],
    "rank": [None, math.inf, "first", [1]],
    "tokens": [-1, 1.5, None],
    "lengths": [64, [64, None], [0.5]],
    "may_stop": [None, 1, "no"],
    "deadline_ns": [math.nan, "soon"],
}
ACCEPTED = {
    "priority": [(True, 1.0), (1, 2.5), (np.float64(1),)],
    "rank": [-3, Fraction(1, 3), 10**400],  # more than any float
    "tokens": [Fraction(4, 2), np.int32(64)],
    "lengths": [[64, 128]],
    "may_stop": [np.bool_(True)],  # noqa: FBT003 - what comparisons of numpy give
    "deadline_ns": [None, 10],
}


@pytest.mark.parametrize("method", ANSWERS)
def test_an_answer_of_the_wrong_type_or_range_is_rejected_and_the_error_quotes_the_call(method):
    for given in REJECTED[method]:
        with pytest.raises(PolicyError) as error:
            answer_of(method, given)
        message = str(error.value)
        assert message.startswith(f"knob=Own: {method}(1, page=2): expected ")
        assert message.endswith(f", got {given!r}")
    for given in ACCEPTED[method]:
        assert answer_of(method, given) == given


def test_a_policy_may_return_lengths_as_an_iterator():
    assert answer_of("lengths", (length for length in (1, 2))) == [1, 2]


class Raises:
    waits = "yes"

    def __init__(self, wrong=None):
        if wrong:
            raise wrong

    def rank(self, number):
        raise KeyError(number)


def test_an_exception_of_a_policy_names_the_class_and_the_call():
    policy = checked("order=Raises", Raises(), {"rank": NUMBER})
    with pytest.raises(PolicyError, match=r"order=Raises: rank\(7\) raised KeyError: 7") as error:
        policy["rank"](7)
    assert isinstance(error.value.__cause__, KeyError)


def test_an_attribute_is_checked_when_the_policy_is_built():
    with pytest.raises(PolicyError, match=r"waits: expected True or False, got 'yes'"):
        checked("stop", Raises(), {"waits": FLAG})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TypeError("no length"),), PolicyError, "cannot be built: TypeError: no length"),
        ((RuntimeError("no file"),), PolicyError, "cannot be built: RuntimeError: no file"),
        ((1, 2), ValueError, "cannot be built: .* takes from 1 to 2 positional arguments"),
    ],
)
def test_an_error_in_a_constructor_is_not_reported_as_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        built("order", Raises, arguments, {})
    assert type(caught.value) is error


class Meddles:
    """A policy whose `priority` calls `change` on the node that it ranks."""

    def __init__(self, change):
        self._change = change

    def priority(self, node):
        self._change(node)
        return (node.tick,)


@pytest.mark.parametrize(
    "change",
    [
        lambda node: setattr(node, "tick", 3),
        lambda node: operator.setitem(node.children, b"a", node),
        lambda node: setattr(node.parent, "tick", 3),
    ],
)
def test_a_policy_that_changes_its_arguments_ends_the_run(change):
    policy = checked("eviction", Meddles(change), {"priority": NUMBER})
    with pytest.raises(PolicyError, match=r"must not change|does not support item assignment"):
        policy["priority"](Node(Node(None, b"", 0, 0), b"", 0, 0))

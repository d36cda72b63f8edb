"""What a user's own class may do, and what ends the run."""

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


class Answers:
    """Gives what it was built with, whatever it is asked."""

    def __init__(self, given):
        self._given = given

    def __getattr__(self, name):
        if name.startswith("_") or name not in ANSWERS:
            raise AttributeError(name)
        return lambda *_, **__: self._given


def asked(method, given):
    """What comes of a class that gives this."""
    policy = checked("knob=Answers", Answers(given), {method: ANSWERS[method]})
    return policy[method](1, page=2)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("priority", "abc"),
        ("priority", ()),
        ("priority", (math.nan,)),
        ("priority", (1, None)),
        ("priority", (1, (math.inf,))),
        ("rank", None),
        ("rank", math.inf),
        ("rank", "first"),
        ("rank", [1]),
        ("tokens", -1),
        ("tokens", 1.5),
        ("tokens", None),
        ("lengths", 64),
        ("lengths", [64, None]),
        ("lengths", [0.5]),
        ("may_stop", None),
        ("may_stop", 1),
        ("may_stop", "no"),
        ("deadline_ns", math.nan),
        ("deadline_ns", "soon"),
    ],
)
def test_an_answer_that_means_nothing_is_refused_with_question_and_answer(method, given):
    with pytest.raises(PolicyError) as refused:
        asked(method, given)
    told = str(refused.value)
    assert told.startswith(f"knob=Answers: {method}(1, page=2): expected ")
    assert told.endswith(f", got {given!r}")


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("priority", (True, 1.0)),
        ("priority", (1, 2.5)),
        ("priority", (np.float64(1),)),
        ("rank", -3),
        ("rank", Fraction(1, 3)),
        ("rank", 10**400),  # more than any float
        ("tokens", Fraction(4, 2)),
        ("tokens", np.int32(64)),
        ("lengths", [64, 128]),
        ("may_stop", np.bool_(True)),  # noqa: FBT003 - what comparisons of numpy give
        ("deadline_ns", None),
        ("deadline_ns", 10),
    ],
)
def test_an_answer_that_was_asked_for_is_passed_on(method, given):
    assert asked(method, given) == given


def test_lengths_may_come_one_by_one():
    assert asked("lengths", (length for length in (1, 2))) == [1, 2]


class Raises:
    def rank(self, number):
        raise KeyError(number)


def test_an_exception_in_the_middle_names_the_class_and_the_question():
    policy = checked("order=Raises", Raises(), {"rank": NUMBER})
    with pytest.raises(PolicyError, match=r"order=Raises: rank\(7\) raised KeyError: 7") as told:
        policy["rank"](7)
    assert isinstance(told.value.__cause__, KeyError)


class Fails:
    def __init__(self):
        raise RuntimeError("no such file")


class Confused:
    def __init__(self):
        len(7)


def test_a_class_that_breaks_while_it_is_built_is_told_from_one_that_is_built_wrongly():
    with pytest.raises(PolicyError, match=r"cannot be built: TypeError: object of type 'int'"):
        built("order", Confused, (), {})
    with pytest.raises(ValueError, match=r"cannot be built: .* takes 1 positional argument"):
        built("order", Confused, (7,), {})


def test_a_class_that_cannot_be_built_says_why():
    with pytest.raises(PolicyError, match=r"cannot be built: RuntimeError: no such file"):
        built("order", Fails, (), {})


class Meddles:
    """Changes what it is shown, in one of several ways."""

    def __init__(self, what):
        self._what = what

    def priority(self, node):
        self._what(node)
        return (node.tick,)


@pytest.mark.parametrize(
    "meddle",
    [
        lambda node: setattr(node, "tick", 3),
        lambda node: operator.setitem(node.children, b"a", node),
        lambda node: setattr(node.parent, "tick", 3),
    ],
)
def test_a_class_that_changes_what_it_is_shown_ends_the_run(meddle):
    policy = checked("eviction", Meddles(meddle), {"priority": NUMBER})
    with pytest.raises(PolicyError, match=r"must not change|does not support item assignment"):
        policy["priority"](Node(Node(None, b"", 0, 0), b"", 0, 0))


class Waits:
    waits = "yes"


def test_an_attribute_is_checked_when_the_policy_is_built():
    with pytest.raises(PolicyError, match=r"waits: expected True or False, got 'yes'"):
        checked("stop", Waits(), {"waits": FLAG})

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.diff.compare import Comparison, Kind, Row
from experiments.diff.protocol import Hits, Outcome
from tests.diff.sides import PAGE, prompt, requests_of

Compared = Callable[..., Comparison]
# four pages of 1, four of 2, and both again: room for seven pages loses one of 1
AGAIN = requests_of(prompt(1, 4), prompt(2, 4), prompt(1, 4), prompt(2, 4))
OUTCOME = Outcome(
    hits=Hits(64, 0, 0),
    counts={"hit/swa/device": 64, "moved/full/back_up": 64, "evicted/full/host": 64},
    held={"full/device": 64},
    admission="yes",
)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, Kind.equal),
        ({"hits": Hits(0, 0, 0)}, Kind.fewer),
        ({"hits": Hits(64, 64, 0)}, Kind.more),
        ({"hits": Hits(0, 64, 0)}, Kind.tier),
        ({"counts": {**OUTCOME.counts, "hit/swa/device": 0}}, Kind.component),
        ({"admission": "no"}, Kind.admission),
        ({"counts": {**OUTCOME.counts, "moved/full/back_up": 0}}, Kind.moved),
        ({"counts": {**OUTCOME.counts, "evicted/full/host": 0}}, Kind.evicted),
        ({"held": {"full/device": 0}}, Kind.held),
    ],
)
def test_a_difference_has_one_kind(changes: dict[str, object], kind: Kind) -> None:
    row = Row(number=0, prompt_len=100, base=OUTCOME, head=replace(OUTCOME, **changes))
    assert row.kind is kind


def test_the_graver_kind_counts_where_two_apply() -> None:
    head = replace(OUTCOME, hits=Hits(0, 0, 0), held={}, admission="no")
    assert Row(number=0, prompt_len=100, base=OUTCOME, head=head).kind is Kind.fewer


def test_equal_sides_do_not_differ(compared: Compared) -> None:
    found = compared(AGAIN)
    assert found.kinds == {Kind.equal: 4}
    assert (found.first, found.first_hit, found.failure) == (None, None, None)


def test_less_room_is_seen_where_it_first_costs_a_hit(compared: Compared) -> None:
    found = compared(AGAIN, head={"pages": "7"})
    assert found.first is not None
    assert (found.first.number, found.first.kind) == (1, Kind.evicted)
    assert found.first_hit is not None
    assert (found.first_hit.number, found.first_hit.kind) == (2, Kind.fewer)
    assert found.hit_rate("head") < found.hit_rate("base") == 8 * PAGE / found.prompt_tokens


def test_totals_add_up_the_answers(compared: Compared) -> None:
    found = compared(AGAIN, head={"pages": "7", "says": "yes"})
    totals = found.totals("head")
    assert totals["hit/full/device"] == sum(sum(row.head.hits) for row in found.rows)
    assert totals["held/full/device"] == 7 * PAGE
    assert totals["admission/yes"] == 4
    assert totals["evicted/full/device"] > 0


def test_it_can_end_at_the_first_request_whose_hits_differ(compared: Compared) -> None:
    assert len(compared(AGAIN, head={"pages": "7"}, until_first=True).rows) == 3


def test_a_side_that_fails_ends_it_with_what_there_is(compared: Compared) -> None:
    found = compared(AGAIN, head={"fail_at": "2"})
    assert found.failure == "at request 2 fake: no room is left"
    assert [row.number for row in found.rows] == [0, 1]

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from experiments.diff.compare import Comparison, Kind, Row, compare
from experiments.diff.protocol import Hits, Outcome, Pools
from hicache.request import Request
from tests.diff.sides import FAKE, PAGE, POOLS, prompt, requests_of

Compared = Callable[..., Comparison]
# four pages of 1, four of 2, and both again: room for seven pages loses one of 1
AGAIN = requests_of(prompt(1, 4), prompt(2, 4), prompt(1, 4), prompt(2, 4))
OUTCOME = Outcome(
    hits=Hits(64, 0, 0),
    counts={"hit/swa/device": 64, "moved/full/back_up": 64, "evicted/full/host": 64},
    held={"full/device": 64},
    admission="yes",
    state={"locked/full/device": 8, "free/full/device": 4, "pages/full/device": 1},
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
        ({"state": {**OUTCOME.state, "locked/full/device": 12}}, Kind.locked),
        ({"held": {"full/device": 0}}, Kind.held),
        ({"state": {**OUTCOME.state, "free/full/device": 0}}, Kind.held),
        ({"state": {**OUTCOME.state, "pages/full/device": 2}}, Kind.pages),
        ({"state": {}}, Kind.equal),
        ({"admission": None}, Kind.equal),
    ],
)
def test_a_difference_of_outcomes_has_its_kind(changes: dict[str, object], kind: Kind) -> None:
    row = Row(number=0, prompt_len=100, base=OUTCOME, head=replace(OUTCOME, **changes))
    assert row.kind is kind


def test_of_two_kinds_of_difference_the_graver_one_is_reported() -> None:
    changes: dict[str, object] = {"hits": Hits(0, 0, 0)}
    graver = [
        ({"counts": {**OUTCOME.counts, "hit/swa/device": 0}}, Kind.component),
        ({"admission": "no"}, Kind.admission),
        ({"counts": {"hit/swa/device": 64, "evicted/full/host": 0}}, Kind.moved),
        ({"counts": {**OUTCOME.counts, "evicted/full/host": 0}}, Kind.evicted),
        ({"state": {**OUTCOME.state, "locked/full/device": 0}}, Kind.locked),
        ({"held": {}}, Kind.held),
    ]
    for more, kind in reversed(graver):
        changes = {"state": {**OUTCOME.state, "pages/full/device": 2}, "held": {}} | changes | more
        assert row_of(**{**changes, "hits": OUTCOME.hits}).kind is kind
    assert row_of(**changes).kind is Kind.fewer


def row_of(number: int = 0, **changes: object) -> Row:
    head = replace(OUTCOME, **changes)  # type: ignore[arg-type]
    return Row(number=number, prompt_len=100, base=OUTCOME, head=head)


def test_a_row_of_the_report_lists_the_counts_that_differ_with_both_values() -> None:
    assert row_of().changes == {}
    counts = {"hit/swa/host": 64, "moved/full/back_up": 64, "moved/full/read": 5}
    held = {"full/device": 64, "full/host": 3}
    row = row_of(hits=Hits(0, 8, 0), counts=counts, held=held, state={"free/full/device": 5})
    assert row.changes == {
        "hit/full/device": (64, 0),
        "hit/full/host": (0, 8),
        "hit/swa/device": (64, 0),
        "hit/swa/host": (0, 64),
        "moved/full/read": (0, 5),
        "evicted/full/host": (64, 0),
        "held/full/host": (0, 3),
        "free/full/device": (4, 5),
    }
    assert row.weight == (64 + 8 + 64 + 64, 5 + 64 + 3 + 1)


def test_names_of_pages_do_not_count_as_amounts() -> None:
    row = row_of(state={**OUTCOME.state, "pages/full/device": 1 << 60})
    assert row.changes == {"pages/full/device": (1, 1 << 60)}
    assert row.weight == (0, 0)


def test_the_worst_rows_differ_most_in_hits_and_then_in_copies() -> None:
    rows = (
        row_of(0, held={"full/device": 0}),
        row_of(1, counts={**OUTCOME.counts, "moved/full/back_up": 1064}),
        row_of(2),
        row_of(3, hits=Hits(63, 0, 0)),
        row_of(4, hits=Hits(60, 0, 0)),
    )
    about = {"engine": "fake", "version": "1"}
    found = Comparison(base=about, head=about, pools=POOLS, rows=rows)
    assert [row.number for row in found.worst(3)] == [4, 3, 1]
    assert [row.number for row in found.worst(9)] == [4, 3, 1, 0]


def test_a_leaked_lock_is_reported_once_it_should_be_released(compared: Compared) -> None:
    requests = requests_of(*(prompt(name, 2) for name in range(8)))
    found = compared(requests, head={"leak_at": "1"})
    assert found.first is not None
    assert (found.first.number, found.first.kind) == (1 + POOLS.num_running, Kind.locked)
    locked = 2 * PAGE * POOLS.num_running
    assert found.first.changes == {"locked/full/device": (locked, locked + 2 * PAGE)}
    assert found.kinds == {Kind.locked: 3, Kind.equal: 5}
    assert found.first_hit is None


def test_a_different_page_is_reported_although_amounts_are_equal(compared: Compared) -> None:
    found = compared(AGAIN, head={"other_at": "1"})
    assert found.first is not None
    assert (found.first.number, found.first.kind) == (1, Kind.pages)


def test_a_side_that_reports_no_state_is_compared_without_it(compared: Compared) -> None:
    assert compared(AGAIN, head={"silent": "1"}).kinds == {Kind.equal: 4}


@pytest.mark.parametrize(
    ("base", "head", "failure"),
    [
        ("2", "9", "at request 2 fake: no room is left"),
        ("9", "2", "at request 2 fake: no room is left"),
        ("2", "2", "at request 2 fake: no room is left; fake: no room is left"),
        ("9", "9", None),
    ],
)
def test_an_error_of_a_side_ends_the_comparison(
    compared: Compared, base: str, head: str, failure: str | None
) -> None:
    found = compared(AGAIN, base={"fail_at": base}, head={"fail_at": head})
    assert found.failure == failure
    assert len(found.rows) == (4 if failure is None else 2)


class Listening:
    """A side that records the calls that it gets."""

    peak_bytes = None

    def __init__(self, **about: str) -> None:
        self._about = about
        self.calls: list[tuple[object, ...]] = []

    def about(self) -> dict[str, str]:
        return self._about

    def ask(self, calls: list[tuple[object, ...]]) -> None:
        self.calls += calls

    def take_outcome(self) -> Outcome:
        return OUTCOME


def compare_with(
    base: Listening, head: Listening, requests: Sequence[Request], pools: Pools
) -> None:
    with patch("experiments.diff.compare.open_sides", return_value=(base, head)):
        compare(requests, pools, (FAKE, FAKE), Path())


def asked(base: Listening, head: Listening, **pools: object) -> list[tuple[object, ...]]:
    """Compare base and head; return the calls of base, without the tokens."""
    requests = requests_of(*(prompt(name, 1) for name in range(40)))
    compare_with(base, head, requests, replace(POOLS, num_running=2, **pools))  # type: ignore[arg-type]
    assert len(base.calls) == len(head.calls)
    return [(*call[:2], *call[4:]) for call in base.calls]


def test_a_request_finishes_when_num_running_later_ones_have_arrived() -> None:
    side = Listening(aborts="yes")
    calls = asked(side, Listening(aborts="yes"))
    wanted = [("admit", 0), ("admit", 1)]
    for number in range(2, 40):
        wanted += [("finish", number - 2), ("admit", number)]
    assert calls == wanted
    _, number, tokens, prompt_len = side.calls[0]
    assert (number, len(tokens), prompt_len) == (0, PAGE + 3, PAGE + 1)  # type: ignore[arg-type]


def test_in_eventful_pools_every_seventh_request_runs_three_times_as_long() -> None:
    calls = asked(Listening(), Listening(), is_eventful=True)
    come = {call[1]: place for place, call in enumerate(calls) if call[0] == "admit"}
    gone = {call[1]: place for place, call in enumerate(calls) if call[0] == "finish"}
    for number in range(30):
        after = number + (6 if number % 7 == 6 else 2)
        assert come[after - 1] < gone[number] < come[after]


def test_a_seed_draws_requests_that_are_aborted_at_each_stage() -> None:
    sides = [(Listening(aborts="yes"), Listening(aborts="yes")) for _ in range(3)]
    one, again, other = (
        asked(*pair, abort_seed=seed) for pair, seed in zip(sides, (3, 3, 4), strict=True)
    )
    assert one == again != other
    waiting = {call[1]: call[2] for call in one if len(call) > 2}
    assert set(waiting.values()) == {"queued", "prefetching", "chunk"}
    decoding = [call[1] for call in one if call[0] == "abort"]
    finished = [call[1] for call in one if call[0] == "finish"]
    assert not {*waiting} & {*decoding, *finished}
    assert {*waiting, *decoding, *finished} >= {*range(38)}
    assert 6 < len(waiting) + len(decoding) < 20
    assert decoding


def test_no_request_is_aborted_if_one_side_cannot_abort() -> None:
    for sides in ((Listening(aborts="yes"), Listening()), (Listening(), Listening())):
        calls = asked(*sides, abort_seed=3)
        assert {len(call) for call in calls} == {2}
        assert "abort" not in {call[0] for call in calls}


def test_progress_is_printed_every_250_requests(capsys: pytest.CaptureFixture[str]) -> None:
    requests = requests_of(*([[1, 2]] * 501))
    compare_with(Listening(), Listening(), requests, POOLS)
    said = capsys.readouterr().err.splitlines()
    assert said == ["250 of 501 requests", "500 of 501 requests"]

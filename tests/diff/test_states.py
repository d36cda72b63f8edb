"""The random states of `experiments.diff.admission`, and what our admission says of them."""

import hashlib
import json
import subprocess
import sys
from random import Random

import pytest

from experiments.diff import admission
from experiments.diff.states import CASES, PAGES, WINDOWS, State, drawn
from hicache.scheduler.decision import Admit
from tests.diff.sides import FAKE

RANDOM = Random(0)
STATES = [drawn(RANDOM) for _ in range(3000)]


def test_both_sides_draw_the_same_states_each_time() -> None:
    random = Random(0)
    assert [drawn(random) for _ in range(100)] == STATES[:100]
    assert CASES == 100_000
    # docs/validity.md counts the differences in these states
    text = json.dumps([vars(each) for each in STATES], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest().startswith("08c163e51913")


def test_states_are_on_both_sides_of_every_boundary() -> None:
    for state in STATES:
        assert state.page in PAGES
        assert state.window in WINDOWS
        assert 1 <= state.extend <= 20_000
        assert 0 <= state.new <= 4096
        assert 0 <= state.swa_host_hit <= state.window
        assert state.swa_room <= state.swa_pages * state.page
        sizes = (state.device_prefix, state.host_prefix, state.full_room, state.swa_room)
        assert not any(size % state.page for size in sizes)
    assert any(state.extend > state.full_room for state in STATES)
    assert any(state.window > state.swa_room for state in STATES)
    assert any(state.extend > state.chunk for state in STATES)
    for name in ("swa_host_hit", "host_prefix", "reserved", "reserved_swa"):
        zeros = sum(getattr(state, name) == 0 for state in STATES)
        assert len(STATES) / 4 < zeros < 3 * len(STATES) / 4, name


def ample(**changes: int) -> State:
    """One page of a window of 64 tokens, and room for 100 pages of each kind."""
    values = {
        "page": 64, "window": 64, "extend": 640, "new": 0, "chunk": 8192, "swa_host_hit": 0,
        "device_prefix": 0, "host_prefix": 0, "full_room": 6400, "swa_pages": 100,
        "swa_room": 6400, "reserved": 0, "reserved_swa": 0,
    }  # fmt: skip
    return State(**{**values, **changes})


def least(pool: str, **changes: int) -> int:
    """The least room of a pool with which the request is admitted."""
    return next(
        room
        for room in range(64, 6400, 64)
        if isinstance(admission.our_decision(ample(**{**changes, pool: room})), Admit)
    )


@pytest.mark.parametrize(
    ("changes", "full", "window"),
    [
        # a page more than its tokens, of which a page must be left; the window's charge likewise
        ({}, 640 + 128, 704 + 64),
        ({"extend": 641}, 640 + 128, 768 + 64),
        ({"new": 128}, 640 + 128 + 128, 704 + 64),
        ({"reserved": 640}, 640 + 640 + 128, 704 + 64),
        ({"reserved_swa": 640}, 640 + 128, 704 + 640 + 64),
        # what is on the device takes no room, what is loaded back does
        ({"device_prefix": 640}, 640 + 128, 704 + 64),
        ({"host_prefix": 640}, 640 + 640 + 128, 704 + 64),
        ({"swa_host_hit": 64}, 640 + 128, 704 + 64 + 64),
        ({"chunk": 512}, 640 + 128, 512 + 64 + 64),
    ],
)
def test_a_request_is_admitted_if_it_fits_both_pools(
    changes: dict[str, int], full: int, window: int
) -> None:
    assert least("full_room", **changes) == full
    assert least("swa_room", **changes) == window


@pytest.mark.parametrize(
    ("changes", "charge"),
    [
        ({}, 576 + 64 + 64),
        ({"chunk": 512}, 448 + 64 + 64),
        ({"window": 1000}, 640 + 64),
        ({"window": 1000, "new": 200}, 840 + 64),
        ({"window": 1000, "new": 4000, "swa_host_hit": 500}, 1000 + 64 + 512),
        ({"page": 16}, 576 + 64 + 16),
    ],
)
def test_a_request_is_charged_to_the_window_pool(changes: dict[str, int], charge: int) -> None:
    assert admission.our_charge(ample(**changes)) == charge


def test_the_chunk_is_that_of_the_state() -> None:
    decision = admission.our_decision(ample(chunk=512))
    assert isinstance(decision, Admit)
    assert decision.chunk_tokens == 512


def ours_as_theirs() -> list[tuple[int, bool, int]]:
    answers = []
    for state in STATES[:60]:
        decision = admission.our_decision(state)
        chunk = decision.chunk_tokens if isinstance(decision, Admit) else 0
        answers.append((admission.our_charge(state), isinstance(decision, Admit), chunk))
    return answers


def test_each_difference_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = ours_as_theirs()
    admitted = [place for place, (_, may, _) in enumerate(theirs) if may]
    assert 5 < len(admitted) < 55
    assert admission.differing(theirs) == {"charge": 0, "decision": 0, "chunk": 0}
    said = capsys.readouterr().out
    assert said == (
        f"100,000 states, {len(admitted)} admitted; that differ:"
        " {'charge': 0, 'decision': 0, 'chunk': 0}\n"
    )
    for place, change in ((0, (1, 0, 0)), (admitted[1], (0, 0, 1)), (admitted[2], (0, 0, -1))):
        theirs[place] = tuple(map(sum, zip(theirs[place], change, strict=True)))  # type: ignore[assignment]
    charge, _, chunk = theirs[admitted[0]]
    theirs[admitted[0]] = charge, False, chunk + 1  # what is not admitted has no chunk
    refused = next(place for place, (_, may, _) in enumerate(theirs) if not may)
    theirs[refused] = theirs[refused][0], True, 5
    assert admission.differing(theirs) == {"charge": 1, "decision": 2, "chunk": 2}


@pytest.mark.parametrize(("change", "status"), [(0, 0), (1, 1)])
def test_the_program_ends_with_1_if_anything_differs(
    monkeypatch: pytest.MonkeyPatch, change: int, status: int
) -> None:
    theirs = ours_as_theirs()
    theirs[0] = theirs[0][0] + change, *theirs[0][1:]
    told = subprocess.CompletedProcess([], 0, json.dumps(theirs))
    monkeypatch.setattr(admission, "prepare", lambda *_: FAKE)
    monkeypatch.setattr(admission.subprocess, "run", lambda *_, **__: told)
    monkeypatch.setattr(sys, "argv", ["admission"])
    with pytest.raises(SystemExit) as ended:
        admission.main()
    assert int(ended.value.code or 0) == status

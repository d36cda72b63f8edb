from dataclasses import replace

import pytest

from experiments.diff.counting import Tally, admission_word, joined
from experiments.diff.protocol import Hits, Outcome
from tests.diff.sides import PAGE, POOLS


def outcome(tally: Tally, *hits: int, swa_loaded: int = 0, states_loaded: int = 0) -> Outcome:
    return tally.outcome(
        Hits(*hits),
        {"full/device": 8},
        swa_loaded=swa_loaded,
        states_loaded=states_loaded,
        admission="yes",
    )


def test_an_outcome_counts_copies_and_evictions_since_the_previous_one() -> None:
    tally = Tally(POOLS)
    tally.moved("full", "back_up", 8)
    tally.moved("full", "back_up", 4)
    tally.evicted("full/host", 3)
    tally.evicted("full/device", 0)
    first = outcome(tally, 4, 0, 0)
    assert first == Outcome(
        hits=Hits(4, 0, 0),
        counts={"moved/full/back_up": 12, "evicted/full/host": 3},
        held={"full/device": 8},
        admission="yes",
    )
    assert outcome(tally, 0, 0, 0).counts == {}


@pytest.mark.parametrize(
    ("usable", "loaded", "read", "tiers"),
    [
        (40, 0, 0, (12, 0, 0)),  # a window of 10 in pages of 4
        (8, 0, 0, (8, 0, 0)),  # no more than was hit
        (40, 8, 0, (4, 8, 0)),
        (40, 8, 4, (4, 4, 4)),
        (40, 8, 20, (4, 0, 8)),
        (40, 20, 0, (0, 12, 0)),
        (0, 8, 8, (0, 0, 0)),
    ],
)
def test_window_hits_are_counted_on_the_tiers_that_held_the_window(
    usable: int, loaded: int, read: int, tiers: tuple[int, int, int]
) -> None:
    tally = Tally(replace(POOLS, window_len=10, swa_tokens=40))
    tally.moved("swa", "read", read)
    counts = outcome(tally, usable, 0, 0, swa_loaded=loaded).counts
    found = tuple(counts.get(f"hit/swa/{tier}", 0) for tier in ("device", "host", "storage"))
    assert found == tiers
    assert counts.get("moved/swa/read", 0) == read


def test_a_state_hit_is_counted_on_the_tier_that_held_the_state() -> None:
    tally = Tally(replace(POOLS, num_states=4))
    assert outcome(tally, 0, 0, 4).counts == {"hit/mamba/device": 1}
    assert outcome(tally, 4, 0, 0, states_loaded=1).counts == {"hit/mamba/host": 1}
    tally.moved("mamba", "read", 1)
    counts = outcome(tally, 4, 0, 0, states_loaded=1).counts
    assert counts == {"hit/mamba/storage": 1, "moved/mamba/read": 1}
    assert "hit/mamba/device" not in outcome(Tally(POOLS), 4, 0, 0).counts


def test_admission_is_given_in_words() -> None:
    assert admission_word(None, 5) == "deferred"
    assert admission_word(5, 5) == admission_word(6, 5) == "admitted"
    assert admission_word(4, 5) == "admitted, its chunk cut to the room"
    assert admission_word(0, 5) == "admitted, its chunk cut to the room"


def test_neighboring_pages_are_one_span_and_states_a_token_each() -> None:
    pages = [(0, 1), (1, 3), (4, 5), (5, 5)]
    assert joined(pages, PAGE, "full/host") == [(0, 12), (16, 20)]
    assert joined(pages[:3], PAGE, "mamba/host") == [(3, 4), (11, 12), (19, 20)]
    assert joined([], PAGE, "full/host") == []

from collections.abc import Callable
from pathlib import Path

from experiments.diff.compare import Comparison
from experiments.diff.explain import Explanation, differing, explain, in_words, spans_in_words
from hicache.request import Request
from tests.diff.sides import FAKE, POOLS, fake, prompt, requests_of

Compared = Callable[..., Comparison]
# room for nine pages: the third prompt takes three pages of the first, the fourth sees it
REQUESTS = requests_of(prompt(1, 4), prompt(2, 4), prompt(3, 4), prompt(1, 4))


def explained(
    compared: Compared, requests: list[Request], head: dict[str, str], folder: Path
) -> Explanation:
    row = compared(requests, head=head).first_hit
    assert row is not None
    return explain(row, requests, POOLS, (FAKE, fake(head)), folder)


def test_the_request_that_took_the_pages_is_named(compared: Compared, tmp_path: Path) -> None:
    found = explained(compared, REQUESTS, {"pages": "9"}, tmp_path)
    assert (found.row.number, found.last_use) == (3, 0)
    assert found.held[0] == {"full/device": [(0, 16)]}
    assert found.held[1] == {"full/device": [(0, 4)]}
    parting = found.parting
    assert parting is not None
    assert (parting.row.number, differing(*parting.after)) == (2, ("full/device",))
    assert parting.row.head.counts == {"evicted/full/device": 12}


def test_the_words_say_what_each_held_hit_and_evicted(compared: Compared, tmp_path: Path) -> None:
    found = explained(compared, REQUESTS, {"pages": "9"}, tmp_path)
    said = " ".join(in_words(found, ("old", "new")))
    assert "old hit 16 tokens (16 device, 0 host, 0 storage)" in said
    assert "in full/device, old held tokens [0, 16) and new [0, 4)" in said
    assert "They first held different parts of it during request 2, in full/device." in said
    assert "During that request old evicted nothing" in said
    assert "During that request new evicted 12 of full/device" in said


def test_a_difference_that_was_made_good_is_no_parting(compared: Compared, tmp_path: Path) -> None:
    # request 1 takes a page of the first prompt, request 2 brings it back, request 3 takes it again
    requests = requests_of(*(prompt(name, 4) for name in (1, 2, 1, 3, 1)))
    head = {"pages": "7"}
    rows = compared(requests, head=head).rows
    found = [
        explain(rows[number], requests, POOLS, (FAKE, fake(head)), tmp_path).parting
        for number in (2, 4)
    ]
    assert [parting and parting.row.number for parting in found] == [1, 3]


def test_a_request_that_nobody_came_before_is_said_to_be_new(
    compared: Compared, tmp_path: Path
) -> None:
    requests = requests_of(prompt(1, 4))
    row = compared(requests, head={"says": "later"}).rows[0]
    found = explain(row, requests, POOLS, (FAKE, fake({"says": "later"})), tmp_path)
    said = " ".join(in_words(found, ("old", "new")))
    assert "Admission: None against later." in said
    assert "No earlier request shares a prefix with it." in said
    assert "both held the same" in said


def test_long_lists_of_spans_are_cut_short() -> None:
    spans = [(10 * each, 10 * each + 1) for each in range(6)]
    assert spans_in_words(spans).endswith("[30, 31) and 2 more")
    assert spans_in_words([]) == spans_in_words(None) == "nothing"

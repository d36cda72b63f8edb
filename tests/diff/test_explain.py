from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from experiments.diff.compare import Comparison, Row, token_ids
from experiments.diff.explain import (
    Explanation,
    changes_in_words,
    differing,
    explain,
    hits_in_words,
    in_words,
    spans_in_words,
)
from experiments.diff.protocol import Hits, Outcome
from hicache.request import Request
from tests.diff.sides import FAKE, PAGE, POOLS, fake, prompt, requests_of

OUTCOME = Outcome(hits=Hits(9, 0, 0))
Compared = Callable[..., Comparison]
# room for nine pages: the third prompt takes three pages of the first, the fourth sees it
REQUESTS = requests_of(prompt(1, 4), prompt(2, 4), prompt(3, 4), prompt(1, 4))


def explained(
    compared: Compared, requests: list[Request], head: dict[str, str], folder: Path
) -> Explanation:
    row = compared(requests, head=head).first_hit
    assert row is not None
    return explain(row, requests, POOLS, (FAKE, fake(head)), folder)


def test_the_request_that_evicted_the_pages_is_named(compared: Compared, tmp_path: Path) -> None:
    found = explained(compared, REQUESTS, {"pages": "9"}, tmp_path)
    assert (found.row.number, found.last_use) == (3, 0)
    assert found.held[0] == {"full/device": [(0, 16)]}
    assert found.held[1] == {"full/device": [(0, 4)]}
    parting = found.parting
    assert parting is not None
    assert (parting.row.number, differing(*parting.after)) == (2, ("full/device",))
    assert parting.row.head.counts == {"evicted/full/device": 12}


def test_the_words_say_what_sides_hit_held_evicted_and_changed(
    compared: Compared, tmp_path: Path
) -> None:
    found = explained(compared, REQUESTS, {"pages": "9"}, tmp_path)
    said = " ".join(in_words(found, ("old", "new")))
    assert "old hit 16 tokens (16 device, 0 host, 0 storage)" in said
    assert "in full/device, old held tokens [0, 16) and new [0, 4)" in said
    assert "They first held different parts of it during request 2, in full/device." in said
    assert "During that request old evicted nothing" in said
    assert "During that request new evicted 12 of full/device" in said
    assert "Changes (old → new): evicted full/device 0 → 12 (+12), " in said
    assert "hit full/device 16 → 4 (-12)" in said


def test_a_difference_that_was_undone_is_no_parting(compared: Compared, tmp_path: Path) -> None:
    # request 1 takes a page of the first prompt, request 2 brings it back, request 3 takes it again
    requests = requests_of(*(prompt(name, 4) for name in (1, 2, 1, 3, 1)))
    head = {"pages": "7"}
    rows = compared(requests, head=head).rows
    found = [
        explain(rows[number], requests, POOLS, (FAKE, fake(head)), tmp_path).parting
        for number in (2, 4)
    ]
    assert [parting and parting.row.number for parting in found] == [1, 3]


def test_an_explanation_says_that_no_earlier_request_shares_the_prefix(
    compared: Compared, tmp_path: Path
) -> None:
    requests = requests_of(prompt(1, 4))
    row = compared(requests, head={"says": "later"}).rows[0]
    found = explain(row, requests, POOLS, (FAKE, fake({"says": "later"})), tmp_path)
    said = " ".join(in_words(found, ("old", "new")))
    assert "Admission: None against later." in said
    assert "No earlier request shares a prefix with it." in said
    assert "both held the same" in said


def test_the_first_request_with_a_prefix_may_itself_make_the_difference(
    compared: Compared, tmp_path: Path
) -> None:
    # three pages hold a part of the first prompt from the beginning
    requests = requests_of(prompt(2, 1), prompt(1, 4), prompt(1, 4))
    head = {"pages": "3"}
    row = compared(requests, head=head).rows[2]
    parting = explain(row, requests, POOLS, (FAKE, fake(head)), tmp_path).parting
    assert parting is not None
    assert parting.row.number == 1
    assert parting.before == {}


def test_a_request_with_a_new_prefix_has_no_last_use(compared: Compared, tmp_path: Path) -> None:
    requests = requests_of(prompt(1, 4), prompt(2, 4), prompt(3, 4))
    head = {"pages": "9"}
    row = compared(requests, head=head).rows[2]
    found = explain(row, requests, POOLS, (FAKE, fake(head)), tmp_path)
    assert (found.last_use, found.held, found.parting) == (None, ({}, {}), None)


def test_only_the_prompt_is_probed_and_not_its_answer(compared: Compared, tmp_path: Path) -> None:
    # the fourth page of the prompt is whole with the first token of the answer
    short = [*prompt(1, 3), 70_001, 70_002]
    again = [*short, 900_002]
    requests = requests_of(again + [4] * 4, prompt(2, 4), short, prompt(3, 1))
    head = {"pages": "7"}
    row = compared(requests, head=head).rows[2]
    found = explain(row, requests, POOLS, (FAKE, fake(head)), tmp_path)
    assert len(short) % PAGE == PAGE - 1
    assert found.held[0] == {"full/device": [(0, len(short) - 3)]}


def test_an_earlier_prompt_shorter_than_a_page_does_not_count_as_last_use(
    compared: Compared, tmp_path: Path
) -> None:
    requests = requests_of([5], prompt(1, 4), prompt(2, 4), prompt(3, 4), prompt(1, 4))
    found = explained(compared, requests, {"pages": "9"}, tmp_path)
    assert len(token_ids(requests[0])) < PAGE
    assert (found.row.number, found.last_use) == (4, 1)


def test_changes_in_words_list_all_or_the_largest_amounts_and_no_page_names() -> None:
    counts = {"moved/swa/read": 1000, "evicted/full/host": 3}
    state = {"pages/full/device": 5}
    base = replace(OUTCOME, state={"pages/full/device": 9})
    head = Outcome(hits=Hits(0, 7, 0), counts=counts, state=state)
    row = Row(number=3, prompt_len=5, base=base, head=head)
    assert changes_in_words(row) == (
        "evicted full/host 0 → 3 (+3), hit full/device 9 → 0 (-9), hit full/host 0 → 7 (+7),"
        " copied swa/read 0 → 1,000 (+1,000)"
    )
    assert changes_in_words(row, 2) == (
        "copied swa/read 0 → 1,000 (+1,000), hit full/device 9 → 0 (-9), and 2 more"
    )
    assert changes_in_words(Row(number=3, prompt_len=5, base=OUTCOME, head=OUTCOME)) == ""


def test_hits_in_words_include_windows_and_states_if_there_are_any() -> None:
    counts = {"hit/swa/host": 1024, "hit/mamba/device": 0, "moved/full/read": 3}
    assert hits_in_words(Outcome(hits=Hits(1000, 20, 3), counts=counts)) == (
        "1,023 tokens (1,000 device, 20 host, 3 storage), swa on host 1,024"
    )
    assert hits_in_words(OUTCOME) == "9 tokens (9 device, 0 host, 0 storage)"


def test_long_lists_of_spans_are_cut_short() -> None:
    spans = [(10 * each, 10 * each + 1) for each in range(6)]
    assert spans_in_words(spans).endswith("[30, 31) and 2 more")
    assert spans_in_words([]) == spans_in_words(None) == "nothing"

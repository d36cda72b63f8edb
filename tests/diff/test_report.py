import json
from collections.abc import Callable
from pathlib import Path

from experiments.diff.compare import Comparison
from experiments.diff.report import dump, names_of, to_json, to_markdown, write_figure
from tests.diff.sides import prompt, requests_of

Compared = Callable[..., Comparison]
AGAIN = requests_of(prompt(1, 4), prompt(2, 4), prompt(1, 4), prompt(2, 4))
UNIT_BYTES = {"full": 1 << 28, "swa": 1, "mamba": 1}


def test_the_comment_says_rates_totals_kinds_and_the_first(compared: Compared) -> None:
    found = compared(AGAIN, head={"pages": "7", "version": "2"})
    comment = to_markdown(found, None, UNIT_BYTES, "Four requests.")
    assert "fake 2 against fake 1" in comment
    assert "Four requests. Hit rate **47.06% → 35.29%** (-11.76 points of 68" in comment
    assert "| hits: full device | 32 tokens (8.0 GiB) | 24 tokens (6.0 GiB) | -25.00% |" in comment
    assert "| head hits fewer tokens | 2 |" in comment
    assert (
        "**The first request with different hits** is request 2: head hits fewer tokens" in comment
    )
    assert "**The first difference of any kind** is in request 1: the same hits and" in comment


def test_the_comment_says_that_a_side_did_not_come_to_the_end(compared: Compared) -> None:
    found = compared(AGAIN, head={"fail_at": "2"})
    comment = to_markdown(found, None, UNIT_BYTES, "")
    assert "**Not finished**: at request 2 fake: no room is left." in comment


def test_sides_of_one_name_are_told_apart(compared: Compared) -> None:
    assert names_of(compared(AGAIN)) == ("fake 1 (base)", "fake 1 (head)")


def test_json_is_complete_and_the_same_for_equal_runs(compared: Compared, tmp_path: Path) -> None:
    texts = []
    for number in range(2):
        found = compared(AGAIN, head={"pages": "7"})
        path = tmp_path / f"{number}.json"
        dump(to_json(found, None, UNIT_BYTES, {"asked": {}}), path)
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    values = json.loads(texts[0])
    assert values["requests"] == 4
    assert (values["first"], values["first_hit"]) == (1, 2)
    assert values["kinds"] == {"fewer": 2, "evicted": 1, "equal": 1}
    assert [row["number"] for row in values["worst"]] == [2, 3, 1]
    assert values["totals"]["base"]["hit/full/device"] == 32


def test_the_figure_is_a_picture(compared: Compared, tmp_path: Path) -> None:
    write_figure(compared(AGAIN, head={"pages": "7"}), tmp_path / "diff.png")
    assert (tmp_path / "diff.png").read_bytes().startswith(b"\x89PNG")

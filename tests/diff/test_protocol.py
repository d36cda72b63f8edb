import io
import json
from dataclasses import asdict

import numpy as np
import pytest

from experiments.diff.protocol import (
    Hits,
    Outcome,
    Pools,
    outcome_from_json,
    tokens_from_json,
    tokens_to_json,
)
from experiments.diff.serve import serve
from tests.diff.sides import POOLS

OPEN = {"open": {"pools": asdict(POOLS), "options": {}}}


def answers_to(*questions: dict[str, object], module: str = "tests.diff.fake_side") -> list[object]:
    lines = io.StringIO("".join(json.dumps(each) + "\n" for each in questions))
    answers = io.StringIO()
    serve(module, lines, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def admit(number: int, *, finish: tuple[int, ...] = ()) -> dict[str, object]:
    tokens = tokens_to_json(np.arange(12, dtype=np.int32))
    return {"admit": number, "prompt_len": 10, "tokens": tokens, "finish": list(finish)}


def test_pools_come_through_the_wire() -> None:
    assert Pools(**json.loads(json.dumps(asdict(POOLS)))) == POOLS


def test_tokens_come_through_the_wire() -> None:
    tokens = np.array([0, 1, 2**31 - 1, 5], np.int32)
    assert tokens_from_json(tokens_to_json(tokens)).tolist() == tokens.tolist()


def test_an_outcome_comes_through_the_wire() -> None:
    outcome = Outcome(
        hits=Hits(64, 0, 128), counts={"moved/full/read": 128}, held={"full/host": 1}, admission="x"
    )
    assert outcome_from_json(json.loads(json.dumps(asdict(outcome)))) == outcome


def test_every_question_has_one_answer() -> None:
    probe = {"probe": tokens_to_json(np.arange(10, dtype=np.int32))}
    about, first, second, held, end = answers_to(
        OPEN, admit(0), admit(1, finish=(0,)), probe, {"close": True}
    )
    assert about == {"about": {"engine": "fake", "version": "1"}}
    assert (first["hits"], second["hits"]) == ([0, 0, 0], [8, 0, 0])
    assert held == {"spans": {"full/device": [[0, 8]]}}
    assert end == {}


def test_nothing_is_answered_after_an_error() -> None:
    failing = {"open": {"pools": asdict(POOLS), "options": {"fail_at": "0"}}}
    assert answers_to(failing, admit(0), admit(1))[1:] == [{"error": "no room is left"}]


def test_what_an_engine_raises_is_one_line() -> None:
    crashing = {"open": {"pools": asdict(POOLS), "options": {"crash_at": "0"}}}
    assert answers_to(crashing, admit(0))[1:] == [{"error": "RuntimeError: boom"}]


@pytest.mark.parametrize("module", ["tests.diff.no_such", "tests.diff.broken_side"])
def test_a_side_that_does_not_import_says_so(module: str) -> None:
    (answer,) = answers_to(OPEN, module=module)
    assert answer["error"].startswith("it does not import: ")


def test_a_side_must_be_opened_first() -> None:
    assert answers_to(admit(0)) == [{"error": "a side was asked before it was opened"}]


def test_a_question_that_nobody_knows_is_named() -> None:
    (_, answer) = answers_to(OPEN, {"evict": 3})
    assert answer == {"error": "asked ['evict'], which is none of open, admit, probe and close"}

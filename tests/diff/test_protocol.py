from multiprocessing import Pipe

import numpy as np
import pytest

from experiments.diff.protocol import SideError
from experiments.diff.serve import serve
from tests.diff.sides import POOLS

TOKENS = np.arange(12, dtype=np.int32)
OPEN = (POOLS, {})
Call = tuple[object, ...]


def answers_to(*told: object, module: str = "tests.diff.fake_side") -> list[object]:
    wire, theirs = Pipe()
    with wire, theirs:
        for each in (*told, []):
            wire.send(each)
        serve(module, theirs)
        answers = []
        while wire.poll():
            answers.append(wire.recv())
        return answers


def admit(number: int) -> Call:
    return ("admit", number, TOKENS, 10)


def error_of(answers: list[object]) -> str:
    assert isinstance(answers[-1], SideError)
    return str(answers[-1])


def test_every_list_of_calls_has_one_answer() -> None:
    calls = ([admit(0)], [("finish", 0), admit(1)], [("probe", TOKENS[:10])])
    about, first, second, held, peak_bytes = answers_to(OPEN, *calls)
    assert about == {"engine": "fake", "version": "1"}
    assert (first.hits, second.hits) == ((0, 0, 0), (8, 0, 0))
    assert held == {"full/device": [(0, 8)]}
    assert peak_bytes > 0


def test_nothing_is_answered_after_an_error() -> None:
    answers = answers_to((POOLS, {"fail_at": "0"}), [admit(0)], [admit(1)])
    assert len(answers) == 2
    assert error_of(answers) == "no room is left"


def test_an_exception_of_an_engine_is_reported_in_one_line() -> None:
    assert error_of(answers_to((POOLS, {"crash_at": "0"}), [admit(0)])) == "RuntimeError: boom"


@pytest.mark.parametrize("module", ["tests.diff.no_such", "tests.diff.broken_side"])
def test_a_side_that_cannot_be_imported_answers_with_an_error(module: str) -> None:
    assert error_of(answers_to(OPEN, module=module)).startswith("cannot be imported: ")

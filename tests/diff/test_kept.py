from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.diff.compare import Comparison, compare
from hicache.request import Request
from tests.diff.sides import FAKE, POOLS, fake, prompt, requests_of

Run = Callable[..., Comparison]
MANY = requests_of(*(prompt(each % 5, 6) for each in range(12)))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(many: list[Request], **changes: object) -> Comparison:
        base = replace(fake({"pages": "20"}), kept=tmp_path / "kept", **changes)
        return compare(many, POOLS, (base, FAKE), tmp_path)

    return run


def test_kept_answers_are_used_without_starting_the_side(run: Run) -> None:
    first = run(MANY[:8])
    second = run(MANY[:8], interpreter="no such program")
    assert second.rows == first.rows
    assert first.peak_bytes[0] is not None
    assert second.peak_bytes[0] is None


def test_further_requests_give_the_same_rows_as_a_fresh_run(run: Run, tmp_path: Path) -> None:
    run(MANY[:8])
    fresh = compare(MANY, POOLS, (fake({"pages": "20"}), FAKE), tmp_path)
    assert run(MANY).rows == fresh.rows


def test_kept_answers_are_not_used_for_other_requests(run: Run) -> None:
    run(MANY[:8])
    with pytest.raises(FileNotFoundError):
        run(MANY[1:8], interpreter="no such program")


def test_a_truncated_kept_answer_is_computed_again(run: Run, tmp_path: Path) -> None:
    first = run(MANY[:8])
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert run(MANY[:8]).rows == first.rows
    assert run(MANY[:8], interpreter="no such program").rows == first.rows


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    base = replace(fake({"crash_at": "3"}), kept=tmp_path / "kept")
    for _ in range(2):
        failure = compare(MANY[:8], POOLS, (base, FAKE), tmp_path).failure
        assert failure is not None
        assert "boom" in failure

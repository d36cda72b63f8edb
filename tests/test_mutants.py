"""The program that mutates: what it changes, and what it says of mistakes planted for it."""

from pathlib import Path

import pytest

from tests.mutants import killing
from tests.mutants import reach as reaching
from tests.mutants.__main__ import draw, equivalents, in_turn
from tests.mutants.killing import Fate, Trial, judge
from tests.mutants.operators import Mutant, mutants
from tests.mutants.packages import PACKAGES, ROOT, modules
from tests.mutants.reach import Reach, reach

PLANTED = """
LIMIT = 3

def is_over(count: int) -> bool:
    return count > LIMIT

def at_least_nothing(count: int) -> int:
    return max(count, 0)

def climbed(count: int) -> int:
    while count != LIMIT:
        count += 1
    return count

def unseen(count: int) -> int:
    return count - 1

class Plain:
    size = 0
    def grow(self) -> None:
        self.size += 2

class Tall(Plain):
    def grow(self) -> None:
        super().grow()
"""
PLANTED_TESTS = """
import planted

def test_the_limit_itself_is_not_over():
    assert planted.is_over(4)
    assert not planted.is_over(3)

def test_nothing_proved_by_large_numbers():
    assert planted.at_least_nothing(7) == 7

def test_the_limit_is_reached():
    assert planted.climbed(1) == 3

def test_what_is_inherited_is_done():
    tall = planted.Tall()
    tall.grow()
    assert tall.size == 2
"""


def changes(source: str) -> dict[tuple[str, str], str]:
    """(operator, the line after) → the line before."""
    found = mutants("module.py", source)
    return {(m.operator, m.change(source)[1]): m.change(source)[0] for m in found}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("x = a < b", [("boundary", "x = a <= b")]),
        ("x = a >= (b)", [("boundary", "x = a > (b)")]),
        ("x = a == b", [("negation", "x = a != b")]),
        ("x = a not in b", [("negation", "x = a in b")]),
        ("x = a and b or c", [("and_or", "x = (a and b and c)"), ("and_or", "x = (a or b) or c")]),
        ("x = a - b", [("swap", "x = (b - a)")]),
        ("x = a + b", []),
        ("x = f(a, b)", [("swap", "x = f(b, a)")]),
        ("x = max(a, b)", []),
        ("x = y[a:]", [("off_by_one", "x = y[a + 1:]")]),
        ("x = 7", [("off_by_one", "x = 8"), ("off_by_one", "x = 6")]),
        ("x = True", [("negation", "x = False")]),
        ("x = a if b else c", [("negation", "x = a if not (b) else c")]),
        ("x = [a for a in b if a]", [("negation", "x = [a for a in b if not (a)]")]),
        ("f()", [("dropped", "pass")]),
        ("x.y = a", [("dropped", "pass")]),
        ("x += y", [("dropped", "pass")]),
        ("raise ValueError(7)", [("dropped", "pass")]),
        ("def f() -> bool: return a", [("return", "def f() -> bool: return not (a)")]),
        ("def f() -> int: return a", [("return", "def f() -> int: return a + 1")]),
        ("def f() -> T: return a", [("return", "def f() -> T: return None")]),
    ],
)  # fmt: skip
def test_a_line_has_these_mutants_and_no_others(line: str, wanted: list[tuple[str, str]]) -> None:
    assert changes(line) == dict.fromkeys(wanted, line)


@pytest.mark.parametrize(
    "source",
    [
        '"""Text: 7 < 8."""',
        'x = f"{a:7}"',
        "x: Literal[7]",
        "assert a < 7",
        "raise AssertionError(7)",
        "class P(Protocol):\n    x: int = 7",
        'if __name__ == "__main__":\n    main()',
        "def __repr__(self): return 7",
        "@dataclass(frozen=True)\nclass C: pass",
        "x = zip(strict=True)",
    ],
)
def test_what_no_test_should_notice_is_left_alone(source: str) -> None:
    assert not changes(source)


def test_a_mutant_is_a_module_with_its_lines_where_they_were() -> None:
    for path in (ROOT / "hicache/scheduler/admission.py", ROOT / "hicache/engine/loop.py"):
        source = path.read_text()
        for mutant in mutants(path.name, source):
            compile(mutant.applied(source), path.name, "exec")
            assert mutant.applied(source).count("\n") == source.count("\n")


def test_a_seed_draws_the_same_mutants_and_another_one_draws_others() -> None:
    drawn = draw("scheduler", 30, seed=1)
    assert len({(m.path, m.start, m.end, m.operator) for m in drawn}) == 30
    assert drawn == draw("scheduler", 30, seed=1)
    assert drawn != draw("scheduler", 30, seed=2)


def test_tests_take_turns_the_quickest_first() -> None:
    seconds = {"a[1]": 1.0, "a[2]": 2.0, "a[3]": 3.0, "b": 5.0, "c[x]": 4.0, "c[y]": 0.5}
    assert in_turn(seconds, seconds) == ["c[y]", "a[1]", "b", "a[2]", "c[x]", "a[3]"]


def test_every_mutant_said_to_be_equivalent_is_one_there_is_and_has_a_proof() -> None:
    there_are = {
        (str(path.relative_to(ROOT)), *mutant.change(path.read_text()))
        for package in PACKAGES
        for path in modules(package)
        if str(path.relative_to(ROOT)) in {e["path"] for e in equivalents()}
        for mutant in mutants(str(path.relative_to(ROOT)), path.read_text())
    }
    for entry in equivalents():
        assert (entry["path"], entry["before"], entry["after"]) in there_are
        assert entry["proof"]


PLANTED_FATES = {
    ("return count > LIMIT", "return count >= LIMIT"): Fate.killed,
    ("LIMIT = 3", "LIMIT = 4"): Fate.killed,  # when it is imported
    ("return max(count, 0)", "return max(count, -1)"): Fate.survived,
    ("return count - 1", "return (1 - count)"): Fate.survived,  # no test runs it
    ("count += 1", "pass"): Fate.timed_out,
    ("super().grow()", "pass"): Fate.killed,  # a function without the cell of its class
}


def test_planted_mistakes_are_killed_or_survive_as_they_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "test_planted.py").write_text(PLANTED_TESTS)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(killing, "ROOT", tmp_path)
    monkeypatch.setattr(killing, "SLACK_S", 0.1)
    names = [line[4:-3] for line in PLANTED_TESTS.splitlines() if line.startswith("def")]
    tests = [f"test_planted.py::{name}" for name in names]
    trials = [
        Trial(mutant=m, afresh=m.at_import, tests=[] if "- 1" in m.change(PLANTED)[0] else tests)
        for m in mutants("planted.py", PLANTED)
        if m.change(PLANTED) in PLANTED_FATES
    ]

    heard: dict[Mutant, Fate] = {}
    fates = judge(
        trials,
        Reach(seconds=dict.fromkeys(tests, 0.1), lines={}),
        jobs=1,
        tell=lambda trial, fate: heard.setdefault(trial.mutant, fate),
    )

    assert {mutant.change(PLANTED): fate for mutant, fate in fates.items()} == PLANTED_FATES
    assert heard == fates


def test_a_line_is_reached_by_the_tests_that_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaching, "CACHE", tmp_path)
    path = "hicache/scheduler/budget.py"
    source = (ROOT / path).read_text().splitlines()
    line = 1 + source.index("        return base")

    found = reach(["tests/scheduler/test_budget.py"], jobs=1)

    reached = found.tests_of(path, [line])
    assert reached == {test for test in found.seconds if "[no_host_term-" in test}
    assert len(found.tests_of(path, None)) > len(reached) > 0

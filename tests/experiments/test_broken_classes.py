"""Classes that break their word, in each place where a user's own may stand.

Each ends the run with the line to look at, one sentence, and an exit code that is not 0.
"""

import sys
from collections.abc import Callable

import pytest

from hicache import experiment
from hicache.cli.check_policy import POOLS, TIGHT
from hicache.cli.job import report_error
from hicache.cli.schema import config_of

SMALL = (*TIGHT, *POOLS["tiny_hybrid"], "workload.limit=12", "engine.check_invariants=false")

# a good class for each decision, in a form that can be broken
CLASSES = {
    "rank": """
class Mine:
    asked = 0

    def rank(self, entry, tier, kind):
        self.asked += 1
        return (entry.used,)
""",
    "checkpoints": """
class Mine:
    asked = 0

    def checkpoints(self, kind, start, end, branch):
        self.asked += 1
        return [end]
""",
    "may_stop": """
class Mine:
    asked = 0

    def may_stop(self, prefetch, now_ns):
        self.asked += 1
        return prefetch.is_complete
""",
    "sort_key": """
class Mine:
    asked = 0

    def __init__(self, world):
        pass

    def sort_key(self, req, match):
        self.asked += 1
        return req.number
""",
    "window_charge": """
class Mine:
    asked = 0

    def window_charge(self, *, extend, chunk, window, page, swa_host_hit_length, max_new):
        self.asked += 1
        return extend + page
""",
}
# what each must return
MUST = {
    "rank": "expected a finite number, a tuple of them, or None, got ",
    "checkpoints": "expected a list of whole numbers or None, got ",
    "may_stop": "expected True or False, got ",
    "sort_key": "expected a finite number, got ",
    "window_charge": "expected a whole number of tokens, got ",
}
CHANGED = "cannot be set: a policy must not change "


# by what is wrong: the method, what of its class is replaced by what, the sentence
BROKEN: dict[str, tuple[str, str, str, str]] = {}
COUNT = "self.asked += 1"
for method, must in MUST.items():
    for what, given, shown in (
        ("gives a string", "'abc'", "'abc'"),
        ("gives nothing", "None", "None"),
        ("gives NaN", "float('nan')", "nan"),
        ("gives an object", "object()", "<object object at "),
    ):
        if given == "None" and "None" in must:
            continue  # the built-in policy decides
        BROKEN[f"{method} {what}"] = (method, COUNT, f"return {given}", must + shown)
    lacks = "has no method of a policy: the methods are on_insert, "
    BROKEN[f"{method} is named otherwise"] = (method, f"def {method}", "def other", lacks)
    fails = f"{COUNT}\n        1 // (3 - self.asked)"
    raised = "raised ZeroDivisionError: integer division or modulo by zero"
    BROKEN[f"{method} fails in the middle"] = (method, COUNT, fails, raised)
BROKEN |= {
    "may_stop changes a prefetch": ("may_stop", COUNT, "prefetch.completed_pages = 99", CHANGED),
    "sort_key changes a request": ("sort_key", COUNT, "req.remaining_output = 99", CHANGED),
    "rank changes the time of an entry": (
        "rank",
        COUNT,
        "entry.used += 1",
        "property 'used' of 'Entry' object has no setter",
    ),
    "an attribute of another type": (
        "rank",
        "asked = 0",
        "asked = 0\n    demotes = 'sometimes'",
        "demotes: expected True or False, got 'sometimes'",
    ),
    "a method of another signature": (
        "sort_key",
        "sort_key(self, req, match)",
        "sort_key(self, req)",
        "raised TypeError: Mine.sort_key() takes 2 positional arguments but 3 were given",
    ),
    "a constructor that fails": (
        "sort_key",
        "pass",
        "self.limit = 1 + world",
        "cannot be built: TypeError: unsupported operand type(s) for +: 'int' and 'World'",
    ),
}


@pytest.fixture
def ended(tmp_path, monkeypatch) -> Callable[[str], tuple[int, str, str]]:
    """Runs with a class of this source: how it ends, what is left, and the file."""

    def end(source: str) -> tuple[int, str, str]:
        file = tmp_path / "users_own.py"
        file.write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "users_own", raising=False)
        try:
            experiment.run(config_of(*SMALL, "cache.policy=users_own:Mine"))
        except Exception as error:
            return report_error(error, tmp_path), (tmp_path / "error.txt").read_text(), str(file)
        return 0, "", str(file)

    return end


@pytest.mark.parametrize("what", BROKEN)
def test_a_class_that_breaks_its_word_ends_the_run(what, ended, capsys):
    method, good, bad, sentence = BROKEN[what]
    assert CLASSES[method].count(good) == 1
    code, told, file = ended(CLASSES[method].replace(good, bad))
    assert code == 1
    *lines, last = told.splitlines()
    assert last.startswith("cache.policy=users_own:Mine")
    assert sentence in last
    assert any(f'File "{file}", line ' in line for line in lines)
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("method", CLASSES)
def test_the_classes_are_good_before_they_are_broken(method, ended):
    assert ended(CLASSES[method])[:2] == (0, "")


def test_what_is_typed_wrong_is_one_sentence_and_no_fault_of_the_class(ended):
    source = CLASSES["sort_key"].replace("self, world", "self")
    code, told, _ = ended(source)
    assert (code, told.count("\n")) == (2, 1)
    assert "cache.policy=users_own:Mine cannot be built: " in told

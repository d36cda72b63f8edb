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

# a good class for each knob, in a form that can be broken; what it must give; what it is shown
CLASSES = {
    "cache.eviction": """
class Mine:
    asked = 0

    def rank(self, entry, tier, kind):
        self.asked += 1
        return (entry.used,)
""",
    "cache.checkpoints": """
class Mine:
    asked = 0

    def __init__(self, page_size, grid_tokens):
        pass

    def lengths(self, start, end, branch):
        self.asked += 1
        return [end]
""",
    "prefetch.stop": """
class Mine:
    asked = 0
    waits = True
    uses_clock = False

    def __init__(self, config, page_size, rates):
        pass

    def may_stop(self, prefetch, now_ns):
        self.asked += 1
        return prefetch.is_complete

    def deadline_ns(self, prefetch):
        return None
""",
    "scheduler.order": """
class Mine:
    asked = 0

    def __init__(self, config, estimate_s):
        pass

    def sort_key(self, req, match):
        self.asked += 1
        return req.number
""",
    "scheduler.swa_budget": """
class Mine:
    asked = 0

    def tokens(self, *, extend, chunk, window, page, swa_host_hit_length, max_new):
        self.asked += 1
        return extend + page
""",
}
METHODS = {
    "cache.eviction": ("rank", "expected a finite number, a tuple of them, or None, got "),
    "cache.checkpoints": ("lengths", "expected a list of whole numbers, got "),
    "prefetch.stop": ("may_stop", "expected True or False, got "),
    "scheduler.order": ("sort_key", "expected a finite number, got "),
    "scheduler.swa_budget": ("tokens", "expected a whole number of tokens, got "),
}
CHANGED = "cannot be set: a policy must not change "


# by what is wrong: the knob, what of its class is replaced by what, the sentence
BROKEN: dict[str, tuple[str, str, str, str]] = {}
COUNT = "self.asked += 1"
for knob, (method, must) in METHODS.items():
    for what, given, shown in (
        ("gives a string", "'abc'", "['a', 'b', 'c']" if method == "lengths" else "'abc'"),
        ("gives nothing", "None", "None"),
        ("gives NaN", "float('nan')", "nan"),
        ("gives an object", "object()", "<object object at "),
    ):
        if (method, given) == ("rank", "None"):
            continue  # the default order
        BROKEN[f"{knob} {what}"] = (knob, COUNT, f"return {given}", must + shown)
    BROKEN[f"{knob} has another method"] = (knob, f"def {method}", "def other", f"lacks {method}")
    fails = f"{COUNT}\n        1 // (3 - self.asked)"
    raised = "raised ZeroDivisionError: integer division or modulo by zero"
    BROKEN[f"{knob} fails in the middle"] = (knob, COUNT, fails, raised)
for what, knob, meddles in (
    ("a prefetch", "prefetch.stop", "prefetch.completed_pages = 99"),
    ("a request", "scheduler.order", "req.remaining_output = 99"),
):
    BROKEN[f"{knob} changes {what}"] = (knob, COUNT, meddles, CHANGED)
BROKEN |= {
    "cache.eviction changes the time of an entry": (
        "cache.eviction",
        COUNT,
        "entry.used += 1",
        "property 'used' of 'Entry' object has no setter",
    ),
    "an attribute of another type": (
        "prefetch.stop",
        "waits = True",
        "waits = 'sometimes'",
        "waits: expected True or False, got 'sometimes'",
    ),
    "a method of another signature": (
        "scheduler.order",
        "sort_key(self, req, match)",
        "sort_key(self, req)",
        "raised TypeError: Mine.sort_key() takes 2 positional arguments but 3 were given",
    ),
    "a constructor that fails": (
        "scheduler.order",
        "pass",
        "self.limit = 1 + config.order",
        "cannot be built: TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    ),
}


@pytest.fixture
def ended(tmp_path, monkeypatch) -> Callable[[str, str], tuple[int, str, str]]:
    """Runs with a class of this source for a knob: how it ends, what is left, and the file."""

    def end(knob: str, source: str) -> tuple[int, str, str]:
        file = tmp_path / "users_own.py"
        file.write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "users_own", raising=False)
        try:
            experiment.run(config_of(*SMALL, f"{knob}=users_own:Mine"))
        except Exception as error:
            return report_error(error, tmp_path), (tmp_path / "error.txt").read_text(), str(file)
        return 0, "", str(file)

    return end


@pytest.mark.parametrize("what", BROKEN)
def test_a_class_that_breaks_its_word_ends_the_run(what, ended, capsys):
    knob, good, bad, sentence = BROKEN[what]
    assert CLASSES[knob].count(good) == 1
    code, told, file = ended(knob, CLASSES[knob].replace(good, bad))
    assert code == 1
    *lines, last = told.splitlines()
    assert last.startswith(f"{knob}=users_own:Mine")
    assert sentence in last
    assert any(f'File "{file}", line ' in line for line in lines)
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("knob", CLASSES)
def test_the_classes_are_good_before_they_are_broken(knob, ended):
    assert ended(knob, CLASSES[knob])[:2] == (0, "")


def test_what_is_typed_wrong_is_one_sentence_and_no_fault_of_the_class(ended):
    source = CLASSES["scheduler.order"].replace("config, estimate_s", "config")
    code, told, _ = ended("scheduler.order", source)
    assert (code, told.count("\n")) == (2, 1)
    assert "scheduler.order=users_own:Mine cannot be built: " in told

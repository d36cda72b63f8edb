"""Classes that break their word, in each place where a user's own may stand.

Each ends the run with the line to look at, one sentence, and an exit code that is not 0.
"""

import re
import sys
from collections.abc import Callable

import pytest

from hicache import experiment
from hicache.cli.check_policy import POOLS, TIGHT
from hicache.runs.errors import report_error
from hicache.runs.schema import config_of
from hicache.user_code import Stopped, UserCodeError, user_code

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
    "rank": "expected None, a finite number, or a tuple of numbers, strings and tuples, got ",
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
    ends = f"{COUNT}\n        sys.exit(0)"
    BROKEN[f"{method} ends the program"] = (method, COUNT, ends, "raised SystemExit: 0")
    BROKEN[f"{method} fails in the middle"] = (method, COUNT, fails, raised)
BROKEN |= {
    "may_stop changes a prefetch": ("may_stop", COUNT, "prefetch.completed_pages = 99", CHANGED),
    "sort_key changes a request": ("sort_key", COUNT, "req.remaining_output = 99", CHANGED),
    "sort_key changes a prompt": (
        "sort_key",
        COUNT,
        "req.request.prompt.starts[:] = 0",
        "assignment destination is read-only",
    ),
    "window_charge is more than any pool": (
        "window_charge",
        COUNT,
        "return 10**30",
        "expected a whole number of tokens, got 1000000",
    ),
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
    "a constructor that ends the program": (
        "sort_key",
        "pass",
        "sys.exit(0)",
        "cannot be built: SystemExit: 0",
    ),
    "a property that ends the program": (
        "rank",
        "asked = 0",
        "@property\n    def demotes(self): sys.exit(0)",
        "raised SystemExit: 0",
    ),
    "a module that ends the program": (
        "rank",
        "class Mine:",
        "sys.exit(0)\nclass Mine:",
        "the import of users_own raised SystemExit: 0",
    ),
    "a misspelt method": (
        "sort_key",
        "def sort_key",
        "def may_stopp(self, prefetch, now_ns): return True\n    def sort_key",
        "has a method may_stopp (did you mean may_stop?)",
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
        file.write_text(f"import sys\n{source}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "users_own", raising=False)
        try:
            experiment.run(config_of(*SMALL, "cache.policy=users_own:Mine"))
        except Exception as error:
            return report_error(error, tmp_path), (tmp_path / "error.txt").read_text(), str(file)
        return 0, "", str(file)

    return end


# by what is wrong: a class in the module of a setting, and how the error begins
OTHERS = {
    "a storage that ends the program": ("storage.kind", "sys.exit(0)", "SystemExit: 0"),
    "a storage that fails": ("storage.kind", "1 / 0", "ZeroDivisionError: division by zero"),
    "a storage of another answer": ("storage.kind", "return 1", "must return a list"),
    "a tokenizer that ends the program": ("workload.tokenizer", "sys.exit(0)", "SystemExit: 0"),
    "a tokenizer that fails": ("workload.tokenizer", "{}[text]", "KeyError: "),
}
OTHER_CLASSES = """
import sys
from hicache.storage.engines.memory import MemoryStorage

class Mine(MemoryStorage):
    def __init__(self, root, *, namespace, capacity_bytes, page_bytes):
        super().__init__(capacity_bytes=capacity_bytes, page_bytes=page_bytes)

    def contains(self, keys):
        FAULT

def encode(text):
    FAULT
"""
LOG = '{"prompt": "a prompt", "response": "an answer", "timestamp": 0}'


def workload_of(setting, tmp_path):
    if setting != "workload.tokenizer":
        return "workload=agents"
    (tmp_path / "log.jsonl").write_text(LOG)
    return f"workload.path={tmp_path}/log.jsonl"


@pytest.mark.parametrize("what", OTHERS)
def test_a_storage_or_tokenizer_that_fails_ends_the_run(what, tmp_path, monkeypatch, capsys):
    setting, fault, told = OTHERS[what]
    (tmp_path / "users_own.py").write_text(OTHER_CLASSES.replace("FAULT", fault))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    named = f"{setting}=users_own:{'Mine' if setting == 'storage.kind' else 'encode'}"
    with pytest.raises((UserCodeError, ValueError)) as ended:
        experiment.run(config_of(workload_of(setting, tmp_path), "workload.limit=3", named))
    assert report_error(ended.value) == (2 if "must" in told else 1)
    first, *lines = capsys.readouterr().err.splitlines()
    assert told in first
    assert "must" in told or (first.startswith(f"{named} raised ") and "users_own.py" in lines[1])


@pytest.mark.parametrize("name", ["..:x", ":x", "a b:c", "sys:", "sys:no.such", "math:pi"])
@pytest.mark.parametrize("setting", ["cache.policy", "storage.kind", "workload.tokenizer"])
def test_a_name_of_another_form_is_one_sentence(setting, name, tmp_path, capsys):
    config = config_of(workload_of(setting, tmp_path), f"{setting}='{name}'")
    with pytest.raises(ValueError, match=f"^{setting}={re.escape(name)} ") as refused:
        experiment.run(config)
    assert report_error(refused.value) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_function_that_ends_the_program_is_no_policy() -> None:
    with pytest.raises(UserCodeError, match="sys:exit cannot be built: SystemExit"):
        experiment.run(config_of(*SMALL, "cache.policy=sys:exit"))


def test_a_property_that_ends_the_program_during_a_run_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "users_own.py").write_text(
        "import sys\nclass Rank(float):\n    def __lt__(self, other): sys.exit(0)\n"
        "class Mine:\n    def rank(self, entry, tier, kind): return Rank(entry.used)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    with pytest.raises(UserCodeError, match="SystemExit: 0"):
        experiment.run(config_of(*SMALL, "cache.policy=users_own:Mine"))


def test_a_signal_and_ctrl_c_pass_through_a_users_class() -> None:
    for error in (Stopped(143), KeyboardInterrupt()):
        with pytest.raises(type(error)), user_code("a class"):
            raise error


def test_a_fault_of_ours_asks_for_a_report(capsys) -> None:
    assert report_error(AssertionError("two pages have one id")) == 1
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("AssertionError: two pages have one id: a fault of hicache; please")
    assert lines == ["AssertionError: two pages have one id"]


@pytest.mark.parametrize("what", BROKEN)
def test_a_class_that_breaks_its_word_ends_the_run(what, ended, capsys):
    method, good, bad, sentence = BROKEN[what]
    assert CLASSES[method].count(good) == 1
    code, told, file = ended(CLASSES[method].replace(good, bad))
    assert code == 1
    first, *lines = told.splitlines()
    assert first.startswith("cache.policy=users_own:Mine")
    assert sentence in first
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

"""Classes of the user that fail or return wrong values, in each setting that takes a class.

Each ends the run with one sentence, the line that failed, and an exit code that is not 0.
"""

import re
import sys

import pytest

from hicache import experiment
from hicache.cli.check_policy import POOLS, TIGHT
from hicache.runs.errors import report_error
from hicache.runs.schema import config_of
from hicache.user_code import Stopped, UserCodeError, user_code

SMALL = (*TIGHT, *POOLS["tiny_hybrid"], "workload.limit=12", "engine.check_invariants=false")
SOURCE = """
import sys

class Mine:
    asked = 0

    def __init__(self, world):
        pass

    def {signature}:
        self.asked += 1
        return {answer}
"""
# by method: its signature, a good answer, and what an answer must be
METHODS = {
    "rank": (
        "rank(self, entry, tier, kind)",
        "(entry.used,)",
        "None, a finite number, or a tuple of numbers, strings and tuples",
    ),
    "checkpoints": (
        "checkpoints(self, kind, start, end, branch)",
        "[end]",
        "a list of whole numbers or None",
    ),
    "may_stop": ("may_stop(self, prefetch, now_ns)", "prefetch.is_complete", "True or False"),
    "sort_key": ("sort_key(self, req, match)", "req.number", "a finite number"),
    "starts": ("starts(self, request)", "request.id < 0", "True or False"),
    "window_charge": (
        "window_charge(self, *, extend, chunk, window, page, swa_host_hit_length, max_new)",
        "extend + page",
        "a whole number of tokens",
    ),
}
CLASSES = {
    method: SOURCE.format(signature=signature, answer=answer)
    for method, (signature, answer, _) in METHODS.items()
}
BODY = "self.asked += 1"
FIELD = "asked = 0"
CHANGED = "cannot be set: a policy must not change "
# method, what is replaced in its class, by what, and the sentence
BROKEN = [
    ("may_stop", BODY, "prefetch.completed_pages = 99", CHANGED),
    ("sort_key", BODY, "req.remaining_output = 99", CHANGED),
    ("sort_key", BODY, "req.request.prompt.starts[:] = 0", "destination is read-only"),
    ("window_charge", BODY, "return 10**30", "expected a whole number of tokens, got 1000000"),
    ("rank", BODY, "entry.used += 1", "property 'used' of 'Entry' object has no setter"),
    ("rank", FIELD, "demotes = 'sometimes'", "demotes: expected True or False, got 'sometimes'"),
    ("sort_key", "(self, req, match)", "(self, req)", "raised TypeError: Mine.sort_key() takes 2 "),
    ("sort_key", "pass", "sys.exit(0)", "cannot be built: SystemExit: 0"),
    ("sort_key", "pass", "1 + world", "cannot be built: TypeError: unsupported operand type(s)"),
    ("rank", FIELD, "demotes = property(lambda self: sys.exit(0))", "raised SystemExit: 0"),
    ("rank", "class Mine:", "sys.exit(0)\nclass Mine:", "import of users_own raised SystemExit: 0"),
    ("sort_key", FIELD, "def may_stopp(self): pass", "a method may_stopp (did you mean may_stop?)"),
]
for method, (_, _, wanted) in METHODS.items():
    for given, shown in (
        ("'abc'", "'abc'"),
        ("None", "None"),
        ("float('nan')", "nan"),
        ("object()", "<object object at "),
    ):
        if given != "None" or "None" not in wanted:  # else the built-in policy decides
            told = f"expected {wanted}, got {shown}"
            BROKEN.append((method, BODY, f"return {given}", told))
    raised = "raised ZeroDivisionError: integer division or modulo by zero"
    BROKEN += [
        (method, f"def {method}", "def other", "has no method of a policy: the methods are "),
        (method, BODY, f"{BODY}\n        1 // (3 - self.asked)", raised),
        (method, BODY, f"{BODY}\n        sys.exit(0)", "raised SystemExit: 0"),
    ]


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """A function that writes a text to `users_own.py`, which can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    return (tmp_path / "users_own.py").write_text


def outcome_of(source, write_module, tmp_path):
    """Run with the class `Mine` of `source`; return the exit code and the text of its error."""
    write_module(source)
    try:
        experiment.run(config_of(*SMALL, "cache.policy=users_own:Mine"))
    except Exception as error:
        return report_error(error, tmp_path), (tmp_path / "error.txt").read_text()
    return 0, ""


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_with_one_right_method_runs(method, write_module, tmp_path):
    assert outcome_of(CLASSES[method], write_module, tmp_path) == (0, "")


@pytest.mark.parametrize(("method", "old", "new", "sentence"), BROKEN)
def test_a_wrong_policy_ends_the_run(method, old, new, sentence, write_module, tmp_path, capsys):
    assert CLASSES[method].count(old) == 1
    code, told = outcome_of(CLASSES[method].replace(old, new), write_module, tmp_path)
    assert code == 1
    first, *lines = told.splitlines()
    assert first.startswith("cache.policy=users_own:Mine")
    assert sentence in first
    assert any(f'File "{tmp_path / "users_own.py"}", line ' in line for line in lines)
    assert capsys.readouterr().err == told


def test_a_constructor_without_the_argument_world_is_refused_in_one_sentence(
    write_module, tmp_path
):
    source = CLASSES["sort_key"].replace("self, world", "self")
    code, told = outcome_of(source, write_module, tmp_path)
    assert (code, told.count("\n")) == (2, 1)
    assert "cache.policy=users_own:Mine cannot be built: " in told


EXITS = """
import sys

class Rank(float):
    def __lt__(self, other): sys.exit(0)

class Mine:
    def rank(self, entry, tier, kind): return Rank(entry.used)
"""


@pytest.mark.parametrize(
    ("policy", "message"),
    [("sys:exit", "sys:exit cannot be built: SystemExit"), ("users_own:Mine", "SystemExit: 0")],
)
def test_a_policy_that_exits_ends_the_run_with_an_error(policy, message, write_module):
    write_module(EXITS)
    with pytest.raises(UserCodeError, match=message):
        experiment.run(config_of(*SMALL, f"cache.policy={policy}"))


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


def workload_of(setting, tmp_path):
    if setting != "workload.tokenizer":
        return "workload=agents"
    log = '{"prompt": "a prompt", "response": "an answer", "timestamp": 0}'
    (tmp_path / "log.jsonl").write_text(log)
    return f"workload.path={tmp_path}/log.jsonl"


@pytest.mark.parametrize(
    ("setting", "fault", "told"),
    [
        ("storage.kind", "sys.exit(0)", "SystemExit: 0"),
        ("storage.kind", "1 / 0", "ZeroDivisionError: division by zero"),
        ("storage.kind", "return 1", "must return a list"),
        ("workload.tokenizer", "sys.exit(0)", "SystemExit: 0"),
        ("workload.tokenizer", "{}[text]", "KeyError: "),
    ],
)
def test_a_wrong_storage_or_tokenizer_ends_the_run(
    setting, fault, told, write_module, tmp_path, capsys
):
    write_module(OTHER_CLASSES.replace("FAULT", fault))
    named = f"{setting}=users_own:{'Mine' if setting == 'storage.kind' else 'encode'}"
    with pytest.raises((UserCodeError, ValueError)) as ended:
        experiment.run(config_of(workload_of(setting, tmp_path), "workload.limit=3", named))
    assert report_error(ended.value) == (2 if "must" in told else 1)
    first, *lines = capsys.readouterr().err.splitlines()
    assert told in first
    assert "must" in told or (first.startswith(f"{named} raised ") and "users_own.py" in lines[1])


@pytest.mark.parametrize("name", ["..:x", ":x", "a b:c", "sys:", "sys:no.such", "math:pi"])
@pytest.mark.parametrize("setting", ["cache.policy", "storage.kind", "workload.tokenizer"])
def test_a_name_that_is_no_module_and_class_is_refused(setting, name, tmp_path, capsys):
    config = config_of(workload_of(setting, tmp_path), f"{setting}='{name}'")
    with pytest.raises(ValueError, match=f"^{setting}={re.escape(name)} ") as refused:
        experiment.run(config)
    assert report_error(refused.value) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("error", [Stopped(143), KeyboardInterrupt()])
def test_a_signal_passes_through_a_class_of_the_user(error):
    with pytest.raises(type(error)), user_code("a class"):
        raise error


def test_an_optional_package_that_is_missing_is_named_with_the_command_that_installs_it(capsys):
    assert report_error(ModuleNotFoundError("No module named 'wandb'", name="wandb.sdk")) == 2
    told = "wandb is not installed: pip install 'hicache[wandb]'"
    assert told in capsys.readouterr().err
    assert report_error(ModuleNotFoundError("No module named 'numby'", name="numby")) == 1


def test_an_error_of_the_library_asks_for_a_report(capsys):
    assert report_error(AssertionError("two pages have one id")) == 1
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("AssertionError: two pages have one id: a fault of hicache; please")
    assert lines == ["AssertionError: two pages have one id"]

"""Each command in README and docs runs at small size, and quoted output is that of its command.

A grid is cut to its first combination, and a trace to a few requests of a small file of its kind.
`tests/results/test_verdict.py` runs the commands of docs/verdict.md, and `tests/kernels` those of
docs/kernels.md.
"""

import json
import os
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import hicache
from hicache import experiment
from hicache.cli import check_policy
from hicache.cli.explain import command as explain
from hicache.cli.main import COMMANDS
from hicache.runs.schema import config_of, grid_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = ("verdict.md", "kernels.md", "knobs.md")
BLOCK = re.compile(r"^```bash\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^ {4}(hicache (?:.*\\\n)*.*)$", flags=re.MULTILINE)
INLINE = re.compile(r"(?<!`)`((?:hicache|python -m) [^`]+)`")
FIXTURES = ROOT / "tests" / "workload" / "fixtures"
MODEL = ROOT / "examples" / "hugging_face" / "llama" / "config.json"
# words of the pages that stand for something of the user's
OWN = {
    "Qwen3-8B/config.json": str(MODEL), "Qwen3-Coder-30B/config.json": str(MODEL),
    "mine.jsonl": "small.jsonl", "FOLDER": str(MODEL.parent),
    "agentx.jsonl": str(FIXTURES / "kv_cache_tester.jsonl"), "60": "0",
    "my_module:Mine": "my:Store",
    "my_storage:Mine": "my:Store",
    "my_policies:Mine": "my:Mine", "my_policies:CheapStatesFirst": "my:Mine",
    "mine:Wanted": "my:Mine",
    "RUN_OR_SWEEP": "RUN", "DIRECTORY": "RUN", "outputs/fault_matrix/TIME": "SWEEP",
    "outputs/adhoc/SWEEP": "SWEEP", "KEY": "request/ttft_s_mean",
}  # fmt: skip
# what a test cannot run, by the words that begin the command, and why
NOT_RUN = {
    "pip install": "installs packages",
    "make": "sets up an environment and runs this test",
    "python -m experiments": "needs releases of other engines, or hours: its module must exist",
    "python -m pytest": "runs tests",
    "python -m hicache.storage.bench": "takes minutes: tests/storage/test_storage_bench.py",
    "hicache run -m hydra/launcher=": "needs a cluster",
    "hicache calibrate": "needs the log of a server: tests/studies",
    "hicache validate": "needs the log of a server: tests/cli/test_validate.py",
    "hicache record": "waits for a server: tests/record",
    "hicache anonymize": "needs a trace of the user's: tests/record",
    "hicache advise": "simulates a grid: tests/cli/test_advise.py",
    "hicache size": "simulates a grid: tests/cli/test_size.py",
}
OF_KIND = {"weka_agentic": FIXTURES / "kv_cache_tester.jsonl"} | dict.fromkeys(
    ("mooncake_conversation", "mooncake_synthetic", "mooncake_toolagent"), "small.jsonl"
)
SMALL_RUN = ("workload.limit=20", "tracker.wandb_mode=disabled")


def commands_of(page):
    text = page.read_text()
    blocks = "\n".join([*BLOCK.findall(text), *INDENTED.findall(text)]).replace("\\\n", " ")
    spans = [" ".join(each.split()) for each in INLINE.findall(text)]
    lines = [*blocks.splitlines(), *(each for each in spans if len(each.split()) > 2)]
    found = [tuple(shlex.split(line, comments=True)) for line in lines]
    return [each for each in found if each and not re.search(r"[A-Z]=|…|\.\.\.|<", " ".join(each))]


COMMANDS_OF_PAGES = {
    command: page.name  # the first page that has it
    for page in reversed(PAGES)
    if page.name not in ELSEWHERE
    for command in commands_of(page)
}


def reason_not_to_run(command):
    line = " ".join(command)
    return next((why for start, why in NOT_RUN.items() if line.startswith(start)), None)


TO_RUN = [each for each in COMMANDS_OF_PAGES if reason_not_to_run(each) is None]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with what the commands name: a trace, a policy, a storage engine, results."""
    folder = tmp_path_factory.mktemp("commands")
    rows = [
        {"timestamp": 900 * i, "input_length": 1500, "output_length": 9, "hash_ids": [i % 3, 9, i]}
        for i in range(12)
    ]
    (folder / "small.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "my.py").write_text(
        "from hicache.storage.engines.memory import MemoryStorage\n"
        "class Mine:\n    def rank(self, entry, tier, kind):\n        return entry.used\n"
        "class Store(MemoryStorage):\n    def __init__(self, root, *, namespace, **sizes):\n"
        "        super().__init__(**sizes)\n"
    )
    machines = (ROOT / "docs" / "machines.md").read_text()
    (folder / "mine.csv").write_text(re.search(r"^```\n(curve,.*?)^```", machines, re.M | re.S)[1])
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        run = hicache.run(*SMALL_RUN, out_dir="RUN")
        patch.setitem(OWN, "ID", str(run.requests.session_id[0]))
        hicache.sweep(*SMALL_RUN, "cache.host_gib=32,64", "cache.policy=lru,slru", out_dir="SWEEP")
        yield folder


def small(overrides):
    """Overrides of the first run of a grid, with few requests and a small file for a trace."""
    first = dict(_first(each) for each in overrides)
    first = dict(_first(each) for each in grid_of(*_joined(first)).values()) | first
    file = OF_KIND.get(config_of(*_joined(first)).workload.kind)
    if file is not None and "workload.path" not in first:
        first["workload.path"] = file
    if "workload.slice" in first:  # 8 requests are too few for slices after a warm-up
        first |= {"workload.slice": "null", "workload.warm_up_s": "0"}
    return _joined(first | {"workload.limit": "8"})


def _joined(values):
    return tuple(f"{name}={value}" for name, value in values.items())


def _first(override):
    name, value = override.split("=", 1)
    is_list = value[:1] in "[{'\"" or value.startswith("choice(")
    return name, value if is_list else value.split(",")[0]


def run(words):
    flags = {"-m", "--until", "--metric"}
    values = [each for at, each in enumerate(words) if at and words[at - 1] in flags - {"-m"}]
    overrides = [each for each in words if each not in flags and each not in values]
    if overrides[:1] == ["--help"] or "--cfg" in overrides:
        return
    result = experiment.run(config_of(*small(overrides)))
    assert result.records


@pytest.mark.parametrize("command", TO_RUN, ids=" ".join)
def test_a_command_of_the_docs_runs(command, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = [OWN.get(each, each) for each in command]
    words = [re.sub(r"(?<=[=,])([^=,]+)", lambda m: OWN.get(m[1], m[1]), each) for each in words]
    assert words[0] == "hicache", f"{' '.join(command)}: not run, and NOT_RUN gives no reason"
    if words[1] == "run":
        run(words[2:])
        return
    if words[1] == "curve":
        words[2:] = [*small(words[2:])]
    # tests/cli/test_check_policy.py makes the whole check
    monkeypatch.setattr(check_policy, "POOLS", {"tiny_hybrid": check_policy.POOLS["tiny_hybrid"]})
    monkeypatch.setattr(check_policy, "TIGHT", (*check_policy.TIGHT, "workload.limit=8"))
    import_module(COMMANDS[words[1]][0]).main(words[2:])
    assert capsys.readouterr().out


@pytest.mark.parametrize("start", NOT_RUN)
def test_every_kind_of_command_that_is_not_run_is_on_a_page(start):
    assert any(" ".join(command).startswith(start) for command in COMMANDS_OF_PAGES)


def test_every_module_that_the_docs_run_exists():
    modules = {each[2] for each in COMMANDS_OF_PAGES if each[:2] == ("python", "-m")}
    assert [each for each in sorted(modules) if find_spec(each) is None] == []


@pytest.mark.skipif("HICACHE_DATA" not in os.environ, reason="HICACHE_DATA names no traces")
def test_the_explanation_in_the_docs_is_that_of_its_run(tmp_path, capsys):
    page = (ROOT / "docs" / "explain.md").read_text()
    (told,) = re.findall(r"^`hicache run ([^`]+)`:$", page, flags=re.MULTILINE)
    quoted = re.search(r"^```\n(Request .*?)^```", page, flags=re.DOTALL | re.MULTILINE)[1]
    hicache.run(*told.split(), out_dir=tmp_path / "run")
    capsys.readouterr()
    explain.main([str(tmp_path / "run"), "--request", re.search(r"\d+", quoted)[0]])
    printed = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    lines = [
        " ".join(line.split()) for line in quoted.replace(" (shortened here)", "").splitlines()
    ]
    assert [line for line in lines if line not in printed] == []

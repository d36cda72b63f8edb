"""Equal settings give equal runs and refusals from the command, from Python and from a file."""

import json
import sys
from contextlib import suppress

import pytest
import yaml

import hicache
from hicache.cli.run import main
from hicache.runs.schema import CONF

SMALL = ("model=llama3_8b", "workload.num_sessions=3", "tracker.wandb_mode=disabled")
AGENTS = "workload=agents"
RUNS = [
    ("workload=chat", "goodput.num_rates=2"),
    (AGENTS, "compat=sglang_0_5_23", "metrics=[cache/token_hit_rate]", "storage.write_hits=2"),
]
REFUSED = [
    ((AGENTS, "metrics=[cache/token_hit_ratee]"), "unknown metric cache/token_hit_ratee"),
    ((AGENTS, "cache.typo=1"), "'typo'"),
    ((AGENTS, "storage.kind=nowhere:Own"), "storage.kind=nowhere:Own cannot be loaded"),
]


def by_command(overrides, folder):
    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
        patch.setattr(sys, "argv", ["hicache run", *overrides, f"hydra.run.dir={folder}"])
        main()


def by_file(overrides, folder):
    settings, defaults = {}, []
    for override in overrides:
        key, _, value = override.partition("=")
        if (CONF / key).is_dir():
            defaults.append({f"override /{key}": value})
            continue
        *groups, name = key.split(".")
        group = settings
        for each in groups:
            group = group.setdefault(each, {})
        group[name] = yaml.safe_load(value)
    file = folder.parent / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    text = yaml.safe_dump({"defaults": defaults, **settings}, sort_keys=False)
    file.write_text(f"# @package _global_\n{text}")
    by_command(["--config-dir", str(file.parents[1]), "experiment=mine"], folder)


def by_python(overrides, folder):
    try:
        hicache.run(*overrides, out_dir=folder)
    except ValueError as error:
        print(error, file=sys.stderr)


@pytest.fixture
def by_every_entry(tmp_path, capsys):
    """Return a function that runs overrides by each entry and returns the errors and summaries."""

    def call(overrides):
        told = []
        for entry in (by_command, by_python, by_file):
            entry((*SMALL, *overrides), tmp_path / entry.__name__)
            told.append(capsys.readouterr().err)
        return told, [path.read_text() for path in tmp_path.glob("*/summary.json")]

    return call


@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_the_command_python_and_a_file_give_equal_summaries(overrides, by_every_entry):
    told, summaries = by_every_entry(overrides)
    assert len(summaries) == 3
    assert len(set(summaries)) == 1
    has_goodput = "goodput/requests_per_s" in json.loads(summaries[0])
    assert has_goodput == ("goodput.num_rates=2" in overrides)
    # a file of settings may serve several runs: only what is typed must have an effect
    assert told[0] == told[1]
    assert ("has no effect" in told[0]) == ("storage.write_hits=2" in overrides)


@pytest.mark.parametrize(("overrides", "why"), REFUSED, ids=str)
def test_the_command_python_and_a_file_refuse_the_same_settings(overrides, why, by_every_entry):
    told, summaries = by_every_entry(overrides)
    for each in told:
        assert why in each
        assert each.count("\n") == 1
    assert not summaries

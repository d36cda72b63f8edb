"""The same settings give the same run from the command line, from Python and from a file."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

import hicache
from hicache.cli.run import main
from hicache.runs.schema import CONF

SMALL = ("model=llama3_8b", "workload.num_sessions=3", "tracker.wandb_mode=disabled")
AGENTS = "workload=agents"
RUNS = [
    (AGENTS,),
    ("workload=chat", "goodput.num_rates=2"),
    (AGENTS, "storage=none", "cache.host_gib=0"),
    (AGENTS, "compat=sglang_0_5_23", "metrics=[cache/token_hit_rate]"),
    (AGENTS, "storage.write_hits=2"),
]
REFUSED = [
    ((AGENTS, "metrics=[cache/token_hit_ratee]"), "unknown metric cache/token_hit_ratee"),
    ((AGENTS, "cache.typo=1"), "'typo'"),
    ((AGENTS, "workload.path=trace.jsonl"), "workload.path has no effect"),
    ((AGENTS, "cache.page_size=0"), "cache.page_size must be between"),
    ((AGENTS, "storage.kind=nowhere:Own"), "storage.kind=nowhere:Own cannot be loaded"),
]


def by_command(overrides, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hicache run", *overrides, f"hydra.run.dir={folder}"])
    with suppress(SystemExit):
        main()
    return capsys.readouterr().err


def by_file(overrides, folder, monkeypatch, capsys):
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
    experiment = ["--config-dir", str(file.parents[1]), "experiment=mine"]
    return by_command(experiment, folder, monkeypatch, capsys)


def by_python(overrides, folder, monkeypatch, capsys):
    try:
        hicache.run(*overrides, out_dir=folder)
    except ValueError as error:
        return f"{error}\n"
    return capsys.readouterr().err


ENTRIES = by_command, by_python, by_file


def summaries(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*/summary.json"))]


@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_every_entry_gives_the_same_summary(overrides, tmp_path, monkeypatch, capsys):
    told = [
        entry((*SMALL, *overrides), tmp_path / entry.__name__, monkeypatch, capsys)
        for entry in ENTRIES
    ]
    first, *others = summaries(tmp_path)
    assert len(others) == 2
    assert all(each == first for each in others)
    assert ("goodput/requests_per_s" in json.loads(first)) == ("goodput.num_rates=2" in overrides)
    # a file of settings may serve several runs: only what is typed must have an effect
    assert told[0] == told[1]
    assert ("has no effect" in told[0]) == (overrides[-1] == RUNS[-1][-1])


@pytest.mark.parametrize(("overrides", "why"), REFUSED, ids=str)
def test_every_entry_refuses_the_same(overrides, why, tmp_path, monkeypatch, capsys):
    for entry in ENTRIES:
        told = entry((*SMALL, *overrides), tmp_path / entry.__name__, monkeypatch, capsys)
        assert why in told, entry.__name__
        assert told.count("\n") == 1
    assert not summaries(tmp_path)

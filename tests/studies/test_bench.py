"""The bench of replay times against other commits, and the bench of operations on one tree."""

import json
import re
import subprocess
import sys

import pytest

from experiments.bench import one_tree, replay

TINY = ["workload=builtin", "workload.limit=5", "storage=memory"]


def test_settings_of_this_version_are_not_passed_to_the_other_commit(monkeypatch, capsys):
    def check_out(commit, folder):
        folder.mkdir()
        for name in ("hicache", "experiments", "conf"):
            (folder / name).symlink_to(replay.ROOT / name)

    monkeypatch.setattr(replay, "check_out", check_out)
    options = ["--against=now", "--pairs=1", "--here=scheduler.chunk_tokens=512"]
    monkeypatch.setattr(sys, "argv", ["replay", *options, *TINY])
    assert replay.main() == 1
    ratios, verdict = capsys.readouterr().out.splitlines()[-2:]
    before, now, ratio, bound = map(float, re.findall(r"(\d+\.\d+)(?: s|,|;)", ratios)[:4])
    assert ratio == bound == pytest.approx(now / before, rel=0.1)
    assert verdict.startswith("the summaries differ in ")


def test_the_upper_bound_of_the_median_ratio_is_in_the_upper_half_of_the_ratios():
    ratios = [1 + 0.01 * number for number in range(15)]
    assert 1.07 < replay.upper_bound(ratios) <= 1.12
    assert replay.upper_bound([1.25]) == 1.25


@pytest.mark.parametrize(
    ("against", "said"),
    [
        pytest.param("HEAD", "/gone does not exist", marks=pytest.mark.soak),
        ("no_such_commit", "no_such_commit"),
    ],
)
def test_a_failed_bench_reports_the_cause_in_sentences(against, said):
    program = [sys.executable, "-m", "experiments.bench.replay", f"--against={against}"]
    knobs = ["workload=trace", "workload.path=/gone"]
    done = subprocess.run([*program, *knobs], cwd=replay.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    why, *_, which = done.stderr.splitlines()
    assert said in why
    assert which.startswith("command failed with exit status ")


def test_only_keys_of_both_summaries_are_compared():
    assert replay.differences({"a": 1, "b": 2.0, "c": 0}, {"a": 1, "b": 2, "d": 5}) == ["b"]


@pytest.mark.parametrize("components", one_tree.MODELS)
def test_every_operation_in_the_bench_of_trees_takes_time(components, monkeypatch, capsys):
    monkeypatch.setattr(one_tree, "NUM_PROMPTS", 10)
    monkeypatch.setattr(one_tree, "DEPTH", 16)
    one_tree.main("ours", components)
    took_us = json.loads(capsys.readouterr().out)
    rows = ["insert", "match", "match, 16 nodes", "lock", "lock, 16 nodes", "evict"]
    assert list(took_us) == rows
    assert min(took_us.values()) > 0

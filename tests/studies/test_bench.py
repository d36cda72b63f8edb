"""The benches of replays, against a checkout of its own, and of trees."""

import json
import shutil
import subprocess
import sys

import pytest

from experiments.bench import one_tree, replay

TINY = ["workload=builtin", "workload.limit=5", "storage=memory"]


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """What the bench prints and how it ends, against a copy of this checkout with an edit."""

    def bench(edit=None, options=()):
        def check_out(commit, folder):
            folder.mkdir()
            for name in ("hicache", "experiments", "conf"):
                (folder / name).symlink_to(replay.ROOT / name)
            if edit is not None:
                edit(folder)

        monkeypatch.setattr(replay, "check_out", check_out)
        monkeypatch.setattr(sys, "argv", ["replay", "--against=now", "--pairs=1", *options, *TINY])
        status = replay.main()
        return status, capsys.readouterr().out

    return bench


def test_a_replay_that_says_the_same_is_told_so(told, monkeypatch):
    run = {"processor_s": 2.0, "peak_mb": 60.0, "summary": {"request/count": 10}}
    slower = run | {"processor_s": 2.5}
    monkeypatch.setattr(replay, "one_pair", lambda *_: (run, slower))
    status, said = told()
    assert status == 0
    assert said.splitlines()[-1] == "equal summaries"
    assert "now 2.00 s, this tree 2.50 s; ratio 1.250, upper 95 % bound 1.250; 4 requests" in said


def test_the_upper_bound_lies_within_the_upper_half_of_the_ratios():
    ratios = [1 + 0.01 * number for number in range(15)]
    assert 1.07 < replay.upper_bound(ratios) <= 1.12


def test_settings_of_one_version_do_not_reach_the_other(told):
    status, said = told(options=["--here=scheduler.chunk_tokens=512"])
    assert status == 1
    status, said = told(options=["--here=seed=1", "--there=seed=1"])
    assert (status, said.splitlines()[-1]) == (0, "equal summaries")


def test_runs_of_another_checkout_that_say_something_else_are_noticed(told):
    def elsewhere(folder):
        source = (folder / "conf").resolve()
        (folder / "conf").unlink()
        shutil.copytree(source, folder / "conf")
        knobs = folder / "conf" / "config.yaml"
        knobs.write_text(knobs.read_text() + "\nscheduler:\n  chunk_tokens: 512\n")

    status, said = told(elsewhere)
    assert status == 1
    assert said.splitlines()[-1].startswith("the summaries differ in ")


@pytest.mark.parametrize(
    ("against", "said"), [("HEAD", "/gone does not exist"), ("no_such_commit", "no_such_commit")]
)
def test_what_does_not_come_to_its_end_is_told_in_sentences(against, said):
    program = [sys.executable, "-m", "experiments.bench.replay", f"--against={against}"]
    knobs = ["workload=trace", "workload.path=/gone"]
    done = subprocess.run([*program, *knobs], cwd=replay.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    why, *_, which = done.stderr.splitlines()
    assert said in why
    assert which.startswith("command failed with exit status ")


def test_only_what_both_summaries_have_is_compared():
    assert replay.differences({"a": 1, "b": 2.0, "c": 0}, {"a": 1, "b": 2, "d": 5}) == ["b"]


@pytest.mark.parametrize("components", one_tree.MODELS)
def test_every_row_of_the_bench_of_trees_takes_time(components, monkeypatch, capsys):
    monkeypatch.setattr(one_tree, "NUM_PROMPTS", 10)
    monkeypatch.setattr(one_tree, "DEPTH", 16)
    monkeypatch.setattr("gc.collect", lambda: 0)  # of all that the tests have imported
    one_tree.main("ours", components)
    took_us = json.loads(capsys.readouterr().out)
    rows = ["insert", "match", "match, 16 nodes", "lock", "lock, 16 nodes", "evict"]
    assert list(took_us) == rows
    assert min(took_us.values()) > 0

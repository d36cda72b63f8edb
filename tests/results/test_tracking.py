import json
import resource
import signal
import subprocess
import sys
from collections import ChainMap
from pathlib import Path

import pytest

from hicache.config import TrackerConfig, WandbMode
from hicache.results import tracking
from hicache.results.tracking import Tracker, plain, write_json
from hicache.runs.job import run_job
from hicache.runs.schema import config_of
from tests.conftest import row_at
from tests.forked import forked

CONFIG = {"seed": 3, "cache": {"page_size": 64, "write_policy": "write_back"}}
OFFLINE = TrackerConfig(project="bench")
FILES_ONLY = TrackerConfig(wandb_mode=WandbMode.disabled)
ROOT = Path(__file__).parents[2]


def tracker(out_dir, config=OFFLINE):
    return Tracker(out_dir, config, config=CONFIG, group="prefetch_stop", name="job 4")


def inspect(out_dir):
    """Return the records that W&B's own reader finds in the only offline run below `out_dir`."""
    (log,) = out_dir.glob("wandb/offline-run-*/run-*.wandb")
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", log]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def lines_of(out_dir):
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def test_without_wandb_rows_are_written_at_once_and_only_our_files_are_left(tmp_path, rows):
    before = signal.getsignal(signal.SIGTERM)
    with tracker(tmp_path, FILES_ONLY) as open_tracker:
        assert signal.getsignal(signal.SIGTERM) is not before
        open_tracker.log(rows[0])
        assert lines_of(tmp_path) == [rows[0]]
        open_tracker.summarize({"b/x_s": 0.1, "a/y_count": 2})
    assert signal.getsignal(signal.SIGTERM) is before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_equal_values_give_equal_json_files_and_nan_is_refused(tmp_path):
    write_json(tmp_path / "one", {"b": 0.1, "a": 2})
    write_json(tmp_path / "two", {"a": 2, "b": 0.1})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "three", {"a": float("nan")})
    assert not (tmp_path / "three").exists()


def test_a_config_becomes_plain_values():
    told = plain({"a": ("write_back", None), "b": TrackerConfig()})
    assert told["a"] == ["write_back", None]
    assert told["b"]["wandb_mode"] == "sweeps"


def records(log, kind):
    return [record[kind] for record in log if record["type"] == kind]


def test_wandb_offline_keeps_the_run_its_rows_summary_and_files(tmp_path):
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    (out_dir / "table.bin").write_bytes(b"rows")
    with tracker(out_dir) as open_tracker:
        for index in range(3):
            open_tracker.log(row_at(10.0 * index, computed=index))
        open_tracker.attach([out_dir / "table.bin"])
        rejected = {"cache/rejected_tokens": 20, "request/prompt_tokens": 100}
        open_tracker.summarize({"cache/token_hit_rate": 0.25, **rejected})
    assert "wandb.sdk.launch.agent" not in sys.modules  # which takes time to import
    moved = out_dir.rename(tmp_path / "moved")  # with all its files
    log = inspect(moved)
    (run,) = records(log, "run")
    names = (run["project"], run["run_group"], run["display_name"])
    assert names == ("bench", "prefetch_stop", "job 4")
    assert CONFIG.items() <= run["config"]["update"].items()
    items = [entry["item"] for entry in records(log, "history")]
    assert [{key: item[key] for key in row_at(0.0)} for item in items] == lines_of(moved)
    summary = ChainMap(*(update["update"] for update in reversed(records(log, "summary"))))
    assert summary["cache/token_hit_rate"] == 0.25
    assert summary["verdict"] == "20% of the prompt tokens rejected"
    assert [entry.get("exit_code", 0) for entry in records(log, "exit")] == [0]
    attached = {file["path"] for entry in records(log, "files") for file in entry["files"]}
    assert "table.bin" in attached
    (kept,) = moved.glob("wandb/offline-run-*/files/table.bin")
    assert kept.read_bytes() == b"rows"
    (tmp_path / "failed").mkdir()
    with pytest.raises(ZeroDivisionError), tracker(tmp_path / "failed"):
        raise ZeroDivisionError
    failed = inspect(tmp_path / "failed")
    assert records(failed, "exit")[-1]["exit_code"] == 1
    assert records(failed, "run")[0]["run_id"] != run["run_id"]


def test_jobs_of_a_sweep_are_logged_to_wandb_and_a_single_run_is_not(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = config_of("workload=chat", "workload.limit=2", "model=llama3_8b", "storage=none")
    for name, is_job in (("single", False), ("0_seed=0", True)):
        (tmp_path / name).mkdir()
        run_job(config, tmp_path / name, is_job=is_job)
        assert any((tmp_path / name).glob("wandb/offline-run-*")) is is_job


def test_online_without_a_key_continues_offline_with_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with tracker(tmp_path, TrackerConfig(wandb_mode=WandbMode.online)):
        pass
    assert "no API key" in capsys.readouterr().err
    assert records(inspect(tmp_path), "run")


KILLED_RUN = """
import os, signal, sys, time
from collections import ChainMap
from pathlib import Path
from hicache.config import TrackerConfig
from hicache.results.tracking import Tracker

with Tracker(Path(sys.argv[1]), TrackerConfig(), config={{}}, group="g", name="n") as tracker:
    for index in range(20):
        tracker.log({{"time_s": float(index)}})
    log = next(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb"))
    deadline = time.monotonic() + 30
    while log.stat().st_size < 2000 and time.monotonic() < deadline:
        time.sleep(0.05)  # until the first flush, a second after the rows
    os.kill(os.getpid(), {signal})
"""


@pytest.mark.parametrize(
    ("name", "code"), [("signal.SIGKILL", -signal.SIGKILL), ("signal.SIGTERM", 143)]
)
def test_a_killed_run_keeps_its_rows_in_its_file_and_in_wandb(tmp_path, name, code):
    script = KILLED_RUN.format(signal=name)
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, check=False)
    assert done.returncode == code
    assert len(lines_of(tmp_path)) == 20
    log = inspect(tmp_path)
    assert len(records(log, "history")) == 20
    exits = records(log, "exit")
    assert [entry["exit_code"] for entry in exits] == ([143] if code == 143 else [])


def log_on_a_full_disk(out_dir, num_bytes, row, summary):
    """Log a row and write a summary on a disk that has `num_bytes` left."""
    with tracker(out_dir, FILES_ONLY) as open_tracker:
        open_tracker.log(row)
        limit = (out_dir / "metrics.jsonl").stat().st_size + num_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(OSError, match="File too large"):
            open_tracker.log(row)
        with pytest.raises(OSError, match="File too large"):
            open_tracker.summarize(summary)


def test_a_full_disk_leaves_no_part_of_a_row_or_of_a_summary(tmp_path, rows):
    summary = {"a/x": 1.5, "b" * 9_000: 1}
    assert forked(log_on_a_full_disk, tmp_path, 20, rows[0], summary) == 0
    assert lines_of(tmp_path) == [rows[0]]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_key_of_wandb_is_found_in_the_environment_or_in_netrc(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not tracking._has_key()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert tracking._has_key()
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert tracking._has_key()

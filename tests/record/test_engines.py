"""The recorder on KV events and logs that vLLM's and SGLang's own classes write."""

import json
import subprocess

import pytest
from platformdirs import user_cache_path

from experiments.diff.engines import ENGINES, environment_of, prepare
from hicache.cli.record import Recording
from tests.record.test_log import read
from tests.record.test_record import ROOT, assert_equal_to_sent, lines_of, recorded

CACHE = user_cache_path("hicache") / "diff"
RELEASES = {"vllm": "0.33.0", "sglang": "0.5.23"}
pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE.parents[1]))  # environments take minutes


def environment(engine):
    if not (CACHE / engine / RELEASES[engine]).is_dir():
        pytest.skip(f"{engine} {RELEASES[engine]} was not compared here before")
    launch = prepare(ENGINES[engine], RELEASES[engine])
    own = {"PYTHONPATH": f"{launch.path[0]}:{ROOT}", "VLLM_TARGET_DEVICE": "cpu"}
    return {"python": launch.interpreter, "env": environment_of(launch) | own}


@pytest.mark.parametrize("engine", RELEASES)
def test_a_recording_of_an_engine_has_what_was_sent_and_counts_faults(tmp_path, engine):
    options = ("--drop", "20", "--restart", "--jump", "3600")
    said = recorded(tmp_path, *options, engine=engine, **environment(engine))
    assert said["counts"]["replayed_batches"] >= 4
    assert said["counts"]["server_restarts"] == said["counts"]["clock_jumps"] == 1
    assert_equal_to_sent(tmp_path / "events")


@pytest.mark.parametrize("engine", RELEASES)
def test_a_recorder_killed_beside_an_engine_misses_no_event(tmp_path, engine):
    said = recorded(tmp_path, "--drop", "20", engine=engine, kill=True, **environment(engine))
    assert said["lost"] == ["the recorder was started 2 times"]
    assert_equal_to_sent(tmp_path / "events")


@pytest.mark.parametrize("engine", RELEASES)
def test_a_recorder_on_a_full_disk_beside_an_engine_counts_each_line(tmp_path, engine):
    counts = recorded(tmp_path, engine=engine, most=6000, **environment(engine))["counts"]
    assert 0 < counts["unwritten_lines"] == counts["batches"] - len(lines_of(tmp_path))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_log_of_sglangs_own_logger_gives_the_requests(tmp_path, level):
    own, server = environment("sglang"), tmp_path / "server"
    served = [own["python"], "-m", "tests.record.served", str(server), "--level", str(level)]
    subprocess.run(served, check=True, cwd=ROOT, env=own["env"])
    log, rotated = sorted(server.iterdir(), key=lambda each: len(each.name))
    out = tmp_path / "out"
    Recording(out).save()
    state = json.loads((out / "recording.json").read_text())
    state["log_place"] = [rotated.stat().st_ino, 0]  # it was read until the hour was full
    (out / "recording.json").write_text(json.dumps(state))
    recording = read(log, out)
    assert recording.faults == ({"requests_without_tokens": 40} if level == 1 else {})
    if level > 1:
        assert_equal_to_sent(out / "requests")

"""The recorder beside the publishers of vLLM and SGLang, which experiments.diff has installed."""

import pytest
from platformdirs import user_cache_path

from experiments.diff.engines import ENGINES, environment_of, prepare
from tests.record.test_record import ROOT, assert_equal_to_sent, recorded

CACHE = user_cache_path("hicache") / "diff"


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "release"), [("vllm", "0.33.0"), ("sglang", "0.5.23")])
def test_a_recording_of_an_engine_has_what_was_sent_and_counts_faults(tmp_path, engine, release):
    if not (CACHE / engine / release).is_dir():
        pytest.skip(f"{engine} {release} was not compared here before")
    launch = prepare(ENGINES[engine], release)
    own = {"PYTHONPATH": f"{launch.path[0]}:{ROOT}", "VLLM_TARGET_DEVICE": "cpu"}
    env = environment_of(launch) | own
    options = ("--drop", "20", "--restart", "--jump", "3600")
    said = recorded(tmp_path, *options, engine=engine, python=launch.interpreter, env=env)
    assert said["counts"]["replayed_batches"] >= 4
    assert said["counts"]["server_restarts"] == said["counts"]["clock_jumps"] == 1
    assert_equal_to_sent(tmp_path)

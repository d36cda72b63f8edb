"""`hicache curve`: its hit rates against those of replays, its table and its figure."""

import json
from pathlib import Path

import pytest

from hicache import experiment
from hicache.cli.curve import curve_of, main
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of

# one request at a time, and a device that holds less than the host
ALONE = (
    "model=llama3_8b", "workload=chat", "workload.num_sessions=40", "workload.arrivals=open",
    "workload.time_scale=1000", "storage=none", "cache.device_gib=16.5",
)  # fmt: skip


def replayed(*overrides: str) -> float:
    result = experiment.run(config_of(*ALONE, *overrides))
    return float(summarize(result.records, result.measures)["cache/token_hit_rate"])


@pytest.mark.parametrize("gib", [24, 48])
@pytest.mark.parametrize("warm_up_s", [0, 5000])
def test_hit_rates_equal_those_of_replays_of_one_request_at_a_time(
    gib: int, warm_up_s: int
) -> None:
    warm = f"workload.warm_up_s={warm_up_s}"
    curve = curve_of(config_of(*ALONE, warm))
    assert curve.lru(gib) == replayed(f"cache.host_gib={gib}", warm)
    assert 0 < curve.lru(0.9 * curve.knee_gib) < 0.95 * curve.lru(curve.full_gib)
    assert curve.lru(1.001 * curve.knee_gib) >= 0.95 * curve.lru(curve.full_gib)
    if not warm_up_s:  # Belady's own rule leaves out uses of the warm-up
        assert curve.belady(gib) == replayed(f"cache.host_gib={gib}", "cache.policy=oracle")


def test_the_command_prints_a_table_and_draws_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "own.png"
    main([*ALONE, "--gib=0,24,64", f"--figure={figure}"])
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()[3:6]] == ["0", "24", "64"]
    assert "knee of LRU: 55 GiB" in told
    assert figure.read_bytes().startswith(b"\x89PNG")
    main([*ALONE, "--gib=24", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"][0]["lru"] == pytest.approx(0.29, abs=0.001)
    assert found["sizes"][0]["belady"] > found["sizes"][0]["lru"]


@pytest.mark.parametrize("key", ["bigram", "drop_block"])
def test_speculation_lowers_the_hit_rates_of_the_curve_as_it_does_in_a_replay(key: str) -> None:
    rule = ("speculation.drafts=3", f"speculation.key={key}")
    curve = curve_of(config_of(*ALONE, *rule))
    assert curve.lru(10**6) == replayed("cache.unlimited=true", *rule)
    assert curve.lru(10**6) < curve_of(config_of(*ALONE)).lru(10**6)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["model=qwen3_next_80b"], "windows or states: use hicache size"),
        (["workload.warm_up_s=1e9"], "no request counts"),
        (["--figure=/"], "Is a directory"),
        *((["--gib=" + size], "a size is 0") for size in ("nan", "inf", "-1", "1e300", "1e-300")),
    ],
)
def test_models_workloads_and_sizes_without_a_curve_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*ALONE, *arguments])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err

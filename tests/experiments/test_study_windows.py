"""Windows at any rate: what is summed, where a bracket ends, and what an interval is of."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.studies.windows import STEP, Rung, Windows
from hicache.cli.schema import config_of
from hicache.config import ExperimentConfig
from tests.workload.traces import mooncake_record, write_lines

NUM_WINDOWS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    """Two turns of a session every second."""
    records = [
        mooncake_record((500 * turn, 600 * (1 + turn % 2), 4, [turn // 2, *([turn] * (turn % 2))]))
        for turn in range(160)
    ]
    path: Path = tmp_path_factory.mktemp("trace") / "mooncake_conversation.jsonl"
    write_lines(path, records)
    return config_of(
        "workload=mooncake_conversation",
        f"workload.path={path}",
        f"workload.windows={NUM_WINDOWS}",
        "storage=none",
        "model=llama3_8b",
    )


@pytest.fixture(scope="module")
def windows(config: ExperimentConfig) -> Windows:
    return Windows(config, range(NUM_WINDOWS))


def test_a_rung_counts_every_request_of_every_window_once(
    config: ExperimentConfig, windows: Windows
) -> None:
    rung = windows.replay(config, 1.0)
    assert rung.served.sum() == rung.finished.sum() == 160
    assert set(windows.window_of) == set(range(NUM_WINDOWS))
    assert rung.gpu_s.shape == (NUM_WINDOWS,)
    assert rung.loads["load/rho_gpu"] > 0


def test_a_copy_counts_to_the_session_that_it_repeats(
    config: ExperimentConfig, windows: Windows
) -> None:
    once, twice = (windows.replay(config, times) for times in (1.0, 2.0))
    assert np.array_equal(twice.served, 2 * once.served)
    assert windows.ladder([once, twice]).rates == pytest.approx(windows.own_rate * np.arange(1, 3))


@pytest.mark.parametrize("start", [0.5, 1.0, 6.0])
def test_a_bracket_ends_where_one_rate_is_in_time_and_its_neighbour_is_not(
    start: float, config: ExperimentConfig, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "replay", late_above(2.0, windows))
    config = replace(config, goodput=replace(config.goodput, times=20.0))
    ladder = windows.bracket(config, start)
    found = ladder.goodput(0.9) / windows.own_rate
    assert 2.0 / STEP <= found <= 2.0 * STEP
    assert {0.0, 1.0} == set(ladder.shares())


def test_what_is_in_time_at_every_rate_is_a_bound(
    config: ExperimentConfig, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "replay", late_above(1e9, windows))
    ladder = windows.bracket(replace(config, goodput=replace(config.goodput, times=3.0)), 1.0)
    assert ladder.goodput(0.9) == ladder.rates[-1]


def late_above(limit: float, windows: Windows) -> Callable[[ExperimentConfig, float], Rung]:
    """Replays in which all are in time up to a rate, and none above it."""

    def replay(config: ExperimentConfig, times: float) -> Rung:
        ones = np.ones(len(windows.window_of))
        return Rung(
            served=times * ones,
            in_time=times * ones * (times <= limit),
            finished=times * ones,
            ttft_s=ones,
            gpu_s=np.ones(NUM_WINDOWS),
            loads={},
        )

    return replay


def test_two_equal_sides_differ_by_nothing_and_a_constant_is_told(
    config: ExperimentConfig, windows: Windows
) -> None:
    rung = windows.replay(config, 1.0)
    later = replace(rung, ttft_s=rung.ttft_s + 0.5 * rung.finished)
    same = windows.difference(windows.mean_ttft_s(rung), windows.mean_ttft_s(rung))
    told = windows.difference(windows.mean_ttft_s(later), windows.mean_ttft_s(rung))
    assert (same.low, same.high, same.is_told) == (0, 0, False)
    assert (told.low, told.high) == (pytest.approx(0.5), pytest.approx(0.5))
    assert told.is_told


def test_gpu_seconds_of_a_window_count_as_often_as_it_is_drawn(
    config: ExperimentConfig, windows: Windows
) -> None:
    rung = windows.replay(config, 1.0)
    metric = windows.gpu_s_per_request(rung)
    alone = metric(1.0 * (windows.window_of == 3))
    assert alone == pytest.approx(rung.gpu_s[3] / rung.finished[windows.window_of == 3].sum())
    once = np.ones(len(windows.window_of))
    assert metric(once) == pytest.approx(rung.gpu_s.sum() / 160)


def test_fewer_than_eight_windows_have_no_interval(config: ExperimentConfig) -> None:
    few = Windows(config, range(7))
    metric = few.mean_ttft_s(few.replay(config, 1.0))
    with pytest.raises(ValueError, match=r"7 window"):
        few.difference(metric, metric)

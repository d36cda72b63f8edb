from itertools import product

import numpy as np
import pytest

from experiments.studies.a_a import METRICS, PLANTED, carry_out, compared, gathered, serve, table
from hicache.cli.schema import config_of
from hicache.cli.tables.request_metrics import Numbers

NUM_WINDOWS, NUM_SEEDS = 16, 4
JOBS = list(product(range(NUM_WINDOWS), range(NUM_SEEDS)))


def made_up(noise: float) -> list[Numbers]:
    """Requests of every window under every seed: a tenth between windows, `noise` between seeds."""
    random = np.random.default_rng(5)
    of_window = 1 + 0.1 * random.normal(size=NUM_WINDOWS)
    served = []
    for window, _ in JOBS:
        ttft_s = of_window[window] * (1 + noise * random.normal() + 0.1 * random.normal(size=12))
        names = 10 * window + np.repeat(np.arange(6), 2)
        served.append(np.stack([names, ttft_s, np.full(12, 100.0), random.integers(0, 99, 12)]))
    return served


def test_sums_are_those_of_the_requests() -> None:
    served = made_up(0.1)
    runs = gathered(JOBS, served)
    assert runs.above.shape == (NUM_SEEDS, NUM_WINDOWS * 6, len(METRICS))
    assert np.array_equal(runs.window_of, np.repeat(np.arange(NUM_WINDOWS), 6))
    chosen = np.random.default_rng(1).integers(NUM_SEEDS, size=(3, NUM_WINDOWS))
    means = runs.arms(chosen).under(np.ones((1, NUM_WINDOWS * 6))).reshape(3, len(METRICS))
    for seeds, (ttft_s, hit_rate) in zip(chosen, means, strict=True):
        rows = np.concatenate(
            [served[JOBS.index((window, seed))] for window, seed in enumerate(seeds)], axis=1
        )
        assert ttft_s == pytest.approx(rows[1].mean())
        assert hit_rate == pytest.approx(1 - rows[3].sum() / rows[2].sum())


def test_arms_that_differ_in_nothing_come_out_equal_and_planted_effects_are_found() -> None:
    found = list(compared(gathered(JOBS, made_up(0.02)), 50))
    assert len(found) == 2 * len(METRICS) * len(PLANTED)
    told = {(each.metric, each.kind, each.planted): each for each in found}
    for kind in ("unpaired", "paired"):
        assert told[METRICS[0], kind, 0.0].zero_left_out <= 0.1  # 5 of 50, where 2.5 are due
        assert told[METRICS[0], kind, 0.2].zero_left_out >= 0.9
        assert told[METRICS[0], kind, 0.2].effect_left_out <= 0.1
    # windows differ by more than seeds do, so pairs find what hands of windows cannot
    assert told[METRICS[0], "paired", 0.05].zero_left_out >= 0.8
    assert told[METRICS[0], "unpaired", 0.05].zero_left_out < 0.5
    assert "| request/ttft_s_mean | paired | -20% | 100.0% |" in table(found)


def test_a_window_is_served_under_the_seed_that_is_asked_for() -> None:
    small = ("model=tiny_hybrid", "workload=chat", "workload.num_sessions=30", "workload.limit=60")
    config = config_of(*small, "workload.windows=2", "workload.start_jitter_s=3")
    names, ttft_s, prompt_len, computed_len = serve(config, 1, 0)
    assert len(names) == len(set(zip(names, prompt_len, ttft_s, strict=True))) > 5
    assert (ttft_s > 0).all()
    assert (computed_len <= prompt_len).all()
    assert set(serve(config, 0, 0)[2].tolist()) != set(prompt_len.tolist())
    assert serve(config, 1, 7).tolist() != serve(config, 1, 0).tolist()


def test_too_few_windows_for_two_hands_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"workload\.windows must be at least 16.*got 15"):
        carry_out(config_of("workload.windows=15"), tmp_path)

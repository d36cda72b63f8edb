"""The fit of a profile: what was put in comes out."""

import numpy as np
import pytest

from hicache.cli.schema import config_of
from hicache.executor.simulated.cost import CostModel

calibrate = pytest.importorskip("experiments.calibrate")
measured = pytest.importorskip("experiments.step_log")

RATES = np.array([1e-3, 2e-4, 3e-8, 4e-3, 5e-7, 6e-3])  # step, token, pair, state, key, extend
TILE = 16


def step(extends: list[tuple[int, int]], context_lens: list[int], num_saves: int) -> object:
    return measured.Step(tuple(extends), tuple(context_lens), num_saves, 1.0, 0.0)


STEPS = [
    step([(0, 300)], [], 1),
    step([(128, 190), (0, 64)], [], 2),
    step([], [40, 700, 90], 0),
    step([(512, 1024)], [300], 1),
    step([(17, 33)], [], 0),
]


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_the_fitted_profile_makes_the_cost_model_cost_what_was_fitted(number: int) -> None:
    config = config_of("model=tiny_hybrid", "parallel.tp=1")
    each = STEPS[number]
    hardware = calibrate.profile(RATES, config.model, config.hardware, TILE)
    model = CostModel(config.model, hardware, tp=1)

    cost = model.forward_ns(
        list(each.extends), list(map(int, each.context_lens)), saved_states=each.num_saves
    )

    expected = float(measured.features(each, config.model, TILE) @ RATES)
    assert cost.total_ns * 1e-9 == pytest.approx(expected, rel=0.02)


def test_least_squares_finds_the_coefficients_and_none_below_zero() -> None:
    generator = np.random.default_rng(0)
    rows = generator.uniform(0, 1, (400, 3))
    truth = np.array([2.0, 0.0, 0.5])
    seconds = rows @ truth + 0.2
    seconds *= generator.lognormal(0, 0.05, 400)

    found = calibrate.least_squares(np.column_stack((np.ones(400), rows)), seconds)

    assert (found >= 0).all()
    np.testing.assert_allclose(found, [0.2, 2.0, 0.0, 0.5], atol=0.05)


def test_a_fit_is_not_faster_than_what_it_was_fitted_to() -> None:
    # errors relative to the measurement would pull the fit below the mean of skewed noise
    generator = np.random.default_rng(1)
    seconds = generator.lognormal(0, 0.5, 4000)

    found = calibrate.least_squares(np.ones((4000, 1)), seconds)

    assert found[0] == pytest.approx(seconds.mean(), rel=0.02)

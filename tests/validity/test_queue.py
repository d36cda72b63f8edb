"""The serving loop against the closed form of its queue: one server, no cache hits (rung V0).

With one request at a time and nothing cached the engine is a single server: the wait of request
n + 1 is max(0, wait + service of n - gap before n + 1) (Lindley), and under Poisson arrivals the
mean wait is rho E[S^2] / (2 E[S] (1 - rho)) (Pollaczek-Khinchine). A mean over a few thousand
requests is far from its limit whatever the code does, so the engine is held to the recursion, to
the nanosecond, and the recursion to the formula, over a million.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from hicache.clock import SECOND_NS
from hicache.models.cost import CostModel
from hicache.runs.schema import config_of
from tests.models.test_cost import step_ends
from tests.validity import runs

ALONE = (
    "model=llama3_8b",
    "parallel.tp=4",
    "storage=none",
    "cache.device_gib=4",
    "cache.host_gib=0",
    "scheduler.max_running=1",
    "workload.arrivals=open",
)
SHAPES = {  # prompt lengths, answer lengths, shares
    "one_length": ([1024], [1], [1.0]),
    "three_lengths": ([64, 1024, 4096], [1, 1, 1], [0.6, 0.3, 0.1]),
    "in_chunks_with_answers": ([300, 20_000], [3, 9], [0.8, 0.2]),
}


def service_ns(prompt_len: int, output_len: int) -> int:
    config = config_of(*ALONE)
    cost = CostModel(config.model, config.hardware, tp=4)
    total = start = 0
    while start < prompt_len:
        end = min(prompt_len, start + config.scheduler.chunk_tokens)
        total += cost.forward_ns([(start, end)], []).total_ns
        start = end
    if output_len == 1:
        return total
    return step_ends(cost, [prompt_len + 1], output_len - 1, now_ns=total)[-1]


def lindley(gaps: NDArray[np.float64], services: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] waits in ns: each is the previous wait plus service, less the gap between, or 0."""
    walk = np.concatenate(([0], np.cumsum(services[:-1] - gaps[1:])))
    return walk - np.minimum.accumulate(np.minimum(walk, 0))


def mean_wait(rho: float, services: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    first, second = (services * shares).sum(), (services**2 * shares).sum()
    return float(rho * second / (2 * first * (1 - rho)))


def draw(
    shape: str, count: int, rho: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Draw requests: indices into the shape, Poisson arrivals in ns, and service times in ns."""
    _, _, shares = SHAPES[shape]
    services = _services(shape)
    generator = np.random.default_rng(seed)
    chosen = np.searchsorted(np.cumsum(shares)[:-1], generator.random(count), side="right")
    mean_gap = (services * np.array(shares)).sum() / rho
    arrivals = np.cumsum(generator.exponential(mean_gap, count)).astype(np.int64)
    return chosen, arrivals, services[chosen].astype(np.int64)


def engine_waits_ns(
    shape: str, chosen: NDArray[np.int64], arrivals: NDArray[np.int64]
) -> NDArray[np.float64]:
    prompts, outputs, _ = SHAPES[shape]
    made = runs.strangers(
        arrivals.tolist(), np.array(prompts)[chosen].tolist(), np.array(outputs)[chosen].tolist()
    )
    result = runs.run(made, *ALONE)
    return np.array([record.queue_ns for record in result.records], np.float64)


def _services(shape: str) -> NDArray[np.float64]:
    prompts, outputs, _ = SHAPES[shape]
    pairs = zip(prompts, outputs, strict=True)
    return np.array([service_ns(*pair) for pair in pairs], np.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_queue_waits_of_the_engine_equal_lindleys_recursion_to_the_nanosecond(shape: str) -> None:
    chosen, arrivals, services = draw(shape, 400, 0.8, seed=1)

    waits = engine_waits_ns(shape, chosen, arrivals)

    expected = lindley(np.diff(arrivals, prepend=0).astype(float), services.astype(float))
    assert expected.max() > services.max()
    np.testing.assert_allclose(waits, expected, atol=0.5, rtol=0)


@pytest.mark.parametrize(("shape", "rho"), [*zip(SHAPES, (0.3, 0.6, 0.6), strict=True)])
def test_lindleys_recursion_has_the_mean_wait_of_the_closed_form(shape: str, rho: float) -> None:
    _, arrivals, services = draw(shape, 1_000_000, rho, seed=2)

    waits = lindley(np.diff(arrivals, prepend=0).astype(float), services.astype(float))

    expected = mean_wait(rho, _services(shape), np.array(SHAPES[shape][2]))
    assert waits.mean() == pytest.approx(expected, rel=0.02)


def test_time_to_first_token_counts_the_rest_of_the_step_that_a_request_arrives_in() -> None:
    # the second comes while the first is computed, whose one step it cannot interrupt
    step = service_ns(4096, 1)
    made = runs.strangers([0, SECOND_NS // 1000], [4096, 64], [1, 1])

    second = runs.run(made, *ALONE).records[1]

    assert second.queue_ns == step - SECOND_NS // 1000

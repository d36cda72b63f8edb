"""Shared links against the closed form of processor sharing (rung V0).

Flows of sizes x that arrive at random on a link of rate C, which all flows in progress share
evenly, take x / C / (1 - rho) on average, whatever the distribution of sizes (M/G/1-PS).
"""

import numpy as np
import pytest

from hicache.clock import NEVER
from hicache.executor.simulated.links import Links

CAPACITY = 4e9
SIZES = {"equal": [8e6], "mixed": [1e6, 4e6, 64e6]}


def mean_slowdown(sizes: list[float], rho: float, count: int, seed: int) -> dict[float, float]:
    """By size: the mean ratio of the time that a flow takes to its time on an idle link."""
    generator = np.random.default_rng(seed)
    drawn = generator.permutation(np.resize(sizes, count))
    # one gap from each of `count` equal parts of the distribution: the load is what it should be
    places = (np.arange(count) + generator.random(count)) / count
    gaps = generator.permutation(-np.log1p(-places)) * float(np.mean(drawn)) / CAPACITY / rho
    arrivals = np.cumsum(gaps * 1e9).astype(np.int64).tolist()
    links = Links({"storage": CAPACITY})
    ended: list[tuple[int, int]] = []
    for flow, (arrival, size) in enumerate(zip(arrivals, drawn.tolist(), strict=True)):
        links.start(flow, int(size), ("storage",), arrival)
        ended += links.finish_until(arrival)
    while (finish := links.next_finish_ns) < NEVER:
        ended += links.finish_until(finish)
    slowdowns: dict[float, list[float]] = {size: [] for size in sizes}
    for finish, flow in ended:
        alone_ns = drawn[flow] / CAPACITY * 1e9
        slowdowns[float(drawn[flow])].append((finish - arrivals[flow]) / alone_ns)
    return {size: float(np.mean(values)) for size, values in slowdowns.items()}


@pytest.mark.parametrize(("sizes", "rho"), [("equal", 0.5), ("mixed", 0.3)])
def test_flows_on_a_shared_link_slow_down_as_in_processor_sharing(sizes: str, rho: float) -> None:
    measured = mean_slowdown(SIZES[sizes], rho, 30_000, seed=5)

    for slowdown in measured.values():
        assert slowdown == pytest.approx(1 / (1 - rho), rel=0.02)

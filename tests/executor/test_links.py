"""Links against closed forms of fair sharing."""

import random

import pytest

from hicache.clock import NEVER
from hicache.executor.simulated.links import Links

SECOND = 10**9


def ends(links: Links, *, now_ns: int = 0) -> dict[int, int]:
    """Run to the end; flow id → finish_ns."""
    finished: dict[int, int] = {}
    while (next_ns := links.next_finish_ns) < NEVER:
        now_ns = max(now_ns, next_ns)
        finished |= {flow_id: finish_ns for finish_ns, flow_id in links.finish_until(now_ns)}
    return finished


def test_one_flow_takes_its_bytes_over_the_capacity() -> None:
    links = Links({"a": 100.0})
    links.start(1, 250, ("a",), 7)
    assert ends(links) == {1: 7 + 5 * SECOND // 2}


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_flows_share_a_link_equally(count: int) -> None:
    links = Links({"a": 100.0})
    for flow_id in range(count):
        links.start(flow_id, 100, ("a",), 0)
    assert set(ends(links).values()) == {count * SECOND}


def test_a_flow_over_two_links_leaves_what_it_cannot_use() -> None:
    """Bertsekas and Gallager's line: the long flow gets the tight link's share on both."""
    links = Links({"tight": 1e6, "wide": 2e6})
    links.start(0, 10**9, ("tight", "wide"), 0)
    links.start(1, 10**9, ("tight",), 0)
    links.start(2, 10**9, ("wide",), 0)
    assert [links.rate(flow_id) for flow_id in range(3)] == [5e5, 5e5, 1.5e6]


def test_a_late_flow_halves_the_rate_from_then_on() -> None:
    links = Links({"a": 100.0})
    links.start(0, 100, ("a",), 0)
    links.start(1, 100, ("a",), SECOND // 2)
    # 0: 50 bytes alone, 50 at half the rate; 1: 50 by then, 50 alone
    assert ends(links) == {0: 3 * SECOND // 2, 1: 2 * SECOND}


def test_a_cap_on_reads_and_writes_together_is_one_more_link() -> None:
    links = Links({"read": 4.0, "write": 2.0, "both": 5.0})
    links.start(0, 100, ("read", "both"), 0)
    links.start(1, 100, ("write", "both"), 0)
    assert (links.rate(0), links.rate(1)) == (3.0, 2.0)


def test_a_flow_without_bytes_ends_as_it_begins() -> None:
    links = Links({"a": 1.0})
    links.start(0, 10, ("a",), 0)
    links.start(1, 0, ("a",), 5)
    assert links.next_finish_ns == 5
    assert links.finish_until(5) == [(5, 1)]


def test_flows_that_end_together_end_by_id() -> None:
    links = Links({"a": 100.0, "b": 100.0})
    for flow_id in (3, 1, 2):
        links.start(flow_id, 50 if flow_id != 2 else 100, ("a",) if flow_id != 2 else ("b",), 0)
    links.finish_until(SECOND - 1)
    links.start(0, 0, ("b",), SECOND)  # whose end comes after those that were told of before it
    assert links.finish_until(SECOND) == [(SECOND, flow_id) for flow_id in range(4)]


def test_finishes_passed_by_another_call_are_still_told() -> None:
    links = Links({"a": 100.0})
    links.start(0, 100, ("a",), 0)
    links.start(1, 100, ("a",), 5 * SECOND)
    assert links.next_finish_ns == SECOND
    assert links.finish_until(5 * SECOND) == [(SECOND, 0)]


def scenario(seed: int) -> tuple[Links, list[tuple[int, int, tuple[str, ...], int]]]:
    draw = random.Random(seed)
    names = ["a", "b", "c", "d"]
    links = Links({name: draw.uniform(1e9, 5e10) for name in names})
    flows = []
    for flow_id in range(60):
        route = tuple(draw.sample(names, draw.randint(1, 3)))
        now_ns = draw.randrange(0, 50_000_000, 1_000_000)
        flows.append((flow_id, draw.randrange(10**8), route, now_ns))
    flows.sort(key=lambda flow: (flow[3], flow[0]))
    return links, flows


@pytest.mark.parametrize("seed", range(5))
def test_no_link_carries_more_than_its_capacity_and_every_flow_has_a_full_one(seed: int) -> None:
    links, flows = scenario(seed)
    open_flows: dict[int, tuple[str, ...]] = {}
    for flow_id, num_bytes, route, now_ns in flows:
        for _, ended in links.finish_until(now_ns):
            del open_flows[ended]
        links.start(flow_id, num_bytes, route, now_ns)
        open_flows[flow_id] = route
        rates = {other: links.rate(other) for other in open_flows}
        capacities = links.capacities
        load = {
            link: sum(rates[other] for other in open_flows if link in open_flows[other])
            for link in capacities
        }
        assert all(load[link] <= capacities[link] * (1 + 1e-9) for link in capacities)
        for other, rate in rates.items():
            assert any(
                load[link] >= capacities[link] * (1 - 1e-9)
                and rate
                >= max(rates[peer] for peer in open_flows if link in open_flows[peer]) * (1 - 1e-9)
                for link in open_flows[other]
            )


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_calls_at_one_time_does_not_matter(seed: int) -> None:
    links, flows = scenario(seed)
    other, _ = scenario(seed)
    for flow_id, num_bytes, route, now_ns in flows:
        links.start(flow_id, num_bytes, route, now_ns)
    for flow_id, num_bytes, route, now_ns in sorted(flows, key=lambda f: (f[3], -f[0])):
        other.start(flow_id, num_bytes, route[::-1], now_ns)
    now_ns = flows[-1][3]
    assert ends(links, now_ns=now_ns) == ends(other, now_ns=now_ns)


@pytest.mark.parametrize(
    ("links", "num_bytes", "message"),
    [
        (("x",), 1, "must use links among"),
        ((), 1, "must use links among"),
        (("a", "x"), 1, "must use links among"),
        (("a",), -1, "must have 0 or more bytes, got -1"),
    ],
)
def test_a_flow_that_cannot_be_is_refused(
    links: tuple[str, ...], num_bytes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Links({"a": 1.0}).start(0, num_bytes, links, 0)


def test_an_id_under_way_is_refused() -> None:
    links = Links({"a": 1.0})
    links.start(0, 1, ("a",), 0)
    with pytest.raises(ValueError, match="already running"):
        links.start(0, 1, ("a",), 0)


def test_time_that_goes_back_is_refused() -> None:
    links = Links({"a": 1.0})
    links.finish_until(10)
    with pytest.raises(ValueError, match="must not decrease, got 9 ns after 10"):
        links.finish_until(9)


def test_a_link_without_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="the capacity of link a must be positive, got 0"):
        Links({"a": 0.0})

"""Links are shared fairly, and flows end when their bytes have moved."""

import random

import pytest

from hicache.clock import NEVER
from hicache.executor.simulated.links import Links

SECOND = 10**9


def ends(links, now_ns=0):
    """Run all flows to their end; return the finish time in ns by flow id."""
    finished = {}
    while (next_ns := links.next_finish_ns) < NEVER:
        now_ns = max(now_ns, next_ns)
        finished |= {flow_id: finish_ns for finish_ns, flow_id in links.finish_until(now_ns)}
    return finished


def test_a_second_flow_on_a_link_halves_the_rate_of_the_first():
    links = Links({"a": 100.0})
    links.start(0, 100, ("a",), 7)
    links.start(1, 100, ("a",), 7 + SECOND // 2)
    # 0: 50 bytes alone, 50 at half the rate; 1: 50 by then, 50 alone
    assert ends(links) == {0: 7 + 3 * SECOND // 2, 1: 7 + 2 * SECOND}


def test_a_flow_without_bytes_ends_as_it_begins():
    links = Links({"a": 1.0})
    links.start(0, 10, ("a",), 0)
    links.start(1, 0, ("a",), 5)
    assert links.next_finish_ns == 5
    assert links.finish_until(5) == [(5, 1)]


def test_flows_that_end_at_the_same_time_are_reported_by_id():
    links = Links({"a": 100.0, "b": 100.0})
    for flow_id, num_bytes, link in ((3, 50, "a"), (1, 50, "a"), (2, 100, "b")):
        links.start(flow_id, num_bytes, (link,), 0)
    links.finish_until(SECOND - 1)
    links.start(0, 0, ("b",), SECOND)  # its end is known after those of the others
    assert links.finish_until(SECOND) == [(SECOND, flow_id) for flow_id in range(4)]


def test_a_flow_that_ended_before_another_began_is_reported_with_its_time():
    links = Links({"a": 100.0})
    links.start(0, 100, ("a",), 0)
    links.start(1, 100, ("a",), 5 * SECOND)
    assert links.next_finish_ns == SECOND
    assert links.finish_until(5 * SECOND) == [(SECOND, 0)]


def scenario(seed):
    """Random links, and random flows as (id, bytes, links, start in ns)."""
    draw = random.Random(seed)
    names = ["a", "b", "c", "d"]
    links = Links({name: draw.uniform(1e9, 5e10) for name in names})
    flows = []
    for flow_id in range(60):
        route = tuple(draw.sample(names, draw.randint(1, 3)))
        now_ns = draw.randrange(0, 50_000_000, 1_000_000)
        flows.append((flow_id, draw.randrange(10**8), route, now_ns))
    return links, sorted(flows, key=lambda flow: (flow[3], flow[0]))


@pytest.mark.parametrize("seed", range(5))
def test_rates_are_max_min_fair(seed):
    """No link carries more than its capacity; each flow is a fastest one on some full link."""
    links, flows = scenario(seed)
    routes = {}
    for flow_id, num_bytes, route, now_ns in flows:
        for _, ended in links.finish_until(now_ns):
            del routes[ended]
        links.start(flow_id, num_bytes, route, now_ns)
        routes[flow_id] = route
        of_link = {
            link: [links.rate(other) for other, its in routes.items() if link in its]
            for link in links.capacities
        }
        shares = {link: sum(rates) / links.capacities[link] for link, rates in of_link.items()}
        assert max(shares.values()) <= 1 + 1e-9
        for other, its in routes.items():
            least = links.rate(other) * (1 + 1e-9)
            assert any(shares[link] >= 1 - 1e-9 and least >= max(of_link[link]) for link in its)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_simultaneous_flows_are_started_does_not_matter(seed):
    (links, flows), (other, _) = scenario(seed), scenario(seed)
    for flow in flows:
        links.start(*flow)
    for flow_id, num_bytes, route, now_ns in sorted(flows, key=lambda flow: (flow[3], -flow[0])):
        other.start(flow_id, num_bytes, route[::-1], now_ns)
    assert ends(links, flows[-1][3]) == ends(other, flows[-1][3])


@pytest.mark.parametrize(
    ("flow", "sentence"),
    [
        ((1, 1, ("x",), 0), "must use links among"),
        ((1, 1, (), 0), "must use links among"),
        ((1, 1, ("a", "x"), 0), "must use links among"),
        ((1, -1, ("a",), 0), "must have 0 or more bytes, got -1"),
        ((0, 1, ("a",), 0), "already running"),
    ],
)
def test_a_flow_with_unknown_links_negative_bytes_or_a_used_id_is_refused(flow, sentence):
    links = Links({"a": 1.0})
    links.start(0, 1, ("a",), 0)
    with pytest.raises(ValueError, match=sentence):
        links.start(*flow)


def test_decreasing_time_and_a_link_without_capacity_are_refused():
    links = Links({"a": 1.0})
    links.finish_until(10)
    with pytest.raises(ValueError, match="must not decrease, got 9 ns after 10"):
        links.finish_until(9)
    with pytest.raises(ValueError, match="the capacity of link a must be positive, got 0"):
        Links({"a": 0.0})

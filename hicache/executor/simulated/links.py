"""Links that transfers share fairly, in integer nanoseconds.

A flow moves bytes over a set of links at once, at one rate on all of them. Rates are max-min fair:
raising one would lower another that is not higher. Rates change only when a flow begins or ends.
Results depend on the flows and their start times alone, not on the order of calls at one time.
Flows that end in the same nanosecond end in the order of their ids.
"""

from bisect import insort
from collections.abc import Mapping
from functools import cache
from math import ceil

from hicache.clock import NEVER

_Route = tuple[str, ...]  # sorted links
_Loads = tuple[tuple[_Route, int], ...]  # number of flows per route


# one transfer: `remaining` bytes at `since_ns`, and the rate since then
class _Flow:
    __slots__ = ("finish_ns", "flow_id", "rate", "remaining", "route", "since_ns")

    def __init__(self, flow_id: int, num_bytes: int, route: _Route, now_ns: int) -> None:
        self.flow_id = flow_id
        self.route = route
        self.remaining = float(num_bytes)
        self.since_ns = self.finish_ns = now_ns
        self.rate = 0.0

    def set_rate(self, rate: float, now_ns: int) -> None:
        if now_ns > self.since_ns:
            left = self.remaining - self.rate * ((now_ns - self.since_ns) * 1e-9)
            self.remaining = left if left > 0.0 else 0.0
            self.since_ns = now_ns
        self.rate = rate
        # floating-point error must not add a nanosecond to an exact end
        self.finish_ns = now_ns + ceil(self.remaining * 1e9 / rate - 1e-3)


class Links:
    """Simulates transfers over shared links, in integer nanoseconds.

    `capacities` gives the bytes per second of each link. A transfer may cross several links, and
    has the same rate on all of them. The rates are max-min fair: a transfer could be faster only if
    a transfer with an equal or lower rate became slower. Time never goes back.
    """

    def __init__(self, capacities: Mapping[str, float]) -> None:
        for link, capacity in capacities.items():
            if not capacity > 0:
                raise ValueError(f"the capacity of link {link} must be positive, got {capacity}")
        self.capacities = {link: float(capacity) for link, capacity in capacities.items()}
        self._now_ns = 0
        self._flows: dict[int, _Flow] = {}  # under way
        self._routes: dict[tuple[str, ...], _Route] = {}  # by the links in the caller's order
        self._loads: dict[_Route, int] = {}
        # the same loads recur
        self._rates_of = cache(self._fair_rates)
        self._ended: list[tuple[int, int]] = []  # (finish_ns, flow_id), not reported yet
        self._next_end_ns = NEVER
        # when the next transfer ends if no other starts before, or ended without a report
        self.next_finish_ns = NEVER

    def start(self, flow_id: int, num_bytes: int, links: tuple[str, ...], now_ns: int) -> None:
        if flow_id in self._flows:
            raise ValueError(f"transfer {flow_id} is already running")
        if num_bytes < 0:
            raise ValueError(f"transfer {flow_id} must have 0 or more bytes, got {num_bytes}")
        route = self._routes.get(links) or self._route_of(flow_id, links)
        self._advance(now_ns)
        self._flows[flow_id] = _Flow(flow_id, num_bytes, route, now_ns)
        self._loads[route] = self._loads.get(route, 0) + 1
        self._share()

    def _route_of(self, flow_id: int, links: tuple[str, ...]) -> _Route:
        route = tuple(sorted(set(links)))
        unknown = [link for link in route if link not in self.capacities]
        if unknown or not route:
            raise ValueError(
                f"transfer {flow_id} must use links among {sorted(self.capacities)}, "
                f"got {list(links)}"
            )
        self._routes[links] = route
        return route

    def finish_until(self, now_ns: int) -> list[tuple[int, int]]:
        """Return the transfers that ended by `now_ns` and were not returned before, by end time.

        Each transfer is a pair: its end time in ns, and its id.
        """
        self._advance(now_ns)
        ended, self._ended = self._ended, []
        self.next_finish_ns = self._next_end_ns
        return ended

    def rate(self, flow_id: int) -> float:
        return self._flows[flow_id].rate

    def _advance(self, now_ns: int) -> None:
        if now_ns < self._now_ns:
            raise ValueError(f"time must not decrease, got {now_ns} ns after {self._now_ns} ns")
        while self._next_end_ns <= now_ns:
            self._end()
        self._now_ns = now_ns

    def _end(self) -> None:
        self._now_ns = now_ns = self._next_end_ns
        for flow in [flow for flow in self._flows.values() if flow.finish_ns == now_ns]:
            # a flow of 0 bytes may start and end at a time whose other ends are recorded already
            insort(self._ended, (now_ns, flow.flow_id))
            del self._flows[flow.flow_id]
            self._loads[flow.route] -= 1
            if not self._loads[flow.route]:
                del self._loads[flow.route]
        self._share()

    def _share(self) -> None:
        # flows over the same links have equal rates, so the filling runs over routes, not flows
        flows = self._flows.values()
        self._next_end_ns = NEVER
        if flows:
            rates = self._rates_of(tuple(self._loads.items()))
            for flow in flows:
                # even if the rate stays equal: the remaining bytes must not depend on whether the
                # rate changed and returned between calls at one time
                flow.set_rate(rates[flow.route], self._now_ns)
            self._next_end_ns = min([flow.finish_ns for flow in flows])
        self.next_finish_ns = self._ended[0][0] if self._ended else self._next_end_ns

    def _fair_rates(self, of_routes: _Loads) -> dict[_Route, float]:
        # bytes per second of a flow on each route, by progressive filling
        loads = dict(sorted(of_routes))
        left: dict[str, float] = {}
        count: dict[str, int] = {}
        for route, load in loads.items():
            for link in route:
                left[link] = self.capacities[link]
                count[link] = count.get(link, 0) + load
        rates: dict[_Route, float] = {}
        open_routes = list(loads)
        while open_routes:
            tightest = min(count, key=lambda link: left[link] / count[link])
            rate = left[tightest] / count[tightest]
            still_open = []
            for route in open_routes:
                if tightest not in route:
                    still_open.append(route)
                    continue
                rates[route] = rate
                for link in route:
                    left[link] = max(0.0, left[link] - rate * loads[route])
                    count[link] -= loads[route]
            count = {link: number for link, number in count.items() if number}
            open_routes = still_open
        return rates

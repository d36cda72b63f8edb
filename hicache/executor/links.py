"""Links that transfers share fairly, in integer nanoseconds.

A flow moves bytes over a set of links at once and has one rate on all of them. Rates are max-min
fair: none can rise without lowering one that is not higher. They change only when a flow begins,
ends or is cancelled, so between such moments every flow is a straight line. What comes out is a
function of the flows and their times alone, whatever the order of calls at one time; flows that end
in the same nanosecond end in the order of their ids.
"""

from bisect import insort
from collections.abc import Mapping
from enum import Enum
from math import ceil

from hicache.models import HardwareConfig, RateTable

_Route = tuple[str, ...]  # links in alphabetical order
_KNOWN_LOADS = 4096


class CopyPath(Enum):
    """What carries a copy between host and device."""

    copy_engine = "copy_engine"
    kernel = "kernel"


class _Flow:
    """One transfer: `remaining` bytes at `since_ns`, and the rate from then on."""

    __slots__ = ("finish_ns", "flow_id", "num_bytes", "rate", "remaining", "route", "since_ns")

    def __init__(self, flow_id: int, num_bytes: int, route: _Route) -> None:
        self.flow_id = flow_id
        self.num_bytes = num_bytes
        self.route = route
        self.remaining = float(num_bytes)
        self.since_ns = 0
        self.rate = 0.0
        self.finish_ns = 0

    def set_rate(self, rate: float, now_ns: int) -> None:
        """Go on at another rate from now."""
        remaining = self.remaining - self.rate * ((now_ns - self.since_ns) * 1e-9)
        self.remaining = max(0.0, remaining)
        self.since_ns = now_ns
        self.rate = rate
        # rounding of doubles must not add a nanosecond to an end that is exact
        self.finish_ns = now_ns + ceil(self.remaining * 1e9 / rate - 1e-3)

    def bytes_done(self, now_ns: int) -> int:
        """Bytes moved by now, rounded down; all of them from `finish_ns` on."""
        if not self.rate:
            return 0
        if now_ns >= self.finish_ns:
            return self.num_bytes
        left = ceil(self.remaining - self.rate * ((now_ns - self.since_ns) * 1e-9))
        return self.num_bytes - min(self.num_bytes, max(0, left))


class Links:
    """Flows over links of known capacities.

    Invariant: on every link the rates of its flows add up to its capacity at most, and every flow
    has a link that is full and on which no flow is faster. Time never goes back.
    """

    def __init__(self, capacities: Mapping[str, float]) -> None:
        """`capacities`: bytes a second of every link."""
        for link, capacity in capacities.items():
            if not capacity > 0:
                raise ValueError(f"the capacity of link {link} must be positive, got {capacity}")
        self._capacities = {link: float(capacity) for link, capacity in capacities.items()}
        self._moved = dict.fromkeys(capacities, 0)
        self._now_ns = 0
        self._flows: dict[int, _Flow] = {}  # waiting out their latency, or moving
        self._waiting: list[tuple[int, int]] = []  # (begin_ns, flow_id), rising
        self._routes: dict[_Route, dict[int, _Flow]] = {}  # of those that move
        # rates follow from how many flows each route has, and the same loads come again and again
        self._rates_of: dict[frozenset[tuple[_Route, int]], dict[_Route, float]] = {}
        self._ended: list[tuple[int, int]] = []  # (finish_ns, flow_id), not told yet
        self._next_end_ns: int | None = None  # of a moving flow

    def start(
        self,
        flow_id: int,
        num_bytes: int,
        links: tuple[str, ...],
        now_ns: int,
        *,
        latency_ns: int = 0,
    ) -> None:
        """Move `num_bytes` over all of `links`, beginning `latency_ns` after now."""
        if flow_id in self._flows:
            raise ValueError(f"flow {flow_id} is under way already")
        if num_bytes < 0 or latency_ns < 0:
            raise ValueError(
                f"bytes and latency of flow {flow_id} must be 0 or more, "
                f"got {num_bytes} and {latency_ns}"
            )
        route = tuple(sorted(set(links)))
        unknown = [link for link in route if link not in self._capacities]
        if unknown or not route:
            raise ValueError(
                f"flow {flow_id} must take links among {sorted(self._capacities)}, "
                f"got {list(links)}"
            )
        self._advance(now_ns)
        flow = _Flow(flow_id, num_bytes, route)
        self._flows[flow_id] = flow
        if latency_ns:
            insort(self._waiting, (now_ns + latency_ns, flow_id))
        else:
            self._begin([flow])

    def cancel(self, flow_id: int, now_ns: int) -> int:
        """Stop a flow; it will not finish. Returns the bytes it has moved."""
        self._advance(now_ns)
        flow = self._flow(flow_id)
        done = flow.bytes_done(now_ns)
        self._end([flow])
        self._count(flow, done)
        self._waiting = [entry for entry in self._waiting if entry[1] != flow_id]
        return done

    def next_finish_ns(self) -> int | None:
        """When the next flow ends if none is started or cancelled before; None without flows."""
        if self._ended:
            return self._ended[0][0]
        if not self._waiting:
            return self._next_end_ns
        if self._next_end_ns is not None and self._next_end_ns <= self._waiting[0][0]:
            return self._next_end_ns
        # flows that begin before the next end change when it comes: play it through on a copy
        ahead = self._copy()
        while not ahead._ended:
            ahead._step()
        return ahead._ended[0][0]

    def finish_until(self, now_ns: int) -> list[tuple[int, int]]:
        """The flows that ended by now and were not told before: (finish_ns, flow_id), in order."""
        self._advance(now_ns)
        ended, self._ended = self._ended, []
        return ended

    def bytes_done(self, flow_id: int, now_ns: int) -> int:
        """Bytes that a flow under way has moved by now."""
        self._advance(now_ns)
        return self._flow(flow_id).bytes_done(now_ns)

    def rate(self, flow_id: int) -> float:
        """Bytes a second of a flow under way, as of the last call; 0 during its latency."""
        return self._flow(flow_id).rate

    def busy_bytes(self, link: str) -> int:
        """Bytes moved over a link by flows that ended or were cancelled."""
        return self._moved[link]

    def _flow(self, flow_id: int) -> _Flow:
        try:
            return self._flows[flow_id]
        except KeyError:
            raise ValueError(f"flow {flow_id} is not under way") from None

    def _advance(self, now_ns: int) -> None:
        """Let everything happen that happens by now."""
        if now_ns < self._now_ns:
            raise ValueError(f"time went back from {self._now_ns} to {now_ns} ns")
        while (self._next_end_ns is not None and self._next_end_ns <= now_ns) or (
            self._waiting and self._waiting[0][0] <= now_ns
        ):
            self._step()
        self._now_ns = now_ns

    def _step(self) -> None:
        """Go to the next moment at which flows end or begin, and let them; ends come first."""
        end_ns = self._next_end_ns
        if self._waiting and (end_ns is None or self._waiting[0][0] < end_ns):
            self._now_ns = self._waiting[0][0]
            begun = []
            while self._waiting and self._waiting[0][0] == self._now_ns:
                begun.append(self._flows[self._waiting.pop(0)[1]])
            self._begin(begun)
            return
        assert end_ns is not None
        self._now_ns = end_ns
        over = [
            flow
            for flows in self._routes.values()
            for flow in flows.values()
            if flow.finish_ns <= end_ns
        ]
        over.sort(key=lambda flow: flow.flow_id)
        for flow in over:
            # a flow of 0 bytes that began at this time may come after others told for it
            insort(self._ended, (end_ns, flow.flow_id))
            self._count(flow, flow.num_bytes)
        self._end(over)

    def _begin(self, flows: list[_Flow]) -> None:
        for flow in flows:
            flow.since_ns = self._now_ns
            self._routes.setdefault(flow.route, {})[flow.flow_id] = flow
        self._share()

    def _end(self, flows: list[_Flow]) -> None:
        for flow in flows:
            del self._flows[flow.flow_id]
            members = self._routes.get(flow.route)
            if members is not None:
                members.pop(flow.flow_id, None)
                if not members:
                    del self._routes[flow.route]
        self._share()

    def _count(self, flow: _Flow, num_bytes: int) -> None:
        for link in flow.route:
            self._moved[link] += num_bytes

    def _share(self) -> None:
        """Give every moving flow its fair rate from now on.

        Flows over the same links have the same rate, so routes are filled instead of flows.
        """
        rates = self._fair_rates()
        now_ns = self._now_ns
        next_end_ns: int | None = None
        for route, flows in self._routes.items():
            rate = rates[route]
            for flow in flows.values():
                # also when the rate stays: what a flow has left must not depend on whether the
                # rate went elsewhere and back between calls at one time
                flow.set_rate(rate, now_ns)
                if next_end_ns is None or flow.finish_ns < next_end_ns:
                    next_end_ns = flow.finish_ns
        self._next_end_ns = next_end_ns

    def _fair_rates(self) -> dict[_Route, float]:
        """Bytes a second of a flow on each route: progressive filling."""
        routes = self._routes
        load = frozenset((route, len(flows)) for route, flows in routes.items())
        if (known := self._rates_of.get(load)) is not None:
            return known
        left: dict[str, float] = {}
        count: dict[str, int] = {}
        for route in sorted(routes):
            for link in route:
                left.setdefault(link, self._capacities[link])
                count[link] = count.get(link, 0) + len(routes[route])
        rates: dict[_Route, float] = {}
        open_routes = sorted(routes)
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
                    left[link] = max(0.0, left[link] - rate * len(routes[route]))
                    count[link] -= len(routes[route])
            count = {link: number for link, number in count.items() if number}
            open_routes = still_open
        if len(self._rates_of) >= _KNOWN_LOADS:
            self._rates_of.clear()
        self._rates_of[load] = rates
        return rates

    def _copy(self) -> "Links":
        twin = object.__new__(Links)
        twin._capacities = self._capacities
        twin._rates_of = self._rates_of
        twin._moved = dict(self._moved)
        twin._ended = []
        twin._flows = {}
        twin._routes = {}
        twin._waiting = list(self._waiting)
        twin._next_end_ns = self._next_end_ns
        for flow in self._flows.values():
            double = _Flow(flow.flow_id, flow.num_bytes, flow.route)
            double.remaining, double.since_ns = flow.remaining, flow.since_ns
            double.rate, double.finish_ns = flow.rate, flow.finish_ns
            twin._flows[flow.flow_id] = double
        for route, flows in self._routes.items():
            twin._routes[route] = {flow_id: twin._flows[flow_id] for flow_id in flows}
        return twin


def pcie_rate(
    hardware: HardwareConfig, piece_bytes: int, path: CopyPath, *, to_device: bool = True
) -> float:
    """Bytes a second that one device copies in contiguous pieces of this size.

    A copy engine pays for every piece, so its rate falls with them; a kernel reaches its own
    ceiling early, which depends on the direction, unless too few programs of it run.
    """
    limit = hardware.pcie_bandwidth.value
    if path is CopyPath.copy_engine:
        table, name = hardware.copy_engine, "copy_engine"
    elif to_device:
        table, name = hardware.kernel_to_device, "kernel_to_device"
    else:
        table, name = hardware.kernel_to_host, "kernel_to_host"
    launched = hardware.copy_kernel
    if path is CopyPath.kernel and launched.link_programs is not None:
        program = launched.to_device if to_device else launched.to_host
        limit = min(limit, launched.link_programs * program.value)
    return min(_at(table, name, piece_bytes), limit)


def _at(table: RateTable, name: str, size: int) -> float:
    """A table's rate: linear between points, constant above, in proportion to the size below."""
    if not table.size:
        raise ValueError(f"hardware.{name} must have at least one size and rate, got none")
    if size <= table.size[0]:
        return table.rate[0] * size / table.size[0]
    for i in range(1, len(table.size)):
        if size <= table.size[i]:
            share = (size - table.size[i - 1]) / (table.size[i] - table.size[i - 1])
            return table.rate[i - 1] + share * (table.rate[i] - table.rate[i - 1])
    return table.rate[-1]

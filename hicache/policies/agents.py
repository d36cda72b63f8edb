"""Policies for agents, whose sessions pause while a tool runs: hints, Continuum, CacheTTL, MORI.

Agents tell the engine the session of a request, the tool that an answer calls, and whether a
request is the last of its session, as the fields `job_id`, `this_func_call` and `is_last_step` of
Continuum's requests do (github.com/Hanchenli/vllm-continuum). A session is what the papers call a
program. A sub-agent is a session of its own, and for the session that waits for it a tool call.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, log, sqrt
from typing import NamedTuple

from hicache.cache.tree.entry import Entry, Evictable
from hicache.cache.tree.node import MatchResult
from hicache.clock import SECOND_NS, to_ns
from hicache.policies.values import Lowest
from hicache.policies.world import World
from hicache.request import Request
from hicache.scheduler.request_state import RequestState

TOOL_USE = "tool_use"  # the stop reason of a tool call
LATER_S = 1e9  # added to the key of a request that comes after all others
Score = tuple[float, ...]


class Owners:
    """Notes in each entry's `state` the request that last used or computed the data."""

    def __init__(self) -> None:
        self._asker: dict[int, Request] = {}  # by key of a page that was not found

    def on_miss(self, keys: Iterable[int], request: Request) -> None:
        self._asker.update((key, request) for key in keys)

    def on_hit(self, entry: Entry, request: Request) -> None:
        entry.state = request

    def on_insert(self, entry: Entry, tier: str) -> None:
        # the entry belongs to the turn that computed it, or to the owner of the entry above
        above = entry.parent
        owner = self._asker.pop(entry.key, None)
        if owner is not None:
            entry.state = owner
        elif entry.state is None and above is not None:
            entry.state = above.state

    def on_split(self, entry: Entry, first: Entry) -> None:
        first.state = entry.state


class Hints(Owners):
    """LRU eviction that keeps data longer if a tool call is expected to return to the data.

    The data of a conversation turn that ends in a tool call counts as used `ttl` uses later. `ttl`
    counts uses of the cache, not seconds, because the ranks of an engine have different clocks. The
    idea is from Continuum (Li et al., 2025), which locks the KV cache of such a turn for some time.
    """

    def __init__(self, world: World, *, ttl: float = 500) -> None:
        super().__init__()
        self._ttl = ttl
        self._calls: set[int] = set()  # requests that ended in a tool call

    def on_finish(self, request: Request, outcome: str) -> None:
        if request.stop_reason == TOOL_USE:
            self._calls.add(request.id)

    def rank(self, entry: Entry, tier: str, kind: str) -> Score:
        is_call = entry.state is not None and entry.state.id in self._calls
        return (entry.used + (self._ttl if is_call else 0), entry.end)


class Turn(NamedTuple):
    """Times of a turn in ns: in the engine without the queue, and from its end to the next one."""

    reasoning_ns: int
    acting_ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """What an engine knows of a session.

    Attributes:
        begun_ns: when its first request arrived.
        arrived: when its requests in the queue arrived, by request id.
        running: when its running requests were admitted, by request id.
        idle_ns: when its last answer ended; None while it has a request in the engine.
        tool: the tool that this answer called; empty for an answer to the user.
        context_len: tokens of the longest context so far.
        is_over: whether its last request has ended.
        turns: its last turns.
    """

    begun_ns: int
    arrived: dict[int, int] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    idle_ns: int | None = None
    tool: str = ""
    context_len: int = 0
    is_over: bool = False
    reasoning_ns: int = 0
    turns: deque[Turn] = field(default_factory=deque)


class Sessions(Owners):
    """Follows the sessions of one engine, and evicts the entry with the lowest score first.

    A subclass gives the scores of entries, by their sessions (`score`). `fixed_ns` is the time at
    which scores change without an event.

    Raises:
        ValueError: the engine has several ranks. Their clocks differ, so they would disagree.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        if world.config.parallel.ranks > 1:
            raise ValueError(
                f"cache.policy={world.config.cache.policy} needs parallel.ranks=1, got "
                f"{world.config.parallel.ranks}"
            )
        self.now_ns = world.now_ns
        self.sessions: dict[int, Session] = {}
        self.fixed_ns: float = inf
        # as `is_last_step` of a request says
        self._last_ids = {each.session_id: each.id for each in world.requests}
        self._lowest = Lowest(lambda entries: [self._score(each) for each in entries])

    def score(self, session: Session, entry: Entry, tier: str) -> Score:
        raise NotImplementedError

    def on_arrive(self, request: Request) -> None:
        now_ns = self.now_ns()
        session = self.sessions.setdefault(request.session_id, Session(begun_ns=now_ns))
        if session.idle_ns is not None:
            self.returned(session, now_ns - session.idle_ns)
            session.idle_ns = None
        session.arrived[request.id] = now_ns
        session.is_over = False
        self._lowest.forget()

    def returned(self, session: Session, idle_ns: int) -> None:
        """Called when a session sends a request after a pause of `idle_ns`."""

    def on_miss(self, keys: Iterable[int], request: Request) -> None:
        super().on_miss(keys, request)
        session = self.sessions.get(request.session_id)
        if session is not None and request.id in session.arrived:  # not after a retraction
            now_ns = self.now_ns()
            session.context_len = max(session.context_len, request.prompt_len)
            self.admitted(session, now_ns - session.arrived.pop(request.id))
            session.running[request.id] = now_ns

    def admitted(self, session: Session, queue_ns: int) -> None:
        """Called when a request of a session has left the queue after `queue_ns`."""

    def on_hit(self, entry: Entry, request: Request) -> None:
        super().on_hit(entry, request)
        self._lowest.forget()

    def on_insert(self, entry: Entry, tier: str) -> None:
        super().on_insert(entry, tier)
        self._lowest.forget()

    def on_split(self, entry: Entry, first: Entry) -> None:
        super().on_split(entry, first)
        self._lowest.forget()

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        self._lowest.evicted(entry, tier)

    def on_finish(self, request: Request, outcome: str) -> None:
        session = self.sessions.get(request.session_id)
        if session is None:
            return
        now_ns = self.now_ns()
        session.arrived.pop(request.id, None)
        session.reasoning_ns = now_ns - session.running.pop(request.id, now_ns)
        session.context_len = max(session.context_len, request.prompt_len + request.output_len)
        if not (session.arrived or session.running):
            session.idle_ns = now_ns
            session.tool = request.tool or (TOOL_USE if request.stop_reason == TOOL_USE else "")
            is_last = self._last_ids.get(request.session_id) == request.id
            session.is_over = is_last or outcome != "finished"
            self.idles(session, request)
        self._lowest.forget()

    def idles(self, session: Session, request: Request) -> None:
        """Called when all requests of a session have ended; `request` was the last of them."""

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
        self.look_at_clock()
        self._tier = tier
        return self._lowest.of(tier, kind, queue)

    def look_at_clock(self) -> None:
        if self.now_ns() >= self.fixed_ns:
            self._lowest.forget()
            self.expired(self.now_ns())

    def expired(self, now_ns: int) -> None:
        """Called when the clock is looked at and `fixed_ns` has passed."""

    def _score(self, entry: Entry) -> Score:
        request: Request | None = entry.state
        session = None if request is None else self.sessions.get(request.session_id)
        if session is None:
            return (0.0, entry.used, entry.end)
        return self.score(session, entry, self._tier)


class Continuum(Sessions):
    """Keeps what a tool call returns to for `pin_s` seconds, if the tool is fast or unknown.

    Li et al., "Continuum: efficient and robust multi-turn LLM agent scheduling with KV cache
    time-to-live" (arXiv 2511.02230), by the rules of its released code, with a fixed time:

    - An answer that calls a tool is pinned for `pin_s` seconds, unless the mean duration of the
      tool's calls so far is longer (`ToolCallEstimator.set_up_pin`).
    - A pin ends at its time, unless the session's next request waits by then; then it ends with
      that request's admission (`Scheduler.unpin_requests_regular`).
    - Requests of pinned sessions come first, then sessions in the order of their first requests.

    Pinned data is evicted last and not locked: that of the session that came last goes first, as in
    the released code if nothing else can run. In that code, requests wait before this happens. With
    `ordered` 0, requests come in the order of arrival.
    """

    def __init__(self, world: World, *, pin_s: float = 2.0, ordered: float = 1) -> None:
        super().__init__(world)
        self._pin_s = pin_s
        self._is_ordered = bool(ordered)
        self._pins: dict[Session, float] = {}  # the ends of pins in ns
        self._durations: dict[str, tuple[float, int]] = {}  # sum in s, and number, by tool

    def ttl_s(self, tool: str, context_len: int) -> float:
        """Return for how long an answer that calls `tool` is pinned, in seconds."""
        total_s, count = self._durations.get(tool, (0.0, 0))
        return 0.0 if count and total_s / count > self._pin_s else self._pin_s

    def learn(self, tool: str, seconds: float) -> None:
        total_s, count = self._durations.get(tool, (0.0, 0))
        self._durations[tool] = total_s + seconds, count + 1

    def returned(self, session: Session, idle_ns: int) -> None:
        if session.tool:
            self.learn(session.tool, idle_ns / SECOND_NS)
        if self.is_pinned(session):
            self._pins[session] = inf

    def admitted(self, session: Session, queue_ns: int) -> None:
        self._pins.pop(session, None)

    def idles(self, session: Session, request: Request) -> None:
        self._pins.pop(session, None)
        seconds = self.ttl_s(session.tool, session.context_len) if session.tool else 0.0
        if seconds and not session.is_over:
            self._pins[session] = self.now_ns() + to_ns(seconds)
            self.fixed_ns = min(self.fixed_ns, self._pins[session])

    def is_pinned(self, session: Session) -> bool:
        return self._pins.get(session, 0) > self.now_ns()

    def expired(self, now_ns: int) -> None:
        self._pins = {each: end_ns for each, end_ns in self._pins.items() if end_ns > now_ns}
        self.fixed_ns = min(self._pins.values(), default=inf)

    def score(self, session: Session, entry: Entry, tier: str) -> Score:
        if self.is_pinned(session):
            return (1.0, -session.begun_ns, entry.used, entry.end)
        return (0.0, entry.used, entry.end)

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        if not self._is_ordered:
            return 0.0
        session = self.sessions[req.request.session_id]
        later_s = 0.0 if self.is_pinned(session) else LATER_S
        return later_s + session.begun_ns / SECOND_NS


class CacheTtl(Continuum):
    """As `Continuum`, but pins for the time that is worth most, as the paper computes it.

    A pin of t seconds is worth P(the tool ends within t) * benefit - t (section 4.1 of arXiv
    2511.02230). The benefit is the time to compute or load the context again, whichever is shorter,
    plus the mean queue time of requests without pins, times eta = -Corr(k, N - k) over the turns
    k of ended sessions with N turns. P counts the tool's calls so far, or those of all tools while
    the tool has at most `history` calls (section 4.2). Until there are more than `history` calls,
    tools last 1 s on average, with an exponential distribution: the best time is then ln(benefit).
    """

    def __init__(
        self, world: World, *, history: float = 100, queue_window: float = 100, ordered: float = 1
    ) -> None:
        super().__init__(world, ordered=ordered)
        self._history = history
        self._calls: dict[str, list[float]] = {}  # in s, in rising order, by tool; "" has all
        self._queue_s: deque[float] = deque(maxlen=int(queue_window))
        self._turns: dict[Session, int] = {}
        self._sums = [0] * 6  # of 1, x, y, x * x, y * y and x * y, for x = k and y = N - k
        tp, hardware = world.config.tp, world.config.hardware
        self._seconds, self._load_s = world.seconds, inf
        if world.capacity["host"]["full"] != 0:
            token_bytes = world.unit_bytes["host"]["full"] / world.page_size
            self._load_s = token_bytes / (hardware.pcie_bandwidth.value * tp)

    def learn(self, tool: str, seconds: float) -> None:
        for name in ("", tool):
            insort(self._calls.setdefault(name, []), seconds)

    def admitted(self, session: Session, queue_ns: int) -> None:
        if not self.is_pinned(session):
            self._queue_s.append(queue_ns / SECOND_NS)
        super().admitted(session, queue_ns)

    def idles(self, session: Session, request: Request) -> None:
        self._turns[session] = self._turns.get(session, 0) + 1
        super().idles(session, request)
        if session.is_over:
            turns = self._turns.pop(session)
            for k in range(1, turns + 1):
                x, y = k, turns - k
                for place, value in enumerate((1, x, y, x * x, y * y, x * y)):
                    self._sums[place] += value

    @property
    def eta(self) -> float:
        n, x, y, xx, yy, xy = self._sums
        spread = (n * xx - x * x) * (n * yy - y * y)
        return (x * y - n * xy) / sqrt(spread) if spread > 0 else 1.0

    def benefit_s(self, context_len: int) -> float:
        queue_s = sum(self._queue_s) / max(len(self._queue_s), 1)
        again_s = min(self._seconds(0, context_len), self._load_s * context_len)
        return queue_s * self.eta + again_s

    def ttl_s(self, tool: str, context_len: int) -> float:
        benefit_s, calls = self.benefit_s(context_len), self._calls.get("", [])
        if len(calls) <= self._history:
            return max(log(benefit_s), 0.0) if benefit_s > 0 else 0.0
        own = self._calls.get(tool, [])
        return best_ttl_s(own if len(own) > self._history else calls, benefit_s)


def best_ttl_s(calls: list[float], benefit_s: float) -> float:
    """Return the shortest time t with the highest share of calls within t * benefit - t."""
    best_s, most = 0.0, bisect_right(calls, 0.0) / len(calls) * benefit_s
    for place in range(bisect_right(calls, benefit_s)):  # longer times cost more than they gain
        worth = bisect_right(calls, calls[place], place) / len(calls) * benefit_s - calls[place]
        if worth > most:
            best_s, most = calls[place], worth
    return best_s


class Mori(Sessions):
    """Keeps busy sessions on the device and idle ones on the host, by their relative idleness.

    Xia et al., "Idleness is relative: exploiting tool-call idle windows for offloading in agentic
    systems with MORI" (arXiv 2606.00866). Only its abstract could be read. Rules and sections are
    from two public texts whose authors read all of it: a review (June 2026), and the plan and tests
    of a reimplementation on ThunderAgent (branch `mori` of kthxo/distserving, August 2026):

    - Idleness is the share of tool time in the last `window` turns, with the tool call that runs;
      queue times do not count (section 4.2).
    - Requests are gated until their session is on the device. A tier takes a session if it fits
      beside those that are there (section 4.1).
    - Every `tick_s` seconds, while the sessions of a tier exceed it, one moves: from the device to
      the host if it fits there, else out. Sessions in a tool call go first, the idlest first; those
      that run finish their turn. Others keep their places (section 4.3.1).
    - Waiting requests come in the order device, host, out, new; the least idle first, and of those
      out the shortest (section 4.3.1).
    - The device evicts data of sessions that are out or over first, then of those on the host, then
      its own. On the host, the last two change places (section 4.3.2). Then LRU.

    Different here: a request that fits starts at the next plan of a step, not at the next tick, and
    a session without room starts if nothing else runs. With `gated` 0, none is held back.
    """

    def __init__(
        self, world: World, *, window: float = 5, tick_s: float = 5.0, gated: float = 1
    ) -> None:
        super().__init__(world)
        self._window, self._tick_ns = int(window), to_ns(tick_s)
        self._is_gated = bool(gated)
        self._place: dict[Session, str] = {}
        self.room = {
            tier: inf if pages["full"] is None else pages["full"] * world.page_size
            for tier, pages in world.capacity.items()
        }
        self.fixed_ns = self._tick_ns

    def idleness(self, session: Session) -> float:
        turns = list(session.turns)
        if session.idle_ns is not None:
            turns.append(Turn(session.reasoning_ns, self.now_ns() - session.idle_ns))
        turns = turns[-self._window :]
        acting_ns = sum(each.acting_ns for each in turns)
        return acting_ns / max(acting_ns + sum(each.reasoning_ns for each in turns), 1)

    def returned(self, session: Session, idle_ns: int) -> None:
        session.turns.append(Turn(session.reasoning_ns, idle_ns))
        if len(session.turns) > self._window:
            session.turns.popleft()

    def starts(self, request: Request) -> bool:
        self.look_at_clock()
        session = self.sessions[request.session_id]
        length = max(session.context_len, request.prompt_len)
        on_device = self._place.get(session) == "device"
        return on_device or not self._is_gated or self._fits(length, "device")

    def admitted(self, session: Session, queue_ns: int) -> None:
        self._place[session] = "device"

    def idles(self, session: Session, request: Request) -> None:
        if session.is_over:
            self._place.pop(session, None)

    def expired(self, now_ns: int) -> None:
        self.fixed_ns = now_ns + self._tick_ns
        for tier in ("device", "host"):
            there = [each for each, place in self._place.items() if place == tier]
            there.sort(key=lambda each: (each.idle_ns is not None, self.idleness(each)))
            while not self._fits(0, tier):
                session = there.pop()
                is_kept = tier == "device" and self._fits(session.context_len, "host")
                self._place[session] = "host" if is_kept else "out"

    def _fits(self, length: int, tier: str) -> bool:
        held = sum(each.context_len for each, place in self._place.items() if place == tier)
        return held + length <= self.room[tier]

    def score(self, session: Session, entry: Entry, tier: str) -> Score:
        place = self._place.get(session, "out")
        level = 0 if place == "out" else 2 if place == tier else 1
        return (level, entry.used, entry.end)

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        session = self.sessions[req.request.session_id]
        place = self._place.get(session, "out" if session.context_len else "new")
        within = session.context_len / 1e9 if place == "out" else self.idleness(session) / 2
        return ("device", "host", "out", "new").index(place) + within


class GapOracle(Sessions):
    """Evicts the data of the session that returns last; a reference point, not a real policy.

    It knows how long each session pauses. A session that waits for sub-agents counts as if they
    had ended.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        last: dict[int, Request] = {}
        self._gap_ns: dict[int, float] = {}  # by request id
        for request in world.requests:
            before = last.get(request.session_id)
            if before is not None:
                is_closed = not world.config.workload.is_timed
                apart_ns = request.arrival_ns - before.arrival_ns
                self._gap_ns[before.id] = request.think_ns if is_closed else apart_ns
            last[request.session_id] = request
        self._returns_ns: dict[Session, float] = {}

    def returned(self, session: Session, idle_ns: int) -> None:
        self._returns_ns.pop(session, None)

    def idles(self, session: Session, request: Request) -> None:
        self._returns_ns[session] = self.now_ns() + self._gap_ns.get(request.id, inf)

    def score(self, session: Session, entry: Entry, tier: str) -> Score:
        return (-self._returns_ns.get(session, 0.0), entry.used, entry.end)

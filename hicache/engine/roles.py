"""Engines that only compute prompts, and engines that only decode, with a link between them.

A request first reaches a decode engine, which admits it and promises a prefill engine the tokens
that it holds. The prefill engine computes the prompt, sends the pages after the promised ones in
chunks, and keeps the prompt locked until they have arrived. The decode engine begins with the first
token when all pages have arrived and the promised ones are restored.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Reported
from hicache.engine.loop import Engine, Flight
from hicache.policies.routing import Replica, Route, router_of
from hicache.request import TOKEN_BYTES, Request
from hicache.scheduler.batch import NOTHING, Extend, Outcome
from hicache.scheduler.handover import Handover, News, Outage, Parcel, spans_to_send
from hicache.scheduler.intake import DecodeScheduler, Intake
from hicache.scheduler.sender import PrefillScheduler


class RoleEngine(Engine):
    """An engine of one role, which may be lost for a while."""

    is_losing = False

    def complete(self, done: Reported | News, now_ns: int) -> None:
        if isinstance(done, Parcel):
            self.take_parcel(done, now_ns)
        elif not isinstance(done, Outage):
            super().complete(done, now_ns)
        elif done.is_over:
            self.is_returning = True  # when its last copies have ended
        else:
            self.is_gone = self.is_losing = True  # when no batch is in flight

    def deliver(self, done: Reported | Prefetch | News, now_ns: int) -> bool:
        if isinstance(done, Parcel) and done.num_bytes:
            handover = done.handover
            handover.num_landed += self.role == "decode"  # which learns of it first
            if not (handover.is_settled and (handover.is_whole or handover.is_dead)):
                return False
        return super().deliver(done, now_ns)

    def take_parcel(self, parcel: Parcel, now_ns: int) -> None:
        raise NotImplementedError

    def _lose_requests(self, now_ns: int) -> None:
        raise NotImplementedError

    def _plan(self, now_ns: int) -> None:
        if self.is_losing and not self._flights:
            self.is_losing = False
            self._lose_requests(now_ns)
        if self.is_returning and not (self.is_losing or self.cache.is_in_use):
            self.is_returning = self.is_gone = False
            self.cache.forget()
            self.begin_later(now_ns)
        super()._plan(now_ns)

    def begin_later(self, now_ns: int) -> None:
        """Begin what has waited for the return of the engine."""

    def send(self, handover: Handover, now_ns: int, **what: Any) -> None:
        """Send KV, or news about a handover, to the other engine that takes part in it."""
        ends = handover.prefill, handover.decode
        source, target = ends if self.role == "prefill" else reversed(ends)
        parcel = Parcel(handover=handover, source=source, target=target, **what)
        self.executor.submit(parcel, now_ns)


class PrefillEngine(RoleEngine):
    """Computes prompts and sends their KV to decode engines.

    `prompts` has the handovers at work by request id. A handover waits in `later` while an earlier
    attempt for its request ends.
    """

    role = "prefill"
    scheduler: PrefillScheduler

    def setup(self, page_bytes: list[int]) -> None:
        self.scheduler.decode.held = []
        self.prompts: dict[int, Handover] = {}
        self.later: list[Handover] = []
        self._page_bytes = page_bytes

    def take_parcel(self, parcel: Parcel, now_ns: int) -> None:
        handover = parcel.handover
        if handover in self.later or self.prompts.get(handover.req.request.id) is handover:
            self._end(handover)
        elif not (handover.is_dead or parcel.num_bytes):
            self.cache.counters["engine/backlog_ns"] = self.backlog_ns(now_ns)
            self.later.append(handover)

    def _end(self, handover: Handover) -> None:
        request_id = handover.req.request.id
        if handover in self.later:
            self.later.remove(handover)
        elif handover.is_settled and handover.is_whole:  # even if the decode engine is lost
            self.scheduler.decode.release(handover.prompt)
            del self.prompts[request_id]
        elif handover.is_settled:  # else again when its KV has landed
            self._aborted.append(request_id)

    def take_in(self, now_ns: int) -> None:
        super().take_in(now_ns)
        for req in self.scheduler.ended.take().aborted:
            del self.prompts[req.request.id]
        self.begin_later(now_ns)

    def begin_later(self, now_ns: int) -> None:
        for handover in () if self.is_gone else list(self.later):
            if handover.req.request.id not in self.prompts:
                self.later.remove(handover)
                self.prompts[handover.req.request.id] = handover
                if self.cache.tree.entries is not None:
                    self.cache.tree.entries.arrived(handover.req.request)
                self._prefill.enter(handover.prompt, now_ns)

    def wake(self, now_ns: int) -> Outcome:
        for req, reason in super().wake(now_ns).rejected:
            handover = self.prompts.pop(req.request.id)
            handover.is_dead = True
            self.send(handover, now_ns, reason=f"on the prefill engine: {reason}")
        return NOTHING

    def _lose_requests(self, now_ns: int) -> None:
        for handover in [*self.prompts.values(), *self.later]:
            if not handover.is_dead:
                handover.is_lost = handover.is_dead = True
                self.send(handover, now_ns)
            self._end(handover)

    def _commit_steps(self, flight: Flight, num_steps: int, now_ns: int) -> None:
        super()._commit_steps(flight, num_steps, now_ns)
        for extend in flight.batch.extends:
            handover = self.prompts[extend.req.request.id]
            if not handover.is_dead:
                self._send(handover, extend, now_ns)

    def _send(self, handover: Handover, extend: Extend, now_ns: int) -> None:
        size, kinds = self.cache.page_size, self.cache.tree.kinds
        start, end = handover.sent_len, extend.end
        if extend.is_last:
            handover.computed_ns, handover.is_whole = now_ns, True
        elif end // size * size <= start:
            return
        handover.sent_len = end // size * size
        handover.num_sent += 1
        spans = spans_to_send(kinds, handover.promised_len, start, end, extend.req.target_len)
        num_bytes = sum((last - first) * self._page_bytes[kind] for kind, first, last in spans)
        # the first token at least
        self.send(handover, now_ns, num_bytes=num_bytes or TOKEN_BYTES, spans=spans)


class DecodeEngine(RoleEngine):
    """Takes requests in, gets the KV of their prompts from prefill engines, and decodes."""

    role = "decode"
    scheduler: DecodeScheduler

    @property
    def _intake(self) -> Intake:
        return self.scheduler.prefill

    def take_parcel(self, parcel: Parcel, now_ns: int) -> None:
        handover, intake = parcel.handover, self._intake
        if intake.handovers.get(handover.req.request.id) is not handover:
            intake.drain()
        elif handover.is_dead:
            intake.fail(handover, now_ns, parcel.reason)
        else:
            handover.arrived_ns = now_ns

    def take_in(self, now_ns: int) -> None:
        super().take_in(now_ns)
        self._intake.restore(now_ns)

    def hand_out(self, now_ns: int) -> None:
        for handover in self._intake.outbox:
            self.send(handover, now_ns)
        self._intake.outbox.clear()
        super().hand_out(now_ns)

    def begin_later(self, now_ns: int) -> None:
        self._intake.is_closed = False

    def _lose_requests(self, now_ns: int) -> None:
        scheduler = self.scheduler
        self._intake.is_closed = True
        for req in [*scheduler.waiting, *scheduler.running, *self._intake.loading]:
            scheduler.abort(req.request.id, now_ns)
        outcome = scheduler.ended.outcome
        outcome.rejected += [(req, "its decode engine was lost") for req in outcome.aborted]
        outcome.aborted.clear()

    def _plan(self, now_ns: int) -> None:
        self._intake.begin_decoding(now_ns)
        super()._plan(now_ns)


def route_pairs(
    engines: Sequence[Engine], replicas: Sequence[Replica], num_prefill: int, rules: Sequence[Route]
) -> Callable[[Request], int]:
    """Return the router of decode engines, and connect them by the router of prefill engines.

    The prefill engines come first in `engines`, in `replicas`, which are what routers see of them,
    and in `rules`, of which the first and the last are used.
    """

    def router(rule: Route, numbers: range) -> Callable[[Request], int]:
        choose = router_of(rule, replicas[numbers.start : numbers.stop])

        def route(request: Request) -> int:
            chosen = numbers[choose(request)]
            # the chosen engine, or the next one that is not lost, if there is any
            later = [*range(chosen, numbers.stop), *numbers]
            return next((n for n in later if not engines[n].is_gone), chosen)

        return route

    to_prefill = router(rules[0], range(num_prefill))
    for number, engine in enumerate(engines):
        if isinstance(engine, DecodeEngine):
            engine.scheduler.prefill.connect(number, to_prefill)
    return router(rules[-1], range(num_prefill, len(engines)))

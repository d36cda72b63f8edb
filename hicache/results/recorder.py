"""Collects the results of a run: a record of every request, a row of every interval."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.tree.node import TIER_NAMES, TIERS
from hicache.clock import SECOND_NS, to_ns
from hicache.config import ExperimentConfig
from hicache.engine.loop import Engine
from hicache.observe.explainer import Case
from hicache.observe.reasons import Span
from hicache.observe.timeline import Timeline
from hicache.request import Request
from hicache.results.metrics import (
    PERCENTILES,
    PREFILL_CAUSES,
    Progress,
    RequestRecord,
    Row,
    Status,
    check,
    percentile,
)
from hicache.scheduler.request_state import RequestState, TokenRun
from hicache.workload.rounds import stage_at

TIER_TOKENS = ("device_hit", "host_hit", "storage_hit", "computed", "peer_hit")
PROGRESS_EVERY = 100  # requests between two progress reports


class Stage(NamedTuple):
    """A stage of a workload, and the event counts of that stage.

    Workloads with stages change their request rate at the start of each stage. In a multi-turn
    benchmark, each stage is one round, in which every client sends one request.
    """

    number: int  # number from 1
    start_ns: int
    end_ns: int
    counters: Counter[str]


class Gaps(NamedTuple):
    """Times between two tokens of an answer, each with the number of requests that had it.

    Attributes:
        ns: [G] int64, in nanoseconds, rising.
        counts: [G] int64.
    """

    ns: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, ns: NDArray[np.int64], counts: NDArray[np.int64]) -> "Gaps":
        """Make gaps of times in any order, which may be equal."""
        distinct, places = np.unique(ns, return_inverse=True)
        totals = np.bincount(places, counts, len(distinct))  # exact below 2**53
        return cls(distinct, totals.astype(np.int64))

    def merged(self, other: "Gaps") -> "Gaps":
        return self.of(np.append(self.ns, other.ns), np.append(self.counts, other.counts))

    def seconds(self) -> dict[str, float]:
        """Return the mean and the percentiles in seconds, by the names of their metrics."""
        values, ranks = np.append(0, self.ns), np.append(0, self.counts.cumsum())
        found = {"mean": int(self.ns @ self.counts) / max(ranks[-1], 1)} | {
            f"p{percent}": values[np.searchsorted(ranks, percent / 100 * ranks[-1])]
            for percent in PERCENTILES
        }
        return {f"request/itl_s_{name}": float(ns) / SECOND_NS for name, ns in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a run counted besides its requests. The warm-up does not count."""

    counters: Counter[str]
    gaps: Gaps
    now_ns: int  # the end of the run
    num_engines: int
    num_steps: int
    num_nodes: int  # in the radix trees, at the end
    stages: Sequence[Stage]

    def merged(self, other: "Tally") -> "Tally":
        """Return the tally of two runs of different engines without stages of the load."""
        counters = Counter(self.counters)
        counters.update(other.counters)
        return Tally(
            counters=counters,
            gaps=self.gaps.merged(other.gaps),
            now_ns=max(self.now_ns, other.now_ns),
            num_engines=self.num_engines + other.num_engines,
            num_steps=self.num_steps + other.num_steps,
            num_nodes=self.num_nodes + other.num_nodes,
            stages=(),
        )


class Recorder:
    def __init__(
        self,
        engines: Sequence[Engine],
        config: ExperimentConfig,
        *,
        num_requests: int,
        progress: Callable[[Progress], None] | None,
        counters: Iterable[Counter[str]] = (),
        cases: dict[int, Case] | None = None,
        timeline: Timeline | None = None,
        stage_of: Mapping[int, int] | None = None,
        rounds: Mapping[int, int] | None = None,
    ) -> None:
        """Start to record the results of a run, one record per request.

        Args:
            engines: the engines that serve the requests.
            config: the settings of the run.
            num_requests: the number of requests in the workload.
            progress: called with the progress after each time interval and every `PROGRESS_EVERY`
                requests. None means that progress is not reported.
            counters: event counts to add to those of the engines.
            cases: why requests missed the cache, by request id. The recorder removes the entry of a
                request that ends.
            timeline: receives the final state of each request. None means that no final states are
                kept.
            stage_of: the stage of each request by its id, from 0, if each stage starts at the end
                of the previous stage. None for all other workloads.
            rounds: how many turns of its session precede each request, by request id. None means
                that no request has a previous turn.
        """
        self.records: list[RequestRecord] = []
        self._engines = engines
        self._num_requests = num_requests
        self._interval_ns = round(config.tracker.interval_s * SECOND_NS)
        self._warm_up_ns = round(config.workload.warm_up_s * SECOND_NS)
        # True decides by the planned arrival whether a request belongs to the warm-up
        self._is_timed = config.workload.is_timed
        self._warm_ns: int | None = (
            self._warm_up_ns or None
        )  # when counting begins; None afterwards
        self._progress = progress
        self._next_row_ns = self._interval_ns
        ends_s = config.workload.stage_ends_s if self._is_timed else ()
        self._stage_ends_ns = [to_ns(end_s) for end_s in ends_s]
        self._at_stage_ends: list[Counter[str]] = []
        self._rounds = rounds or {}
        self._workload = config.workload
        self._stage_of = stage_of or {}
        numbers = range(max(self._stage_of.values(), default=-1) + 1)
        self._left = [0 for _ in numbers]  # number of requests that have not ended, by stage
        for number in self._stage_of.values():
            self._left[number] += 1
        self._num_done = 0
        self._num_finished = 0
        # hits from peers last, where there are any
        self._tiers = TIER_TOKENS[: None if config.storage.kind == "peers" else -1]
        self._before = dict.fromkeys(self._tiers, 0)
        self._finished_before = 0
        self._counters = [engine.cache.counters for engine in engines] + list(counters)
        self._uncounted: Counter[str] = Counter()
        self._num_in_rows = self._row_ns = self._busy_ns = 0  # at the end of the last row
        self._cases = {} if cases is None else cases
        self._timeline = timeline
        self._token_runs: list[TokenRun] = []  # of requests that are counted
        self.now_ns = 0
        self._end_stages(0)  # ends leading stages without requests

    def next_look_ns(self) -> int:
        ends_ns = self._stage_ends_ns[len(self._at_stage_ends) :][:1]
        return min(self._next_row_ns, self._warm_ns or self._next_row_ns, *ends_ns)

    def at(self, now_ns: int) -> None:
        while (moment := self.next_look_ns()) <= now_ns:
            for engine in self._engines:
                engine.catch_up(moment)
            if self._stage_ends_ns[len(self._at_stage_ends) :][:1] == [moment]:
                self._at_stage_ends.append(self._counters_at(moment))
            if moment == self._warm_ns:
                self._uncounted = self._all_counters()
                # count unused pages that the warm-up read, since they get their fate later
                self._uncounted["prefetch/read_pages"] -= sum(self._fates_now().values())
                self._warm_ns = None
            if moment == self._next_row_ns:
                self.now_ns = moment
                self._close_row(moment)
                self._next_row_ns += self._interval_ns
        self.now_ns = now_ns

    def close(self) -> None:
        self._close_row(self.now_ns)

    def totals(self) -> Counter[str]:
        totals = self._all_counters()
        totals.update(self._fates_now())
        if self._warm_ns is not None:  # the run ended within the warm-up
            return Counter(dict.fromkeys(totals, 0))
        totals.subtract(self._uncounted)
        return totals

    def tally(self) -> Tally:
        return Tally(
            counters=self.totals(),
            gaps=self._gaps(),
            now_ns=self.now_ns,
            num_engines=len(self._engines),
            num_steps=sum(engine.num_steps for engine in self._engines),
            num_nodes=sum(engine.cache.tree.num_nodes for engine in self._engines),
            stages=self.stages(),
        )

    def stages(self) -> list[Stage]:
        """Return the stages of the workload, each with how much the run's counters rose in it.

        A workload with stages changes its request rate at the start of each stage. Stages that
        begin during the warm-up are left out.
        """
        at_ends = [*self._at_stage_ends]
        while len(at_ends) < len(self._stage_ends_ns):  # the run ended before these stages
            at_ends.append(self._counters_at(self.now_ns))
        stages, start_ns, before = [], 0, Counter[str]()
        ends = zip(self._stage_ends_ns, at_ends, strict=True)
        for number, (end_ns, after) in enumerate(ends, start=1):
            if start_ns >= self._warm_up_ns and end_ns > start_ns:
                counters = Counter(after)
                counters.subtract(before)
                stages.append(Stage(number, start_ns, end_ns, counters))
            start_ns, before = end_ns, after
        return stages

    def finished(self, req: RequestState, engine: int, now_ns: int) -> None:
        num_counted = len(self.records)
        self._ended(req, Status.finished, "", engine, now_ns)
        self._num_finished += 1
        if len(self.records) > num_counted:  # not of the warm-up
            self._count_gaps(req)

    def _count_gaps(self, req: RequestState) -> None:
        runs = req.token_runs
        extra = sum(map(len, runs)) - len(runs) - (req.decoded - 1)
        while extra > 0:  # steps that were planned before the last token was known computed more
            last = runs.pop()
            num_gaps = len(last) - 1
            if extra < num_gaps:
                runs.append(TokenRun(last[:-extra]))
            extra -= num_gaps
        for run in runs:
            if not run.num_counted:
                self._token_runs.append(run)
            run.num_counted += 1

    def _gaps(self) -> Gaps:
        runs = [TokenRun([0]), *self._token_runs]
        lengths = np.array([len(run) for run in runs])
        times = np.fromiter(chain.from_iterable(runs), np.int64, lengths.sum())
        is_gap = np.ones(len(times), bool)  # between this time and the one before it
        is_gap[lengths.cumsum() - lengths] = False
        counts = np.array([run.num_counted for run in runs])
        return Gaps.of(np.diff(times, prepend=0)[is_gap], np.repeat(counts, lengths - 1))

    def rejected(
        self, req: RequestState, reason: str, followers: Sequence[Request], engine: int, now_ns: int
    ) -> None:
        common: dict[str, Any] = {"status": Status.rejected, "reason": reason, "engine": engine}
        self._record(req.request, now_ns, arrival_ns=req.submitted_ns, output_len=0, **common)
        self._dropped(followers, req, Status.rejected, engine, now_ns)

    def aborted(
        self, req: RequestState, followers: Sequence[Request], engine: int, now_ns: int
    ) -> None:
        self._ended(req, Status.aborted, "gave up", engine, now_ns)
        self._dropped(followers, req, Status.aborted, engine, now_ns)

    def _dropped(
        self,
        followers: Sequence[Request],
        req: RequestState,
        status: Status,
        engine: int,
        now_ns: int,
    ) -> None:
        reason = f"follows {status.value} request {req.request.id}"
        common: dict[str, Any] = {"status": status, "reason": reason, "engine": engine}
        for request in followers:
            # a request with an arrival time of its own is dropped at that time
            came_ns = max(request.arrival_ns, now_ns) if self._is_timed else now_ns
            times = {"arrival_ns": came_ns, "finish_ns": came_ns}
            self._record(request, now_ns, output_len=0, **times, **common)

    def _all_counters(self) -> Counter[str]:
        totals: Counter[str] = Counter()
        for counters in self._counters:
            totals.update(counters)
        for engine in self._engines:
            if engine.role != "both":
                for name in ("busy_ns", "backlog_ns"):
                    totals[f"{engine.role}/{name}"] += engine.cache.counters[f"engine/{name}"]
        return totals

    def _counters_at(self, now_ns: int) -> Counter[str]:
        totals = self._all_counters()
        totals["engine/backlog_ns"] = sum(engine.backlog_ns(now_ns) for engine in self._engines)
        return totals

    def _fates_now(self) -> Counter[str]:
        return sum((engine.cache.fates.fates_now() for engine in self._engines), Counter())

    def _ended(
        self, req: RequestState, status: Status, reason: str, engine: int, now_ns: int
    ) -> None:
        # the parts cover the time to the first token, or to the abort
        request = req.request
        case = self._cases.pop(request.id, None) or Case()
        if self._timeline is not None:
            self._timeline.ended(req, case)
        until_ns = now_ns if req.first_token_ns is None else req.first_token_ns
        admitted_ns = until_ns if req.admitted_ns is None else req.admitted_ns
        handed_ns = req.transfer_ns + req.restore_ns
        known_ns = (req.own_ns, req.shared_ns, req.fence_ns)
        prefill_ns = until_ns - admitted_ns - handed_ns
        # an abort may come during the stall, which counts when its step begins
        load_back_ns = min(req.load_back_ns, prefill_ns - sum(known_ns))
        prefill_ns -= load_back_ns
        parts_ns = zip(PREFILL_CAUSES, (*known_ns, prefill_ns - sum(known_ns)), strict=True)
        self._record(
            request,
            now_ns,
            engine=engine,
            status=status,
            reason=reason,
            arrival_ns=req.submitted_ns,
            first_token_ns=req.first_token_ns,
            finish_ns=now_ns,
            output_len=req.decoded,
            device_hit_len=req.device_len,
            host_hit_len=req.host_len,
            storage_hit_len=req.storage_len,
            peer_hit_len=req.peer_len,
            computed_len=req.computed_len,
            recomputed_len=req.recomputed_len,
            dropped_len=req.dropped_len,
            draft_cold_len=req.draft_cold_len,
            computed_for=_by_reason(case.spans[0]),
            recomputed_for=_by_reason(case.spans[1]),
            window_missing_len=sum(
                span.num_tokens for span in case.spans[0] if span.kind not in (FULL, MAMBA)
            ),
            state_missing_len=sum(span.num_tokens for span in case.spans[0] if span.kind == MAMBA),
            queue_ns=admitted_ns - req.submitted_ns - req.storage_wait_ns,
            queue_for_ns={cause: ns for cause, ns in req.queue_ns.items() if ns},
            storage_wait_ns=req.storage_wait_ns,
            load_back_ns=load_back_ns,
            prefill_ns=prefill_ns,
            prefill_for_ns={cause: ns for cause, ns in parts_ns if ns},
            retractions=req.retractions,
            transfer_ns=req.transfer_ns,
            restore_ns=req.restore_ns,
            reused_len=req.reused_len,
            num_steps=req.num_parts + req.num_decodes,
        )

    def _record(self, request: Request, now_ns: int, **fields: Any) -> None:
        record = RequestRecord(
            id=request.id,
            session_id=request.session_id,
            session_name=request.session_name,
            round=self._rounds.get(request.id, 0),
            prompt_len=request.prompt_len,
            **fields,
        )
        if self._workload.stage_ends_s:
            record.stage = stage_at(request.arrival_ns, self._workload) + 1
        check(record)
        came_ns = request.arrival_ns if self._is_timed else record.arrival_ns
        if came_ns >= self._warm_up_ns:
            self.records.append(record)
        self._num_done += 1
        if self._left:
            self._left[self._stage_of[request.id]] -= 1
            self._end_stages(now_ns)
        if self._progress is not None and self._num_done % PROGRESS_EVERY == 0:
            self._progress(self._progress_now(None))

    def _end_stages(self, now_ns: int) -> None:
        # in a closed loop, a stage ends with its last request, and not before an earlier stage
        while self._left[len(self._stage_ends_ns) :][:1] == [0]:
            self._stage_ends_ns.append(now_ns)
            self._at_stage_ends.append(self._counters_at(now_ns))

    def _progress_now(self, row: Row | None) -> Progress:
        return Progress(
            done_count=self._num_done,
            total_count=self._num_requests,
            time_s=self.now_ns / SECOND_NS,
            row=row,
        )

    def _close_row(self, end_ns: int) -> None:
        if self._progress is None:
            return
        totals = {
            name: sum(engine.cache.counters[f"cache/{name}_tokens"] for engine in self._engines)
            for name in self._tiers
        }
        tokens = {name: totals[name] - self._before[name] for name in self._tiers}
        row = {
            "time_s": end_ns / SECOND_NS,
            **{f"interval/{name}_tokens": number for name, number in tokens.items()},
            **self._rates(tokens),
            "interval/finished_count": self._num_finished - self._finished_before,
            "queue/waiting_count": sum(len(each.scheduler.waiting) for each in self._engines),
            "queue/running_count": sum(len(each.scheduler.running) for each in self._engines),
            **self._occupancy(),
        }
        self._before, self._finished_before = totals, self._num_finished
        self._progress(self._progress_now(row))

    def _rates(self, tokens: Mapping[str, int]) -> dict[str, float]:
        # of the interval that ends; what nothing was measured of is left out
        found: dict[str, float] = {}
        if any(tokens.values()):
            found["interval/token_hit_rate"] = 1 - tokens["computed"] / sum(tokens.values())
        times = [each.ttft_ns for each in self.records[self._num_in_rows :] if each.ttft_ns]
        self._num_in_rows = len(self.records)
        for percent in PERCENTILES if times else ():
            found[f"interval/ttft_s_p{percent}"] = percentile(times, percent) / SECOND_NS
        busy_ns = sum(engine.cache.counters["engine/busy_ns"] for engine in self._engines)
        passed_ns = (self.now_ns - self._row_ns) * len(self._engines)
        if passed_ns:
            found["interval/busy_share"] = (busy_ns - self._busy_ns) / passed_ns
        self._row_ns, self._busy_ns = self.now_ns, busy_ns
        return found

    def _occupancy(self) -> dict[str, float]:
        gauges = {}
        for tier in TIERS:
            for kind in self._engines[0].cache.tree.kinds.numbers:
                pools = [engine.cache.pools[tier][kind] for engine in self._engines]
                capacity = sum(pool.capacity or 0 for pool in pools)
                if capacity:
                    share = sum(pool.num_taken for pool in pools) / capacity
                    name = self._engines[0].cache.tree.kinds.names[kind]
                    gauges[f"pool/{name}_{TIER_NAMES[tier]}_used_share"] = share
        return gauges


def _by_reason(spans: Iterable[Span]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for span in spans:
        totals[span.reason] = totals.get(span.reason, 0) + span.num_tokens
    return totals

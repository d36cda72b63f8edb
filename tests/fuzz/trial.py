"""Runs a scenario and checks every law (`hicache/observe/invariants.py`)."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

from hicache import experiment
from hicache.cache.tree.digests import Digests
from hicache.cache.tree.keys import Numbers
from hicache.clock import SimulatedClock
from hicache.config import ExperimentConfig, StartState
from hicache.observe import invariants
from hicache.request import TOKEN_BYTES, Request
from hicache.results.metrics import TTFT_PARTS, Progress, RequestRecord, Row, Status, summarize
from hicache.workload.workload import Workload
from tests.fuzz.scenario import Choices, Plan, plan_of
from tests.workload.infinite_cache import page_chain

MOST_MOMENTS = 300_000  # some 40 requests take a few thousand
STEPS_CHECKED = 400  # each of them; of those of a longer run, one in 8


class HangError(AssertionError):
    """A run does not end."""


class BoundedClock(SimulatedClock):
    """A clock that raises an error after more events than any small run has."""

    _moments_left = MOST_MOMENTS

    def wait_until(self, time_ns: int) -> None:
        self._moments_left -= 1
        if self._moments_left < 0:
            raise HangError(f"{MOST_MOMENTS} moments have passed, it is {self.now()} ns")
        super().wait_until(time_ns)


def thinned(check: Callable[..., None]) -> Callable[..., None]:
    """Return the same check, which is skipped after most steps of a long run."""
    steps = count()

    def check_now_and_then(*args: object) -> None:
        step = next(steps)
        if step < STEPS_CHECKED or step % 8 == 0:
            check(*args)

    return check_now_and_then


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The results of a run."""

    summary: dict[str, float | int]
    records: Sequence[RequestRecord]
    rows: Sequence[Row] = ()

    @property
    def lines(self) -> list[str]:
        """All results as lines of text, to be compared with those of another run."""
        summary = [f"{key}: {json.dumps(value)}" for key, value in self.summary.items()]
        rows = [json.dumps(row) for row in self.rows]
        return [*summary, *map(repr, self.records), *rows]

    def without_reasons(self) -> "Trial":
        """Return the results without the reasons why tokens were computed."""
        reasons = ("computed/", "recomputed/")
        summary = {key: each for key, each in self.summary.items() if not key.startswith(reasons)}
        nothing: Any = {"computed_for": {}, "recomputed_for": {}}
        nothing |= dict.fromkeys(("window_missing_len", "state_missing_len"), 0)
        records = [replace(each, **nothing) for each in self.records]
        return replace(self, summary=summary, records=records)


def try_choices(choices: Choices, limit: int | None = None) -> Trial:
    """Run these choices three times: with invariants checked, by page digests, and without jumps.

    Reasons of computed tokens need page numbers, so the second run gives no reasons; all other
    results must be equal.

    `limit`: run the first requests only.

    Raises:
        Exception: a run failed, or two runs differ.
    """
    plan = plan_of(choices, limit)
    trial = _run(plan)
    check_records(plan, trial.records)
    second = _run(plan, checks=False, by_digests=True)
    check_equal(trial.without_reasons(), second.without_reasons(), "a second run")
    check_equal(trial, _run(plan, checks=False, jump=False), "engine.jump=false")
    return trial


def _run(plan: Plan, *, checks: bool = True, jump: bool = True, by_digests: bool = False) -> Trial:
    engine = replace(plan.config.engine, check_invariants=checks, jump=jump, explain=not by_digests)
    names = partial(Digests, plan.config.cache.page_size) if by_digests else Numbers
    seen: list[Progress] = []
    with (
        mock.patch("hicache.engine.simulated_runtime.SimulatedClock", BoundedClock),
        mock.patch.object(invariants, "check", thinned(invariants.check)),
        mock.patch.object(experiment, "Numbers", names),
    ):
        result = experiment.run(
            replace(plan.config, engine=engine), workload=plan.workload, progress=seen.append
        )
    summary = summarize(result.records, result.measures)
    rows = [each.row for each in seen if each.row is not None]
    return Trial(summary=summary, records=result.records, rows=rows)


def check_records(plan: Plan, records: Sequence[RequestRecord]) -> None:
    """Check what `summarize` does not: each request has one record, and no time is negative.

    Nor may a request hit tokens that no other request of its namespace had.
    """
    ids = [record.id for record in records]
    assert len(set(ids)) == len(ids), f"of {len(ids)} records only {len(set(ids))} are different"
    requests = {request.id: request for request in plan.workload.requests}
    served = plan.config.workload
    if not (served.warm_up_s or served.end_jobs or served.end_s):
        assert set(ids) == set(requests), f"{len(requests)} requests came, {len(ids)} are recorded"
    shared = None
    if plan.config.workload.start is StartState.cold:
        shared = shared_lengths(plan.workload, plan.config)
    for record in records:
        for part in TTFT_PARTS:
            time_ns = getattr(record, f"{part}_ns")
            assert time_ns >= 0, f"request {record.id} has a {part} of {time_ns} ns"
        assert record.status is not Status.aborted or plan.config.workload.abort_share, (
            f"request {record.id} was aborted, and no client aborts requests"
        )
        if record.status is not Status.finished:
            continue
        hit_len = record.prompt_len - record.computed_len
        longest = record.prompt_len - 1 if shared is None else shared[record.id]
        assert 0 <= hit_len <= longest, (
            f"request {record.id} hit {hit_len} tokens and at most {longest} could be there"
        )
        wanted = requests[record.id].output_len
        assert record.output_len == wanted, f"request {record.id} got {record.output_len} tokens"
        assert record.first_token_ns is not None
        assert record.finish_ns is not None
        in_order = record.arrival_ns <= record.first_token_ns <= record.finish_ns
        assert in_order, f"request {record.id} finished before its first token or arrival"


def shared_lengths(workload: Workload, config: ExperimentConfig) -> dict[int, int]:
    """Return by request the tokens of its prompt that an infinite cache could have held."""
    page, extra = config.cache.page_size, config.compat.rules.loads_last_page
    chains = {each.id: list(page_chain(*_kept(each), page)) for each in workload.requests}
    num_having = Counter(prefix for chain in chains.values() for prefix in chain)
    lengths = {}
    for each in workload.requests:
        longest = each.prompt_len - 1
        chain = chains[each.id][: (longest + extra) // page]
        lengths[each.id] = min(page * sum(num_having[prefix] > 1 for prefix in chain), longest)
    return lengths


def _kept(request: Request) -> tuple[bytes, str]:
    # the last answer token is never fed back
    return (request.prompt.to_bytes() + request.output.to_bytes())[:-TOKEN_BYTES], request.namespace


def check_equal(trial: Trial, other: Trial, what: str) -> None:
    if trial.lines == other.lines:
        return
    pairs = zip(trial.lines, other.lines, strict=False)
    left, right = next(((a, b) for a, b in pairs if a != b), ("", ""))
    raise AssertionError(f"{what} differs: {left} / {right}")

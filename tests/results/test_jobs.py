"""Completion times of jobs against a recursion, mean-value analysis, and a schedule by hand."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import pytest

from hicache import experiment
from hicache.engine.deployment import deploy
from hicache.request import Request
from hicache.results.jobs import ENDS, KEYS, Job, jobs_of, outcome
from hicache.results.metrics import Result, summarize
from hicache.runs.schema import config_of
from tests.scheduler.world import request_of
from tests.validity import runs
from tests.validity.test_queue import ALONE, service_ns

CLOSED = (*ALONE[:-1], "workload.arrivals=closed", "workload.jobs=true")


def stranger(number: int, prompt_len: int, **more: object) -> Request:
    first = number * 20_000
    return request_of(
        number, range(first, first + prompt_len), [first + prompt_len], number, **more
    )


def ended(requests: Sequence[Request], *more: str) -> tuple[list[str], list[Job], Result]:
    config = config_of(*CLOSED, f"workload.concurrency={len(requests)}", *more)
    result = experiment.run(config, workload=runs.workload(requests))
    return *jobs_of(config, deploy(config).cost, requests, result.records), result


def said(result: Result) -> str | None:
    """What the screen says of the jobs of a run."""
    return outcome(summarize(result.records, result.measures))


def recursion(
    services_ns: Sequence[Sequence[int]], thinks_ns: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the end in ns of each turn [job][turn]: jobs start at 0 and share one FIFO server."""
    coming = [(0, job, 0) for job in range(len(services_ns))]
    heapify(coming)
    free_ns, ends = 0, [[] for _ in services_ns]
    while coming:
        arrival_ns, job, turn = heappop(coming)
        free_ns = max(free_ns, arrival_ns) + services_ns[job][turn]
        ends[job].append(free_ns)
        if turn + 1 < len(services_ns[job]):
            heappush(coming, (free_ns + thinks_ns[job][turn + 1], job, turn + 1))
    return ends


def test_completion_times_of_jobs_equal_those_of_the_recursion_in_nanoseconds() -> None:
    lengths, num_jobs, num_turns = (64, 1024, 4096), 12, 9
    services = [service_ns(length, 1) for length in lengths]
    rng = np.random.default_rng(1)
    kinds = rng.integers(0, 3, (num_jobs, num_turns))
    thinks = rng.exponential(6 * np.mean(services), kinds.shape).astype(int)
    requests = []
    for turn in range(num_turns):
        for job in range(num_jobs):
            parent = None if turn == 0 else len(requests) - num_jobs
            request = stranger(len(requests), lengths[kinds[job, turn]], parent_id=parent)
            request.session_id, request.think_ns = job, int(thinks[job, turn])
            requests.append(request)

    _, jobs, result = ended(requests)

    expected = recursion([[services[k] for k in row] for row in kinds], thinks.tolist())
    assert [job.completion_ns for job in jobs] == [ends[-1] for ends in expected]
    assert sum(job.parts_ns["queue"] for job in jobs) > num_jobs * max(services)
    longest = max(job.completion_ns for job in jobs)
    assert result.measures["jobs/per_hour"] == pytest.approx(num_jobs * 3600e9 / longest)
    assert set(KEYS) <= set(result.measures)


@pytest.mark.parametrize("num_jobs", [3, 20])
def test_the_recursion_has_the_mean_completion_time_of_mean_value_analysis(num_jobs: int) -> None:
    service_s, think_s, num_turns = 1.0, 8.0, 400_000 // num_jobs
    rng = np.random.default_rng(2)
    services = (rng.exponential(service_s, (num_jobs, num_turns)) * 1e9).astype(int)
    thinks = (rng.exponential(think_s, (num_jobs, num_turns)) * 1e9).astype(int)

    ends = recursion(services.tolist(), thinks.tolist())

    queue = response_s = 0.0
    for jobs in range(1, num_jobs + 1):  # Reiser and Lavenberg, 1980
        response_s = service_s * (1 + queue)
        queue = jobs / (think_s + response_s) * response_s
    completion_s = np.mean([each[-1] for each in ends]) / 1e9
    assert completion_s == pytest.approx(num_turns * (think_s + response_s), rel=0.01)


def test_sub_agents_best_of_three_and_joins_end_as_computed_by_hand() -> None:
    one = service_ns(1024, 1)
    # parent, joins, think time in service times; end in service times, computed by hand
    table = [
        (None, (), 0, 1),  # the agent starts
        (0, (), 0, 3),  # two sub-agents, with two turns each
        (0, (), 0, 4),
        (1, (), 1, 6),
        (2, (), 3, 8),
        (0, (3, 4), 1, 10),  # the agent goes on
        (5, (), 0, 11),  # best of three
        (5, (), 0, 12),
        (5, (), 0, 13),
        (8, (6, 7), 2, 16),
        (None, (), 0, 2),  # another agent, which begins beside the first
        (10, (), 1.5, 5),
    ]
    requests = [
        stranger(number, 1024, parent_id=parent, joins=joins, think_ns=int(think * one))
        for number, (parent, joins, think, _) in enumerate(table)
    ]

    ends, (first, second), result = ended(requests, "workload.concurrency=2")

    assert [each.finish_ns for each in result.records] == [end * one for *_, end in table]
    parts = {"prefill": 6 * one, "queue": 4 * one, "tool": 6 * one}
    assert {name: ns for name, ns in first.parts_ns.items() if ns} == parts
    tool = int(1.5 * one)
    parts = {"prefill": 2 * one, "queue": 3 * one - tool, "tool": tool}
    assert {name: ns for name, ns in second.parts_ns.items() if ns} == parts
    assert first.slowdown == pytest.approx(16 / 12)
    assert second.slowdown == pytest.approx(5 / 3.5)
    assert ends == ["finished", "finished"]


def chain(first: int, num_turns: int, *, prompt_len: int = 64, think_ns: int = 0) -> list[Request]:
    turns = []
    for turn in range(num_turns):
        parent = None if turn == 0 else first + turn - 1
        request = stranger(first + turn, prompt_len, parent_id=parent, think_ns=think_ns)
        request.session_id = first
        turns.append(request)
    return turns


def test_a_job_that_never_ends_is_unfinished_when_the_time_is_over() -> None:
    requests = [*chain(0, 2), *chain(10, 9, think_ns=10**9), *chain(20, 3)]

    ends, jobs, result = ended(requests, "workload.end_s=3.5", "workload.concurrency=2")

    assert ends == ["finished", "unfinished", "finished"]
    assert len(jobs) == 2
    assert [each.id for each in result.records if each.session_id == 10] == [10, 11, 12, 13]
    assert sum(result.measures[f"jobs/{end}_count"] for end in ENDS) == 3
    assert said(result).startswith("2 finished, 1 unfinished; completion mean / p50 / p95 ")


def test_a_run_ends_with_a_number_of_jobs_and_counts_those_that_have_not_begun() -> None:
    requests = [*chain(0, 2), *chain(10, 9, think_ns=10**9), *chain(20, 3), *chain(30, 1)]

    ends, _, _ = ended(requests, "workload.end_jobs=2", "workload.concurrency=2")

    assert ends == ["finished", "unfinished", "finished", "not_begun"]


def test_a_session_longer_than_the_context_and_an_aborted_parent_end_their_jobs() -> None:
    long = chain(0, 3)
    long[1] = stranger(1, 9000, parent_id=0)
    long[1].session_id = 0
    agent = [
        request_of(3, range(60_000, 60_100), range(60_100, 60_150)),
        stranger(4, 64, parent_id=3),  # a sub-agent
        stranger(5, 64, parent_id=3, joins=(4,)),
    ]

    rejected, _, too_long = ended(long, "model.max_len=8000")
    aborted, _, result = ended(agent, "workload.abort_share=1", "workload.patience_s=1e-6")

    assert rejected == ["rejected"]
    assert aborted == ["aborted"]
    assert [each.reason for each in result.records][1:] == ["follows aborted request 3"] * 2
    assert result.measures["jobs/aborted_count"] == 1
    assert (said(too_long), said(result)) == ("1 rejected", "1 aborted")


def test_jobs_and_end_jobs_are_refused_with_arrivals_that_cannot_have_them() -> None:
    with pytest.raises(ValueError, match="end_jobs"):
        experiment.run(config_of("workload=chat", "model=llama3_8b", "workload.end_jobs=1"))
    with pytest.raises(ValueError, match="arrivals=causal or closed"):
        config_of("workload=chat", "workload.jobs=true", "workload.arrivals=open")

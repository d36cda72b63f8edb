"""Comparison of the steps of two schedulers: our engine twice, the second with one change."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.diff.__main__ import main
from experiments.diff.in_flight import (
    Arrivals,
    FlightComparison,
    differences,
    run_steps,
    to_markdown,
)
from experiments.diff.protocol import Pools, StepRow
from experiments.diff.simulator import SimulatorSide
from hicache.scheduler.prefill import Prefill
from hicache.scheduler.scheduler import Scheduler
from tests.scheduler.world import request_of

POOLS = Pools(
    device_tokens=2048,
    host_tokens=4096,
    has_storage=False,
    chunk_tokens=512,
    max_len=1280,
    in_flight=6,
)
SHARED = range(1, 129)  # the first two pages of all prompts
REQUESTS = [
    request_of(n, [*SHARED, *range(1000 * n, 1000 * n + 40 + 130 * (n % 5))], [n] * (100 + 60 * n))
    for n in range(1, 9)
]


class Direct:
    """A side in this process."""

    def __init__(self, pools: Pools, **options: str) -> None:
        self.side = SimulatorSide(pools, {"compat": "vllm_0_33", **options})
        self._row: StepRow = {}

    def ask(self, calls: list[tuple[str, list[object]]]) -> None:
        ((_, arrivals),) = calls
        self._row = self.side.step(arrivals)  # type: ignore[arg-type]

    def take_row(self) -> StepRow:
        return self._row


def compared(
    change: Callable[[Scheduler], object] | None = None, **options: str
) -> FlightComparison:
    sides = Direct(POOLS, **dict.fromkeys(options, "")), Direct(POOLS, **options)
    if change is not None:
        change(sides[1].side.engine.scheduler)
    about = sides[0].side.about()
    comparison = FlightComparison(base=about, head=about, pools=POOLS, num_requests=len(REQUESTS))
    run_steps(REQUESTS, Arrivals(POOLS.in_flight, 0), sides, comparison, until_first=False)  # type: ignore[arg-type]
    return comparison


def first_kinds(comparison: FlightComparison) -> list[str]:
    base, head = min(comparison.firsts.values(), key=lambda rows: rows[0]["step"])
    return differences(base, head)


@pytest.mark.parametrize("scheduling", ["asynchronous", "synchronous"])
def test_an_engine_does_not_differ_from_itself(scheduling: str) -> None:
    comparison = compared(scheduling=scheduling)
    if scheduling == "synchronous":
        assert comparison.num_equal == comparison.num_steps
    assert comparison.totals[0]["requests finished"] == len(REQUESTS)
    assert comparison.totals[0]["preemptions"] > 0
    assert comparison.totals[0]["device hit tokens"] > 0


def test_a_finish_one_step_late_is_a_difference_in_finish_or_memory() -> None:
    assert first_kinds(compared(scheduling="asynchronous"))[0] in ("finish", "memory")


def test_another_chunk_budget_is_a_difference_in_budget() -> None:
    assert "budget" in first_kinds(compared(settings="scheduler.chunk_tokens=448"))


def test_another_order_of_the_queue_is_a_difference_in_order() -> None:
    kinds = first_kinds(compared(settings="scheduler.order=shortest_remaining"))
    assert "order" in kinds
    assert "budget" not in kinds


def test_another_end_of_a_chunk_is_a_difference_in_chunks() -> None:
    def end_at_pages(scheduler: Scheduler) -> None:
        scheduler.prefill._chunk_end = (  # type: ignore[method-assign]
            lambda req, tokens: Prefill._chunk_end(scheduler.prefill, req, tokens)
        )

    kinds = first_kinds(compared(end_at_pages))
    assert "chunk" in kinds  # and other prompts start with the tokens that are left
    assert not {"budget", "hits"} & set(kinds)


def test_another_preempted_request_is_a_difference_in_retraction() -> None:
    class Backwards(int):
        def __add__(self, more: int) -> "Backwards":
            return Backwards(int(self) - more)

    def retract_the_first(scheduler: Scheduler) -> None:
        scheduler._num_starts = Backwards()  # type: ignore[attr-defined]

    comparison = compared(retract_the_first)
    assert first_kinds(comparison)[0] == "retraction"
    comment = to_markdown(comparison, "What differs?")
    base, head = comparison.firsts["retraction"]
    assert f"preempted {base['preempted']}" in comment
    assert f"preempted {head['preempted']}" in comment


def test_chunks_of_different_requests_are_not_compared() -> None:
    row: StepRow = {"extend": [[1, 0, 64]], "decode": [], "hit": {1: [0, 0]}, "free": 3}
    other = row | {"extend": [[2, 0, 32]], "hit": {2: [32, 0]}, "free": 4}
    assert differences(row, other) == ["order", "memory"]
    assert differences(row, row | {"hit": {1: [64, 0]}}) == ["hits"]
    assert differences(row, {key: row[key] for key in ("extend", "decode", "hit")}) == []


def test_the_order_in_which_requests_go_back_to_the_queue_is_no_difference() -> None:
    row: StepRow = {"extend": [], "decode": [], "hit": {}, "preempted": [5, 3]}
    assert differences(row, row | {"preempted": [3, 5]}) == []
    assert differences(row, row | {"preempted": [3]}) == ["retraction"]


def test_requests_arrive_until_a_random_number_is_in_flight() -> None:
    arrivals = Arrivals(8, 3)
    counts = [arrivals.count(0) for _ in range(50)]
    assert {4, 8} <= set(counts) <= set(range(4, 9))
    assert arrivals.count(8) == 0
    other = Arrivals(8, 4)
    assert counts != [other.count(0) for _ in range(50)]


def test_the_command_compares_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--engine", "vllm", "--base", "hicache", "--head", "hicache", "--in-flight", "4"]
    arguments += [
        "--workload",
        "builtin",
        "--requests",
        "6",
        "--setting",
        "scheduler.max_running=2",
    ]
    arguments += ["--pools", "device_tokens=65536,host_tokens=65536,max_len=16384"]
    monkeypatch.setattr(sys, "argv", ["diff", *arguments, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    found = json.loads((tmp_path / "diff.json").read_text())
    assert found["firsts"]["deferral"][1]["deferred"][0][1] == "running"
    assert 0 < found["equal_steps"] < found["steps"]
    assert "up to 4 requests in flight" in (tmp_path / "comment.md").read_text()

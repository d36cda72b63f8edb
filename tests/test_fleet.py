"""Replicas in several processes: equal to one process, refused where they depend on each other."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hicache import experiment, fleet
from hicache.engine.deployment import deploy
from hicache.results.metrics import Result, summarize
from hicache.results.requests_file import columns_of, read_requests, write_requests
from hicache.runs.schema import config_of
from hicache.workload import parts as parts_of_trace

FLEET = (
    "model=llama3_8b", "storage=none", "parallel.replicas=3", "workload.abort_share=0.2",
    "workload.patience_s=1", "cache.device_gib=16.5", "cache.host_gib=24",
)  # fmt: skip
CHAT = ("workload=chat", "workload.num_sessions=30", "workload.warm_up_s=20")
OPEN = "workload.arrivals=open"
OWN = f"cache.policy={__name__}:"


class Killed:
    """Ends its own process, as the system does for lack of memory."""

    def on_hit(self, entry: object, request: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledOnce(Killed):
    """Ends its process unless another one has done so."""

    def on_hit(self, entry: object, request: object) -> None:
        mark = Path(os.environ["FLEET_MARK"])
        if not mark.exists():
            mark.touch()
            super().on_hit(entry, request)


def results(result: Result) -> tuple[dict[str, float | int], dict[str, list[object]]]:
    return summarize(result.records, result.measures), columns_of(result.records)


def rows_of_sessions() -> Iterator[dict[str, object]]:
    """Sessions of three turns, interleaved; each turn repeats the blocks of the one before it."""
    for turn in range(3):
        for session in range(12):
            blocks = [0, *range(100 * session + 1, 100 * session + 5 + 4 * turn)]
            yield {
                "timestamp": 1000 * (12 * turn + session) + 500,
                "input_length": 512 * len(blocks) - 100,
                "output_length": 40,
                "hash_ids": blocks,
                "session_id": f"own {session}",
            }


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_sessions()))
    return path


@pytest.mark.parametrize("router", [(), ("parallel.router=round_robin", OPEN)])
@pytest.mark.parametrize("workers", [1, 2])
def test_results_equal_those_of_one_process(
    router: tuple[str, ...], workers: int, tmp_path: Path
) -> None:
    settings = (*FLEET, *CHAT, *router)
    whole = experiment.run(config_of(*settings))
    parts = fleet.run(config_of(*settings, f"parallel.workers={workers}"))
    assert results(parts) == results(whole)
    for result in (whole, parts):
        (tmp_path / str(id(result))).mkdir()
        write_requests(tmp_path / str(id(result)), result.records)
    tables = [read_requests(tmp_path / str(id(result))) for result in (whole, parts)]
    assert tables[0].equals(tables[1])


def test_replicas_without_requests_count_as_idle() -> None:
    settings = (*FLEET, *CHAT, "workload.limit=5", "workload.warm_up_s=0", "parallel.replicas=9")
    whole = experiment.run(config_of(*settings))
    assert results(fleet.run(config_of(*settings, "parallel.workers=1"))) == results(whole)


def test_a_large_trace_that_names_its_sessions_is_divided_line_by_line(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_of_trace, "LEAST_BYTES", 1)
    settings = (*FLEET, f"workload.path={trace}", "workload.block_tokens=512")
    whole = experiment.run(config_of(*settings))
    parts = fleet.run(config_of(*settings, "parallel.workers=1"))
    assert "divided line by line" in parts.notes[0]
    (summary, columns), (expected, wanted) = results(parts), results(whole)
    for absent in ("workload/distinct_tokens", "load/host_over_working_set"):
        del expected[absent]
    assert summary == expected
    assert summary["cache/token_hit_rate"] > 0.2
    assert columns == wanted


def test_a_small_trace_gives_all_results_of_one_process(trace: Path) -> None:
    settings = (*FLEET, f"workload.path={trace}", "workload.block_tokens=512")
    whole = experiment.run(config_of(*settings))
    assert results(fleet.run(config_of(*settings, "parallel.workers=1"))) == results(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": 0},  # earlier than the row before it
        {"timestamp": "2026-01-01"},
        {"session_id": None},
        {"parent": 3},
    ],
)
def test_an_indivisible_trace_is_loaded_as_a_whole(
    change: dict[str, object], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_of_trace, "LEAST_BYTES", 1)
    rows = list(rows_of_sessions())
    rows[20] |= change
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(*FLEET, f"workload.path={trace}", "workload.block_tokens=512")
    assert fleet.divide(config.workload, trace.parent, 3) is None


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("storage=memory", "storage=memory, which all replicas share"),
        ("parallel.router=scored", "a router that looks at the replicas"),
        ("parallel.router=round_robin", "waits for an answer of another replica"),
        ("workload.arrivals=closed", "answers of other sessions"),
        ("engine.explain=true", "engine.explain=true"),
        ("cache.policy=oracle", "which knows all requests"),
    ],
)
def test_replicas_that_depend_on_each_other_are_refused(setting: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fleet.run(config_of(*FLEET, *CHAT, "parallel.workers=2", setting))


def test_a_request_that_waits_for_another_replica_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(*FLEET, *CHAT, "parallel.workers=1")
    found = fleet.workload_of(config, deploy(config).cost, [])
    first = found.requests[0].id
    # as sub-agents do, each request continues one of another session
    requests = [
        replace(each, session_id=each.id, parent_id=None if each.id == first else first)
        for each in found.requests
    ]
    monkeypatch.setattr(fleet, "workload_of", lambda *_: replace(found, requests=requests))
    with pytest.raises(ValueError, match="waits for an answer of another replica"):
        fleet.run(config)


def test_a_killed_worker_ends_the_run_with_an_error() -> None:
    with pytest.raises(ValueError, match="a worker process was killed"):
        fleet.run(config_of(*FLEET, *CHAT, "parallel.workers=2", OWN + "Killed"))


def test_ray_gives_the_results_of_one_process_and_starts_killed_workers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("FLEET_MARK", str(tmp_path / "killed"))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    settings = (*FLEET, *CHAT, "parallel.workers=2")
    try:
        found = fleet.run(config_of(*settings, OWN + "KilledOnce"))
        assert (tmp_path / "killed").exists()
        with pytest.raises(ValueError, match="a worker process was killed"):
            fleet.run(config_of(*settings, OWN + "Killed"))
    finally:
        ray.shutdown()
    assert results(found) == results(experiment.run(config_of(*FLEET, *CHAT)))

"""When a simulated storage answers the queries of engines."""

from hicache import experiment
from hicache.clock import NEVER, SECOND_NS, SimulatedClock
from hicache.config import StorageConfig
from hicache.executor.simulated.executor import SimulatedExecutor, SimulatedIo
from hicache.executor.simulated.stores import EndlessStore
from hicache.runs.schema import config_of
from tests.validity import runs

# the model costs nothing

SECOND = SECOND_NS
RATES = {"to_device": 1e9, "to_host": 1e9, "host_memory": 1e9}


class Settled:
    """A prefetch whose request no longer waits for storage."""

    is_settled = True


def executors(io: SimulatedIo, count: int) -> list[SimulatedExecutor]:
    return [
        SimulatedExecutor(
            engine, None, io, page_size=16, page_bytes=(1, 0, 0), load_rate=1e9, slowdown=1.0
        )
        for engine in range(count)
    ]


def answered_ns(io: SimulatedIo) -> list[tuple[int, int]]:
    """Complete all queries in flight; return (engine, time in ns) of each answer."""
    answers = []
    while (moment := io.pass_by(0, SimulatedClock())) < NEVER:
        answers += [(engine, moment) for engine, _ in io.advance(moment)]
    return answers


def two_engines(query_s: float) -> SimulatedIo:
    config = StorageConfig(kind="memory", query_s=query_s)
    return SimulatedIo(config, [EndlessStore()], [RATES, RATES], seed=0)


def test_storage_queries_of_one_engine_run_one_after_another() -> None:
    io = two_engines(query_s=1.0)
    first, second = executors(io, 2)

    for executor in (first, first, second):
        executor.query(Settled(), 0)

    assert sorted(answered_ns(io)) == [(0, SECOND), (0, 2 * SECOND), (1, SECOND)]


def test_an_answer_of_storage_that_takes_no_time_is_delivered() -> None:
    io = two_engines(query_s=0.0)

    executors(io, 1)[0].query(Settled(), 5)

    assert answered_ns(io) == [(0, 5)]


def test_a_run_ends_when_storage_takes_no_time() -> None:
    config = config_of(
        "model=llama3_8b", "parallel.tp=4", "storage.query_s=0", "storage.operation_s=0"
    )

    result = experiment.run(config, workload=runs.strangers([0, 0], [1024, 1024], [2, 2]))

    assert [record.status.value for record in result.records] == ["finished", "finished"]

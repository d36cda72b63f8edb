"""What must hold for any trace file: it is read, or refused with a sentence that names the file."""

from pathlib import Path

from hicache.config import TraceConfig
from hicache.workload import workload
from hicache.workload.trace import Trace

FIXTURES = Path(__file__).parents[1] / "workload" / "fixtures"
SEEDS = [
    path
    for path in sorted(FIXTURES.rglob("*"))
    if path.is_file() and path.name not in ("README.md", "tokenizer.json")
]
# a reader takes at most this many blocks, runs or messages from earlier rows
MOST_REPEATED = 1 << 18


def read(path: Path) -> workload.Workload | None:
    """Return the requests of a trace file; None if it is refused.

    Raises:
        AssertionError: the refusal does not name the file, or the requests contradict each other.
    """
    config = TraceConfig(kind="trace", path=str(path), time_unit="ms")
    trace = Trace(path)
    try:
        form = workload.form_of(trace)
        found = workload.parsed(trace, form, config, seed=0)
    except ValueError as error:
        told = str(error)
        assert path.name in told or "token ids" in told, told
        assert len(told) < 5000, told
        return None
    ids = [request.id for request in found.requests]
    assert ids == list(range(len(ids)))
    arrivals = [request.arrival_ns for request in found.requests]
    assert arrivals == sorted(arrivals)
    for request in found.requests:
        assert request.parent_id is None or request.parent_id < request.id
        assert all(join < request.id for join in request.joins)
    return found

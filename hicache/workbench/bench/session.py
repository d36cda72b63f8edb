"""Results of a run of the bench; `experiments.gpu.claims` judges them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hicache.workbench.bench.measure import Bench, Timing, Transfer
from hicache.workbench.contract import CopyKernel
from hicache.workbench.own import OwnKernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The measured time of one launch.

    `num_bytes` counts the bytes written, and no bytes read. A copy within the device therefore
    moves twice as many bytes through the device's memory.
    """

    op: str
    case: str
    num_bytes: int
    timing: Timing
    parameters: dict[str, int | str] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.timing.p50_s / 1e9


class Session:
    def __init__(
        self,
        bench: Bench,
        kernels: Mapping[str, CopyKernel] | None = None,
        own: Mapping[str, OwnKernel] | None = None,
    ):
        self.bench = bench
        self.own = dict(own or {})  # kernels with their own oracle
        self.kernels = dict(kernels or {})  # the user's copy kernels
        self.records: list[Record] = []
        self.notes: dict[str, object] = {}
        self.cells: list[Record] = []  # of the contest
        self.failures: dict[str, str] = {}  # kernels that moved wrong bytes, or raised
        self.broken: dict[str, str] = {}  # cases that raised

    def time(
        self,
        op: str,
        case: str,
        launch: Callable[[], object],
        num_bytes: int,
        *,
        repeats: int | None = None,
        **parameters: int | str,
    ) -> float:
        timing = self.bench.timed(launch, repeats=repeats)
        record = Record(op=op, case=case, num_bytes=num_bytes, timing=timing, parameters=parameters)
        self.records.append(record)
        return record.gb_per_s

    def verified(
        self,
        op: str,
        case: str,
        transfer: Transfer,
        launch: Callable[[], object] | None = None,
    ) -> float:
        """Check that a launch moves the right bytes, then time it; return its bandwidth in GB/s.

        `launch` must move the items of `transfer`. None means our own copy kernel. `op` and `case`
        label the record of the measurement.
        """
        launch = launch or transfer.launch
        self.bench.verify(transfer, launch)
        return self.time(op, case, launch, transfer.num_bytes)

"""Results of a run of the bench: measurements and judged goals.

Goals are ratios to ceilings measured in the same run (`README.md` lists them, G1 to G10).
"""

import math
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A performance target for the kernels, with the measured value.

    `got` is NaN if nothing was measured.
    """

    goal: str
    what: str
    wanted: str
    got: float
    holds: bool | None  # None means not measured; `why` gives the reason
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The median time of one kernel for one transfer.

    If the kernel was not timed, `p50_s` is NaN and `remark` gives the reason.
    """

    direction: str  # device, to_device, to_host, states
    num_bytes: int
    kernel: str
    p50_s: float
    remark: str = ""

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.p50_s / 1e9


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
        self.goals: list[Goal] = []
        self.ceilings: dict[str, float] = {}  # GB/s arriving
        self.notes: dict[str, object] = {}
        self.cells: list[Cell] = []
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
        *,
        repeats: int | None = None,
        **parameters: int | str,
    ) -> float:
        """Check that a launch moves the right bytes, then time it; return its bandwidth in GB/s.

        `launch` must move the items of `transfer`. None means our own copy kernel. `op`, `case` and
        `parameters` label the record of the measurement.
        """
        launch = launch or transfer.launch
        self.bench.verify(transfer, launch)
        return self.time(op, case, launch, transfer.num_bytes, repeats=repeats, **parameters)

    def at_least(self, goal: str, what: str, got: float, wanted: float) -> None:
        self._judge(goal, what, f">= {wanted:g}", got, holds=got >= wanted)

    def at_most(self, goal: str, what: str, got: float, wanted: float) -> None:
        self._judge(goal, what, f"<= {wanted:g}", got, holds=got <= wanted)

    def unmeasured(self, goal: str, what: str, wanted: str, why: str) -> None:
        self.goals.append(
            Goal(goal=goal, what=what, wanted=wanted, got=math.nan, holds=None, why=why)
        )

    def _judge(self, goal: str, what: str, wanted: str, got: float, *, holds: bool) -> None:
        if math.isnan(got):
            self.unmeasured(goal, what, wanted, "not timed")
        else:
            self.goals.append(Goal(goal=goal, what=what, wanted=wanted, got=got, holds=holds))

"""Log of a real run, step by step and call by call, with durations.

On a shared machine, wall time includes the load of other processes. Inside `measured`, time is what
the engine's thread computes or waits. The time in which another process has the processor is
excluded, both in the log and on the run's own clock.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from hicache.clock import SECOND_NS
from hicache.executor.completions import StepRun
from hicache.executor.real.io import POLL_NS, TorchExecutor, TorchIo
from hicache.models import ModelConfig
from hicache.scheduler.batch import Batch


@dataclass(frozen=True, slots=True)
class Step:
    """The work and the duration of one forward pass.

    Attributes:
        extends: for each prefilling request, the first computed position of its prompt and the
            position after the last.
        context_lens: for each decoding request, the length of its context in tokens.
        num_saves: the number of Mamba states that were saved.
        seconds: the duration of the pass.
        between_s: how long the engine's thread worked between the previous pass and this one. Time
            in which it waited does not count.
    """

    extends: tuple[tuple[int, int], ...]
    context_lens: tuple[int, ...]
    num_saves: int
    seconds: float
    between_s: float


@dataclass(frozen=True, slots=True)
class Call:
    num_pages: int
    seconds: float


@dataclass(slots=True)
class Log:
    steps: list[Step] = field(default_factory=list)
    reads: list[Call] = field(default_factory=list)
    writes: list[Call] = field(default_factory=list)
    queries: list[Call] = field(default_factory=list)

    def add(self, other: "Log") -> None:
        self.steps += other.steps[2:]  # the first steps warm up caches
        self.reads += other.reads
        self.writes += other.writes
        self.queries += other.queries


def features(step: Step, model: ModelConfig, tile: int) -> NDArray[np.float64]:
    """Return the six quantities that determine the modelled duration of a forward pass.

    The modelled duration is a linear function of these quantities:

    - the constant 1;
    - tokens that pass through the dense layers, rounded up to tiles of `tile` tokens;
    - (query, key) pairs in the attention of prefilling requests, summed over all layers;
    - Mamba states that were updated by decoding or saved;
    - keys that decoding requests read, summed over all layers;
    - the number of prefilling requests.
    """
    tiles = sum(-(-end // tile) - start // tile for start, end in step.extends)
    # the head's matrix counts as its share of the dense parameters, for one token of a sequence
    tokens = (tiles + len(step.context_lens)) * tile
    sequences = len(step.extends) + len(step.context_lens)
    pairs = keys = 0
    for layers, window in (
        (model.num_full_layers, None),
        (model.num_swa_layers, model.window_len),
    ):
        pairs += layers * sum(
            _pairs(end, window) - _pairs(start, window) for start, end in step.extends
        )
        keys += layers * sum(min(each, window or each) for each in step.context_lens)
    states = len(step.context_lens) + step.num_saves
    head = model.head_params / model.dense_params
    return np.array(
        [1.0, tokens + head * sequences, pairs, states, keys, len(step.extends)], np.float64
    )


def _pairs(num_queries: int, window: int | None) -> int:
    if window is None or num_queries <= window:
        return num_queries * (num_queries + 1) // 2
    return window * (window + 1) // 2 + (num_queries - window) * window


class _Pause:
    def __init__(self, now_s: float) -> None:
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        self._began_s = now_s
        self._slept_s: float | None = None
        self.woke_s = now_s

    def sleep(self, now_s: float) -> None:
        if self._slept_s is None:
            self._slept_s = now_s

    def busy_s(self, now_s: float) -> float:
        slept_s = self.woke_s if self._slept_s is None else self._slept_s
        return slept_s - self._began_s + now_s - self.woke_s


@contextmanager
def measured() -> Iterator[Log]:
    """Context manager that logs the forward passes and storage calls of real runs.

    A real run executes a model instead of simulating it. Time in which other processes use the
    processor is excluded from the log and from the clock of the run.
    """
    log = Log()
    forward = TorchExecutor.forward
    pause = _Pause(time.thread_time())

    def timed_forward(self: TorchExecutor, batch: Batch, now_ns: int) -> StepRun:
        extends = tuple((each.start, each.end) for each in batch.extends)
        lens = tuple(job.kv_len + 1 for job in batch.decodes)
        saves = sum(len(each.saves) for each in batch.extends)
        started = time.thread_time()
        run = forward(self, batch, now_ns)
        ended = time.thread_time()
        log.steps.append(Step(extends, lens, saves, ended - started, pause.busy_s(started)))
        pause.begin(ended)
        return run

    def wait_until(self: TorchIo, time_ns: int) -> None:
        delay = time_ns - self.now()
        if delay <= 0:
            return
        pause.sleep(time.thread_time())
        if not self.is_idle:
            time.sleep(min(delay, POLL_NS) / SECOND_NS)
            delay = min(delay, POLL_NS)
        self._skipped += delay  # a sleep counts its requested duration, not the late wake-up
        pause.woke_s = time.thread_time()

    began: dict[int, int] = {}

    # storage threads read it too
    engine_clock = time.pthread_getcpuclockid(threading.get_ident())

    def now(self: TorchIo) -> int:
        # from the first look at it, which is when serving begins
        passed = time.clock_gettime_ns(engine_clock)
        return passed - began.setdefault(id(self), passed) + self._skipped

    patched = mock.patch.multiple(
        TorchIo,
        now=now,
        wait_until=wait_until,
        _load=_timed(TorchIo._load, log.reads, lambda arguments: arguments[2]),
        _store=_timed(TorchIo._store, log.writes, lambda arguments: arguments[2].keys),
        _on_all_ranks=_timed(TorchIo._on_all_ranks, log.queries, lambda arguments: arguments[1]),
    )
    with patched, mock.patch.object(TorchExecutor, "forward", timed_forward):
        yield log


def _timed(
    inside: Callable[..., Any],
    calls: list[Call],
    keys_of: Callable[[tuple[Any, ...]], Sequence[Any]],
) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        started = time.thread_time()
        result = inside(*arguments)
        if num_keys := len(keys_of(arguments)):
            calls.append(Call(num_keys, time.thread_time() - started))
        return result

    return timed

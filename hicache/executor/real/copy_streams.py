"""Streams that run copies beside the forward pass, and events that the forward pass waits for.

A stream runs its copies in order and returns an event for each. After `event.wait()`, the caller's
work runs after the copy. On CUDA this delays the caller's stream, not the caller's thread.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hicache.kernels.load import wait_for_layer

Action = Callable[[], None]
LAYER_POLL_S = 20e-6


class CopyEvent(Protocol):
    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Make the caller's next work start after the copy is complete.

        On a GPU the current CUDA stream waits, and the calling thread does not.
        """

    def wait_for_layer(self, landed: Tensor, layer: int, count: int) -> None:
        """Make work that the caller starts next wait until the copy has completed one layer.

        On a GPU the call returns at once, and the current stream waits. On a CPU the call blocks.
        `landed` is [layers, 2]: the first column is for the kernels alone, the second counts
        completed copies. The layer is complete when `landed[layer, 1]` reaches `count`.
        """

    def duration_ns(self) -> int: ...


class CopyStream(Protocol):
    def run(self, action: Action) -> CopyEvent: ...

    def close(self) -> None: ...


class _FutureEvent(NamedTuple):
    future: Future[int]

    def is_done(self) -> bool:
        if not self.future.done():
            return False
        self.future.result()  # raises the error of a failed copy
        return True

    def wait(self) -> None:
        self.future.result()

    def wait_for_layer(self, landed: Tensor, layer: int, count: int) -> None:
        while int(landed[layer, 1]) < count and not self.is_done():
            time.sleep(LAYER_POLL_S)

    def duration_ns(self) -> int:
        return self.future.result()


class ThreadStream:
    """Runs copies one after another in a thread, as a CUDA stream does on a GPU."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"stream-{name}")

    def run(self, action: Action) -> CopyEvent:
        return _FutureEvent(self._thread.submit(_timed, action))

    def close(self) -> None:
        self._thread.shutdown()


def _timed(action: Action) -> int:
    started = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - started


class _CudaEvent(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event
    device: torch.device

    def is_done(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.end)

    def wait_for_layer(self, landed: Tensor, layer: int, count: int) -> None:
        wait_for_layer(landed, layer, count)

    def duration_ns(self) -> int:
        return round(float(self.start.elapsed_time(self.end)) * 1e6)


def timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CudaStream:
    def __init__(self, device: torch.device, *, is_urgent: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            device, priority=-1 if is_urgent else 0
        )

    def run(self, action: Action) -> CopyEvent:
        """Queue a copy on this CUDA stream, behind the work queued on the current stream.

        The call returns at once. `action` launches the copy.
        """
        start, event = timed_event(), timed_event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            action()
            event.record(self._stream)
        return _CudaEvent(start, event, self._device)

    def close(self) -> None:
        self._stream.synchronize()

"""Where copies run beside the forward pass, and how others wait for them.

A lane runs what it is given in order. What it hands back is a ticket: `wait` makes whatever the
caller does next happen after the copy, which on CUDA holds up the caller's stream and not the
caller.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

Action = Callable[[], None]


class Ticket(Protocol):
    """A copy that was handed to a lane."""

    def is_done(self) -> bool:
        """Whether it is over."""
        ...

    def wait(self) -> None:
        """What the caller does next comes after it."""
        ...

    def duration_ns(self) -> int:
        """How long it took, once it is over."""
        ...


class Lane(Protocol):
    """Runs copies one after another."""

    def run(self, action: Action) -> Ticket:
        """Hand over a copy."""
        ...

    def close(self) -> None:
        """Finish what was handed over."""
        ...


class _FutureTicket:
    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def is_done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()  # a copy that failed fails whoever asks
        return True

    def wait(self) -> None:
        self._future.result()

    def duration_ns(self) -> int:
        return int(self._future.result())


class ThreadLane:
    """A thread that copies on the CPU while another computes."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"lane-{name}")

    def run(self, action: Action) -> Ticket:
        """Hand over a copy."""
        return _FutureTicket(self._thread.submit(_timed, action))

    def close(self) -> None:
        """Finish what was handed over."""
        self._thread.shutdown()


def _timed(action: Action) -> int:
    started = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - started


class _EventTicket:
    def __init__(
        self, start: torch.cuda.Event, event: torch.cuda.Event, device: torch.device
    ) -> None:
        self._start = start
        self._event = event
        self._device = device

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def duration_ns(self) -> int:
        return round(float(self._start.elapsed_time(self._event)) * 1e6)


def timed_event() -> torch.cuda.Event:
    """An event that knows when it happened."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class StreamLane:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device, *, is_urgent: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            device, priority=-1 if is_urgent else 0
        )

    def run(self, action: Action) -> Ticket:
        """Queue a copy on the stream; returns at once."""
        start, event = timed_event(), timed_event()
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            action()
            event.record(self._stream)
        return _EventTicket(start, event, self._device)

    def close(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()


class _LateTicket:
    def __init__(self, lane: "LateLane", number: int) -> None:
        self._lane = lane
        self._number = number

    def is_done(self) -> bool:
        return self._lane.num_run > self._number

    def wait(self) -> None:
        self._lane.run_until(self._number)

    def duration_ns(self) -> int:
        return 0  # whoever waits for it does it


class LateLane:
    """Runs nothing before somebody waits for it: the worst case for whoever forgets to wait."""

    def __init__(self) -> None:
        self._waiting: deque[Action] = deque()
        self.num_run = 0

    def run(self, action: Action) -> Ticket:
        """Put a copy off."""
        self._waiting.append(action)
        return _LateTicket(self, self.num_run + len(self._waiting) - 1)

    def run_until(self, number: int) -> None:
        """Run all up to and including copy `number`."""
        while self.num_run <= number:
            action = self._waiting.popleft()
            self.num_run += 1
            action()

    def close(self) -> None:
        """Run what is left."""
        self.run_until(self.num_run + len(self._waiting) - 1)


class _DoneTicket:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def duration_ns(self) -> int:
        return 0  # it was over before anyone could wait for it


class PromptLane:
    """Runs everything at once: the other extreme."""

    def run(self, action: Action) -> Ticket:
        """Copy now."""
        action()
        return _DoneTicket()

    def close(self) -> None:
        """Nothing is left."""

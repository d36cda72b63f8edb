"""Copy streams at both extremes, the same in every run."""

from collections import deque

from hicache.executor.real.copy_streams import Action


class PlacedStream:
    """Runs copies at once or, if `is_late`, not before somebody waits for them.

    The second is the worst case for whoever forgets to wait.
    """

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._waiting: deque[Action] = deque()
        self.num_run = 0

    def run(self, action: Action) -> "_PlacedEvent":
        self._waiting.append(action)
        number = self.num_run + len(self._waiting) - 1
        if not self._is_late:
            self.run_until(number)
        return _PlacedEvent(self, number)

    def run_until(self, number: int) -> None:
        """Run all up to and including copy `number`."""
        while self.num_run <= number:
            action = self._waiting.popleft()
            self.num_run += 1
            action()

    def close(self) -> None:
        self.run_until(self.num_run + len(self._waiting) - 1)


class _PlacedEvent:
    def __init__(self, stream: PlacedStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def is_done(self) -> bool:
        return self._stream.num_run > self._number

    def wait(self) -> None:
        self._stream.run_until(self._number)

    def duration_ns(self) -> int:
        return 0  # whoever waits for it does it

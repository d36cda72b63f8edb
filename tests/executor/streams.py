"""Copy streams that run copies at once or as late as allowed, the same in every run."""

from collections import deque
from functools import partial
from typing import NamedTuple

from torch import Tensor

from hicache.executor.real.copy_streams import Action
from hicache.kernels.load import Load, LoadTable, naive_load_items


class PlacedStream:
    """Runs copies at once or, if `is_late`, only when their event is waited for.

    Late copies are the worst case for code that forgets to wait.
    """

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._waiting: deque[Action] = deque()
        self.parts: deque[Action] = deque()  # of the last copy
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
            self.run_parts()
            action = self._waiting.popleft()
            self.num_run += 1
            action()

    def run_parts(self, layer: int = 0, landed: Tensor | None = None, count: int = 0) -> None:
        """Run parts of the last copy until `layer` has landed `count` times, or all parts."""
        while self.parts and (landed is None or int(landed[layer, 1]) < count):
            self.parts.popleft()()

    def load_items(
        self,
        table: LoadTable,
        load: Load,
        landed: Tensor,
        *,
        num_programs: int | None = None,
        layers_at_once: int,
    ) -> None:
        for first in range(0, table.num_layers, layers_at_once):
            layers = range(first, first + layers_at_once)
            part = partial(naive_load_items, table, load, landed, layers=layers)
            self.parts.append(part)
        if not self._is_late:
            self.run_parts()

    def close(self) -> None:
        self.run_until(self.num_run + len(self._waiting) - 1)
        self.run_parts()


class _PlacedEvent(NamedTuple):
    stream: PlacedStream
    number: int

    def is_done(self) -> bool:
        return self.stream.num_run > self.number and not self.stream.parts

    def wait(self) -> None:
        self.stream.run_until(self.number)
        self.stream.run_parts()

    def wait_for_layer(self, landed: Tensor, layer: int, count: int) -> None:
        self.stream.run_until(self.number)
        self.stream.run_parts(layer, landed, count)

    def duration_ns(self) -> int:
        return 0  # whoever waits for it does it

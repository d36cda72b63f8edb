"""A run of decode steps, which an engine commits several at a time."""

from collections.abc import Iterator

from hicache.cache.tiers.transfer import StorageWrite
from hicache.executor.completions import StepEnds


class DecodeRun:
    """The steps of one batch, from its forward until the engine has committed the last of them.

    A batch of decodes may hold many steps; a batch with prompts holds one. The engine changes only
    at step ends, so it may commit many steps at once: at the end of the run, at the first step end
    after an event (`cut`), or when a reader needs its state (`take`). The executor prices steps
    only up to the next event (`look_on`).

    Attributes:
        num_taken: steps that the engine has committed.
        num_priced: steps whose ends are known, up to the next event.
        end_ns: end of the last of these.
    """

    def __init__(self, ends: StepEnds, num_steps: int, now_ns: int) -> None:
        self.num_taken = 0
        self._ends = ends
        self._last = num_steps - 1
        self._price_to(min(ends.look(now_ns), self._last))
        self._written: list[tuple[int, StorageWrite]] = []  # (step in which it ended, write)

    @property
    def ends_ns(self) -> list[int]:
        self._ends.look(None)
        return self._ends.known[self.num_taken : self._last + 1]

    def cut(self, now_ns: int) -> bool:
        """End the run with the first step that ends at `now_ns` or later; True if this cuts it."""
        last, self._last = self._last, self._step_at(now_ns)
        self._price_to(self._last)
        return self._last != last

    def look_on(self, until_ns: int | None, deadline_ns: int | None) -> bool:
        """Price more steps, unless a deadline has passed by the end of those priced.

        Args:
            until_ns: time of the next event; None if there is none.
            deadline_ns: next prefetch deadline of a waiting request.

        Returns:
            False if there was no step to price, or a deadline has passed.
        """
        end_ns = self.end_ns
        if self._horizon == self._last or (deadline_ns is not None and deadline_ns <= end_ns):
            return False
        if until_ns is not None:
            until_ns = max(until_ns, end_ns + 1)  # an event at a step end cuts no run
        self._price_to(min(self._ends.look(until_ns), self._last))
        return True

    def note_write(self, write: StorageWrite, now_ns: int) -> None:
        self._written.append((self._step_at(now_ns), write))

    def take_before(self, now_ns: int) -> Iterator[tuple[int, int, StorageWrite | None]]:
        return self.take(self._step_at(now_ns))

    def take(self, end: int) -> Iterator[tuple[int, int, StorageWrite | None]]:
        """Commit the steps before number `end`.

        Yields:
            The number of steps, the end (ns) of the last, and the write that ended in it, if any.
        """
        while self._written and self._written[0][0] < end:
            step, write = self._written.pop(0)
            yield self._advance(step + 1), self._ends.known[step], write
        yield self._advance(end), self._ends.known[end - 1], None

    def _price_to(self, step: int) -> None:
        self._horizon = step
        self.num_priced, self.end_ns = step + 1, self._ends.known[step]

    def _advance(self, end: int) -> int:
        num_steps, self.num_taken = end - self.num_taken, end
        return num_steps

    def _step_at(self, now_ns: int) -> int:
        return self._ends.first_from(now_ns, self.num_taken, self._horizon)

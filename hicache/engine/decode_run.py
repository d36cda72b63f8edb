"""A run of decode steps, which an engine commits several at a time."""

from bisect import bisect_left
from collections.abc import Iterator

from hicache.cache.tiers.transfer import StorageWrite
from hicache.executor.completions import StepEnds


class DecodeRun:
    """Tracks the steps of one running batch, and which of them the engine has committed.

    To commit a step is to apply its results to the scheduler and the cache. A batch of decodes may
    have many steps; a batch with prompts has one. The engine may commit many steps at once if
    nothing else happens in between.

    Attributes:
        num_taken: number of steps that the engine has committed.
        num_priced: number of steps whose end times are known, from the first step on.
        end_ns: end time (ns) of the last step whose end time is known.
    """

    def __init__(self, ends: StepEnds, num_steps: int, now_ns: int) -> None:
        self.num_taken = 0
        self._ends = ends
        self._last = num_steps - 1
        self._price_to(ends.look(now_ns))
        self._written: list[tuple[int, StorageWrite]] = []  # (step in which it ended, write)

    def cut(self, now_ns: int) -> bool:
        """End this run of decode steps with the first step that ends at `now_ns` or later.

        Return True if this removes steps from the run.
        """
        last, self._last = self._last, self._step_at(now_ns)
        self._price_to(self._last)
        return self._last != last

    def look_on(self, until_ns: int, deadline_ns: int) -> bool:
        """Compute the end times of more decode steps, if they are needed.

        Args:
            until_ns: time of the next event, such as an arrival. Steps after this time are not
                needed yet.
            deadline_ns: next time at which a queued request stops waiting for storage.

        Returns:
            True if the end times of more steps are now known. False if all were known already, or
                if the deadline comes before the last known end time.
        """
        if self.num_priced > self._last or deadline_ns <= self.end_ns:
            return False
        # an event at a step end cuts no run
        self._price_to(self._ends.look(max(until_ns, self.end_ns + 1)))
        return True

    def note_write(self, write: StorageWrite, now_ns: int) -> None:
        self._written.append((self._step_at(now_ns), write))

    def take_before(self, now_ns: int) -> Iterator[tuple[int, int, StorageWrite | None]]:
        return self.take(self._step_at(now_ns))

    def take(self, end: int) -> Iterator[tuple[int, int, StorageWrite | None]]:
        """Yield, in groups, the steps before number `end`, for the engine to apply their results.

        Yields:
            The number of steps in the group, the end of its last step in ns, and the storage write
                that finished during the last step. The write is None if there was none.
        """
        while self._written and self._written[0][0] < end:
            step, write = self._written.pop(0)
            yield self._advance(step + 1), self._ends.known[step], write
        yield self._advance(end), self._ends.known[end - 1], None

    def last_ends(self, num_steps: int) -> list[int]:
        """Return the end times (ns) of the last `num_steps` steps that were taken."""
        return self._ends.known[self.num_taken - num_steps : self.num_taken]

    def _price_to(self, step: int) -> None:
        step = min(step, self._last)
        self.num_priced, self.end_ns = step + 1, self._ends.known[step]

    def _advance(self, end: int) -> int:
        num_steps, self.num_taken = end - self.num_taken, end
        return num_steps

    def _step_at(self, now_ns: int) -> int:
        return bisect_left(self._ends.known, now_ns, self.num_taken, self.num_priced - 1)

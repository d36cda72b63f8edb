"""Where a prompt's recurrent states are kept, and the slots they are captured into."""

from hicache.cache.match import MatchResult
from hicache.cache.pages import PageIds
from hicache.cache.prefix_cache import PrefixCache
from hicache.config import CheckpointPlacement
from hicache.scheduler.job import Job


class Checkpoints:
    """Places checkpoints at page boundaries of prompts; without states there are none."""

    def __init__(
        self, cache: PrefixCache, placement: CheckpointPlacement, grid_tokens: int
    ) -> None:
        """`grid_tokens`: the distance of checkpoints of `CheckpointPlacement.every`."""
        self._cache = cache
        self._placement = placement
        self._grid_tokens = grid_tokens

    def lengths(self, job: Job, match: MatchResult) -> list[int]:
        """Prompt lengths at which a state is to be captured while the job extends, ascending."""
        if not self._cache.tree.has_states:
            return []
        last = self._last(job)
        lengths = {last}
        if self._placement is not CheckpointPlacement.end and match.branch_len is not None:
            lengths.add(match.branch_len)
        if self._placement is CheckpointPlacement.every:
            grid = self._grid_tokens
            lengths.update(range(job.kv_len // grid * grid + grid, last, grid))
        return sorted(length for length in lengths if job.kv_len < length <= last)

    def slots(self, job: Job, end: int) -> list[tuple[int, PageIds]]:
        """A slot for each of the job's lengths up to `end`; those without one are counted."""
        saves = []
        for length in job.saves:
            if not job.kv_len < length <= end:
                continue
            if length == self._last(job):
                slot, job.sequence.boundary_slot = job.sequence.boundary_slot, None
            else:
                slot = self._cache.take_state_slot()
            if slot is None:
                self._cache.counters["scheduler/missed_checkpoint_count"] += 1
                continue
            saves.append((length, slot))
        return saves

    def _last(self, job: Job) -> int:
        page = self._cache.page_size
        return job.target_len // page * page

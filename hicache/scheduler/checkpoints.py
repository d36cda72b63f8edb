"""Checkpoints: the prompt lengths at which states and windows are kept, and the slots of states."""

from collections.abc import Callable
from dataclasses import dataclass

from hicache.cache.pages import PageIds
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.node import MatchResult
from hicache.scheduler.batch import Extend
from hicache.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Placement:
    """Decides at which lengths of a prompt its Mamba states and sliding windows are kept.

    Attributes:
        checkpoints: (kind, start, end, branch): prompt lengths in tokens at which a window or state
            is kept, in any order. They are rounded down to pages; those outside (start, end] are
            dropped. `start`: tokens that need not be computed. `end`: the last page boundary.
            `branch`: where the prompt leaves an edge that has no state or window there, or None.
            The scheduler asks when it admits a request. Example: `return [end]`.
        in_chunk: (placed, end): the lengths kept in a chunk that ends at `end`, of which
            `checkpoints` placed those in `placed`; None keeps just those. The prompt's last chunk
            is not asked about unless it ends at a page boundary.
        publishes_end: whether a chunk enters the tree up to its end where nothing is kept there.
    """

    checkpoints: Callable[[str, int, int, int | None], list[int]]
    in_chunk: Callable[[list[int], int], list[int]] | None = None
    publishes_end: bool = True


class CheckpointSaver:
    def __init__(
        self, cache: PrefixCache, placement: Placement, *, takes_spare: bool = False
    ) -> None:
        # `takes_spare`: states are saved in the request's own spare slot, and not in a new one
        self._takes_spare = takes_spare
        self._cache = cache
        self._placement = placement
        self._kinds = kinds = cache.tree.kinds
        self._page = cache.page_size
        # a model with states saves windows where it saves states
        self._kind = kinds.names[next(iter((*kinds.points, *kinds.window_lens)), 0)]

    def place(self, req: RequestState, match: MatchResult) -> None:
        """Ask the policy at which lengths of its prompt a request keeps a state or window."""
        req.branch_len, req.placed = match.branch_len, []
        if self._kinds.aux:
            last = self._end(req)
            placed = self._placement.checkpoints(self._kind, req.kv_len, last, match.branch_len)
            req.placed = sorted({self._floor(length) for length in placed})

    def chunk(self, req: RequestState, end: int) -> Extend:
        """Return the next chunk of a request's prompt, which ends before token `end`.

        The chunk takes a slot for each state that it saves. It is published up to each length at
        which a state or window is kept, and up to its end.
        """
        last, placement, has_states = self._whole(end), self._placement, bool(self._kinds.points)
        if self._takes_spare and has_states:  # whole pages from where the chunk begins
            end_state = req.kv_len + self._floor(end - req.kv_len)
            last = self._floor(end_state)
        else:
            end_state = end
        if not self._kinds.aux:
            # a retracted request computes its answer again, which is not backed up with its prompt;
            # in SGLang's order (`takes_spare`) it gets a node of its own
            prompt_len = req.request.prompt_len
            is_apart = self._takes_spare or not self._cache.rules.backs_up_answers
            is_split = req.kv_len < prompt_len < end and is_apart
            return Extend(req, req.kv_len, end, [], [(prompt_len, True)] * is_split + [(end, True)])
        kept = [length for length in req.placed if req.kv_len < length <= last]
        if placement.in_chunk is not None and req.kv_len < last:
            kept = placement.in_chunk(kept, last)
        ends = [(length + self._cache.tree.overlap, True) for length in kept]
        if kept and kept[-1] == last:
            if last != req.branch_len and (self._takes_spare or not has_states):
                ends[-1] = end_state, True  # so that the window is that before the last token
        elif placement.publishes_end or not (kept or has_states):
            ends.append((end, placement.in_chunk is not None or last in req.placed))
        saves = self._saves(req, kept) if has_states else []
        return Extend(req, req.kv_len, end, saves, ends)

    def _saves(self, req: RequestState, kept: list[int]) -> list[tuple[int, PageIds]]:
        saves = []
        for length in kept:
            if self._takes_spare:
                slot, req.sequence.spare_slots = req.sequence.spare_slots or None, []
            else:
                slot = self._cache.take_state_slot(req.sequence)
            if slot is None and length == self._end(req):
                slot, req.sequence.boundary_slot = req.sequence.boundary_slot or None, None
            if slot is None:
                self._cache.counters["scheduler/missed_checkpoint_count"] += 1
                continue
            saves.append((length, slot))
        return saves

    def _end(self, req: RequestState) -> int:
        length = req.target_len
        if self._cache.rules.keeps_for_repeats:  # an answer that is computed again does not count
            length = req.request.prompt_len
        return self._cache.tree.repeat_end(length) * self._page

    def _whole(self, length: int) -> int:
        return self._cache.tree.num_pages(length) * self._page

    def _floor(self, length: int) -> int:
        return length // self._page * self._page

"""Checkpoints: the prompt lengths at which states and windows are kept, and the slots of states."""

from hicache.cache.pages import PageIds
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.node import MatchResult
from hicache.scheduler.request_state import RequestState


class CheckpointSaver:
    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._policy = cache.tree.policy
        kinds = cache.tree.kinds
        # a model with states saves windows where it saves states
        self._kind = kinds.names[next(iter((*kinds.points, *kinds.window_lens)), 0)]

    def place(self, req: RequestState, match: MatchResult) -> None:
        kinds, end, last = self._cache.tree.kinds, req.target_len, self._last(req)
        placed = self._lengths(req, match) if kinds.aux else []
        if kinds.points:
            req.saves, req.boundaries = placed, list(placed)
            return
        req.saves = []
        req.boundaries = [end if length == last else length for length in placed] or [end]

    def _lengths(self, req: RequestState, match: MatchResult) -> list[int]:
        # ascending, and only at pages that the request computes
        page, last = self._cache.page_size, self._last(req)
        placed = self._policy.checkpoints(self._kind, req.kv_len, last, match.branch_len)
        lengths = {length // page * page for length in placed}
        return sorted(length for length in lengths if req.kv_len < length <= last)

    def slots(self, req: RequestState, end: int) -> list[tuple[int, PageIds]]:
        saves = []
        for length in req.saves:
            if not req.kv_len < length <= end:
                continue
            if length == self._last(req):
                slot, req.sequence.boundary_slot = req.sequence.boundary_slot, None
            else:
                slot = self._cache.take_state_slot(req.sequence)
            if slot is None:
                self._cache.counters["scheduler/missed_checkpoint_count"] += 1
                continue
            saves.append((length, slot))
        return saves

    def _last(self, req: RequestState) -> int:
        return req.target_len // self._cache.page_size * self._cache.page_size

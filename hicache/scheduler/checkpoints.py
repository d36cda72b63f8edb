"""Checkpoints: where a prompt's states and windows are kept, and the slots of captured states."""

from collections.abc import Callable

from hicache.cache.pages import PageIds
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.node import MatchResult
from hicache.policies.world import World
from hicache.scheduler.request_state import RequestState


class End:
    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        return [end]


class EndBranch:
    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        return [end] if branch is None else [branch, end]


class BranchOrEnd:
    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        return [end if branch is None else branch]


class Every:
    def __init__(self, world: World) -> None:
        self._grid_tokens = world.config.cache.checkpoint_tokens

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        grid = self._grid_tokens
        ends = [end] if branch is None else [branch, end]
        return [*range(start // grid * grid + grid, end, grid), *ends]


PLACEMENTS: dict[str, Callable[..., object]] = {
    "end": End,
    "end_branch": EndBranch,
    "branch_or_end": BranchOrEnd,
    "every": Every,
}


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

"""Placements: at which lengths of a prompt its Mamba states and sliding windows are kept."""

from collections.abc import Callable

from hicache.policies.world import World


class End:
    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        return [end]


class EndBranch:
    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        return [end] if branch is None else [branch, end]


class ChunkBranch(EndBranch):
    def in_chunk(self, placed: list[int], end: int) -> list[int]:
        return placed if end in placed else [*placed, end]


class BranchOrEnd:
    publishes_end = False

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        return [end if branch is None else branch]

    def in_chunk(self, placed: list[int], end: int) -> list[int]:
        return placed or [end]


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
    "chunk_branch": ChunkBranch,
    "branch_or_end": BranchOrEnd,
    "every": Every,
}

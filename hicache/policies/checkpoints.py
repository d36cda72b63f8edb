"""Placements: at which lengths of a prompt its Mamba states and sliding windows are kept."""

from collections.abc import Callable

from hicache.policies.world import World
from hicache.scheduler.checkpoints import Placement


def _end(kind: str, start: int, end: int, branch: int | None) -> list[int]:
    return [end]


def _end_branch(kind: str, start: int, end: int, branch: int | None) -> list[int]:
    return [end] if branch is None else [branch, end]


def _branch_or_end(kind: str, start: int, end: int, branch: int | None) -> list[int]:
    return [end if branch is None else branch]


def _every(world: World) -> Placement:
    grid = world.config.cache.checkpoint_tokens

    def checkpoints(kind: str, start: int, end: int, branch: int | None) -> list[int]:
        ends = _end_branch(kind, start, end, branch)
        return [*range(start // grid * grid + grid, end, grid), *ends]

    return Placement(checkpoints)


def _also_chunk_end(placed: list[int], end: int) -> list[int]:
    return placed if end in placed else [*placed, end]


def _else_chunk_end(placed: list[int], end: int) -> list[int]:
    return placed or [end]


PLACEMENTS: dict[str, Callable[[World], Placement]] = {
    "end": lambda world: Placement(_end),
    "end_branch": lambda world: Placement(_end_branch),
    "chunk_branch": lambda world: Placement(_end_branch, _also_chunk_end),
    "branch_or_end": lambda world: Placement(_branch_or_end, _else_chunk_end, publishes_end=False),
    "every": _every,
}

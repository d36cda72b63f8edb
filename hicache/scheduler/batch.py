"""What one step computes, and which requests ended in it."""

from dataclasses import dataclass, field
from typing import Final

from hicache.cache.pages import PageIds
from hicache.cache.tiers.transfer import LoadBack
from hicache.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Extend:
    """Tokens `[start, end)` of a request, and the states to capture on the way: (length, slot)."""

    req: RequestState
    start: int
    end: int
    saves: list[tuple[int, PageIds]]


@dataclass(slots=True, kw_only=True)
class Batch:
    """What one step computes. `num_steps` > 1 only without extends."""

    extends: list[Extend] = field(default_factory=list)
    decodes: list[RequestState] = field(default_factory=list)
    load_backs: list[LoadBack] = field(default_factory=list)
    num_steps: int = 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Jobs that ended in a step or before it, and why those that were rejected were."""

    finished: list[RequestState] = field(default_factory=list)
    rejected: list[tuple[RequestState, str]] = field(default_factory=list)
    aborted: list[RequestState] = field(default_factory=list)


NOTHING: Final = Outcome()  # what is said where none ended; not to be added to

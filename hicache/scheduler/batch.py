"""What one step computes, and which requests have ended."""

from dataclasses import dataclass, field
from typing import Final

from hicache.cache.pages import PageIds
from hicache.cache.tiers.transfer import LoadBack
from hicache.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Extend:
    """Tokens `[start, end)` of a request, and the (length, slot) of each state to capture."""

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
    """Requests that have ended; rejected ones with the reason."""

    finished: list[RequestState] = field(default_factory=list)
    rejected: list[tuple[RequestState, str]] = field(default_factory=list)
    aborted: list[RequestState] = field(default_factory=list)


NOTHING: Final = Outcome()  # shared result of a step in which no request ended; must not be changed

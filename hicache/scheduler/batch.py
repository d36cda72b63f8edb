"""What one step computes, and which requests have ended."""

from dataclasses import dataclass, field
from typing import Final

from hicache.cache.pages import PageIds
from hicache.cache.tiers.transfer import LoadBack
from hicache.scheduler.request_state import RequestState


@dataclass(slots=True)
class Extend:
    """A chunk of one request to compute: its tokens from `start` to just before `end`.

    `saves` lists the Mamba states to save while the chunk is computed. Each is a pair: the prefix
    length in tokens, and the state slot that receives the state. `published` lists the lengths up
    to which the prompt enters the radix tree once the chunk is computed, ascending. Each has a
    flag: True if the tree also takes the sliding window before that length.
    """

    req: RequestState
    start: int
    end: int
    saves: list[tuple[int, PageIds]]
    published: list[tuple[int, bool]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Batch:
    """What the executor computes next: prompt chunks, decodes, and loads of KV from host to device.

    A batch is one step, or several if it only decodes: `num_steps` consecutive decode steps.
    """

    extends: list[Extend] = field(default_factory=list)
    decodes: list[RequestState] = field(default_factory=list)
    load_backs: list[LoadBack] = field(default_factory=list)
    num_steps: int = 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The requests that ended: finished, rejected with the reason, or aborted by the client."""

    finished: list[RequestState] = field(default_factory=list)
    rejected: list[tuple[RequestState, str]] = field(default_factory=list)
    aborted: list[RequestState] = field(default_factory=list)


NOTHING: Final = Outcome()  # shared result of a step in which no request ended; must not be changed

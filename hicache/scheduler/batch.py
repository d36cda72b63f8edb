"""What one step computes, and which requests have ended."""

from dataclasses import dataclass, field
from typing import Final

from hicache.cache.pages import PageIds
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import LoadBack
from hicache.scheduler.events import Listener
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

    @property
    def is_last(self) -> bool:
        return self.end == self.req.target_len


@dataclass(slots=True, kw_only=True)
class Batch:
    """What the executor computes next: prompt chunks, decodes, and loads of KV from host to device.

    A batch is one step, or several if it only decodes: `num_steps` consecutive decode steps.
    `number` tells batches apart that an engine has in flight at the same time.
    """

    extends: list[Extend] = field(default_factory=list)
    decodes: list[RequestState] = field(default_factory=list)
    load_backs: list[LoadBack] = field(default_factory=list)
    num_steps: int = 1
    number: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The requests that ended: finished, rejected with the reason, or aborted by the client."""

    finished: list[RequestState] = field(default_factory=list)
    rejected: list[tuple[RequestState, str]] = field(default_factory=list)
    aborted: list[RequestState] = field(default_factory=list)


NOTHING: Final = Outcome()  # shared result of a step in which no request ended; must not be changed


class Ended:
    """Collects the requests that end, and reports each to the eviction policy and the listener."""

    def __init__(self, cache: PrefixCache, listener: Listener | None) -> None:
        self.outcome = Outcome()
        self._entries = cache.tree.entries
        self._counters = cache.counters
        self._listener = listener

    def finish(self, req: RequestState) -> None:
        self._report(req, "finished")
        self.outcome.finished.append(req)

    def reject(self, req: RequestState, reason: str) -> None:
        self._cancel(req, "rejected")
        self.outcome.rejected.append((req, reason))

    def abort(self, req: RequestState) -> None:
        self._cancel(req, "aborted")
        self.outcome.aborted.append(req)

    def take(self) -> Outcome:
        outcome = self.outcome
        if not (outcome.finished or outcome.rejected or outcome.aborted):
            return NOTHING
        self.outcome = Outcome()
        return outcome

    def _cancel(self, req: RequestState, how: str) -> None:
        if self._listener is not None:
            self._listener.canceled(req)
        self._report(req, how)

    def _report(self, req: RequestState, how: str) -> None:
        if req.num_verified:
            self._counters["speculation/verified_count"] += req.num_verified
            self._counters["speculation/gained_tokens"] += req.num_gained
        if self._entries is not None:
            self._entries.finished(req.request, how)

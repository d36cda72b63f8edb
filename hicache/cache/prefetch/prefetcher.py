"""Prefetch from storage to host: how much is read, when it may stop, and who owns the pages.

A prefetch starts when its request is queued. The scheduler checks the prefetch each time it
considers the request. The reader owns the host pages until it has finished. If the request stops
waiting, the pages read so far pass to the cache at once. The other pages are freed when the reader
has finished.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hicache.cache.kinds import FULL
from hicache.cache.pages import NO_PAGES
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.cache.prefetch.rates import RateEstimator, ReadLoad
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.events import Demand, Purpose
from hicache.cache.tree.lookup import full_on_host
from hicache.cache.tree.node import HOST, MatchResult
from hicache.cache.tree.sequence import Sequence
from hicache.clock import NEVER
from hicache.config import CommitPolicy, CutPolicy, PrefetchConfig, StageAt
from hicache.request import Request


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """Decides how much a prefetch reads from storage, and how long its request waits.

    Attributes:
        may_stop: (prefetch, now_ns): True to run the request with the pages read so far. The
            scheduler asks each time it considers the request. Example: `return
            prefetch.is_complete`.
        waits: False if no request ever waits; `may_stop` is then not called.
        deadline_ns: (prefetch): the time in ns at which `may_stop` changes its answer by itself;
            None means never.
        prefetch: (request, held, restorable, load): how many tokens to read after the first `held`
            ones, which the cache holds. The cache asks when storage has answered: a prompt can be
            restored up to each of the `restorable` numbers of tokens after those, ascending; the
            longest that is not above the result is read. None reads the longest. `load` has the
            measured rates. Example: `return min(restorable[-1], 8192)`.
    """

    may_stop: Callable[[Prefetch, int], bool]
    waits: bool = True
    deadline_ns: Callable[[Prefetch], int | None] | None = None
    prefetch: Callable[[Request | None, int, list[int], ReadLoad], int | None] | None = None


class Prefetcher:
    """Starts, watches and ends the reads of cached pages from storage to host in one engine.

    Each read serves one queued request, by the decisions of `policy`. `host_tokens` is the size of
    the host tier in tokens; None means unlimited. `rates` estimates how long reads take.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: PrefetchConfig,
        policy: ReadPolicy,
        host_tokens: int | None,
        rates: RateEstimator,
    ) -> None:
        self.cache = cache
        self.config = config
        self.occupied_tokens = 0
        self.rates = rates
        self.active = self.rates.active
        self.declined: str | None = None  # reason why the last request got no prefetch
        self.outbox: list[Prefetch] = []  # to be queried
        self.reads: list[Prefetch] = []  # to be read
        self.lingering: set[Prefetch] = set()  # stopped, but the reader has not finished
        self.counters: Counter[str] = cache.counters
        # with several ranks: by request, True if all ranks agreed that its prefetch may stop
        self.verdicts: dict[int, bool] | None = None
        self.policy = policy
        self._page = cache.page_size
        self._pools = cache.pools[HOST]
        self._host_tokens = host_tokens
        self._occupied_limit = None if host_tokens is None else config.occupied_share * host_tokens

    # -- starting ------------------------------------------------------------------------------

    def prefetch_from_storage(
        self, request_id: int, sequence: Sequence, match: MatchResult, prompt_len: int, now_ns: int
    ) -> Prefetch | None:
        page, tree = self._page, self.cache.tree
        self.declined = None
        anchor = match.best_node
        if self.cache.rules.anchors_full:
            anchor = full_on_host(tree, anchor, sequence.tokens, match.full_len // page)
        start = anchor.end
        asked = tree.num_pages(prompt_len - 1) - start
        if asked * page - match.dropped_len < self.config.threshold:
            self._decline("too_short", asked)
            return None
        if self._occupied_limit is not None and self.occupied_tokens >= self._occupied_limit:
            self._decline("rate_limited" if self._host_tokens else "no_host", asked)
            return None
        if not anchor.is_root and anchor.held[HOST][FULL] is None:
            self._decline("anchor_not_on_host", asked)
            return None
        drops_short = not self.cache.rules.short_windows and not anchor.is_root
        prefetch = Prefetch(
            request_id=request_id,
            sequence=sequence,
            anchor=anchor,
            anchor_lock=tree.lock_anchor(anchor),
            start_page=start,
            asked_pages=asked,
            num_pages=asked,
            names=[],
            enqueued_ns=now_ns,
            needs=tuple(
                (kind, window)
                for kind, window in tree.kinds.extents
                if window.first(start + asked) >= start or not drops_short
            ),
            staged=[NO_PAGES] * tree.kinds.size,
            keeps_part=self.config.commit is CommitPolicy.usable,
        )
        if self.config.stage_at is StageAt.enqueue and not self._stage(prefetch):
            self.declined = "no_room"
            tree.release(prefetch.anchor_lock)
            return None
        prefetch.names = tree.names.of_span(anchor, sequence, prefetch.num_pages)
        self.occupied_tokens += asked * page
        self.active[request_id] = prefetch
        self.outbox.append(prefetch)
        self.counters["prefetch/started_count"] += 1
        return prefetch

    # -- while it runs -------------------------------------------------------------------------

    def on_queried(self, prefetch: Prefetch, now_ns: int = 0) -> None:
        if prefetch.is_settled:
            return
        prefetch.answered_ns = now_ns
        lengths = prefetch.restorable or []
        listener = self.cache.tree.listener
        if listener is not None and lengths and prefetch.source is None:
            listener.found(prefetch.sequence, prefetch.start_page, lengths, prefetch.needs)
        hit = self._amount(prefetch, lengths)
        if hit * self._page < self.config.threshold:
            self._revoke(prefetch, "miss")
            return
        prefetch.num_pages = hit
        if prefetch.is_staged:
            self._give_back(prefetch, hit)
        elif not self._stage(prefetch):
            self._revoke(prefetch, "no_room")
            return
        prefetch.phase = Phase.reading
        self.reads.append(prefetch)

    def can_terminate_prefetch(self, prefetch: Prefetch, now_ns: int) -> bool:
        """Return True if the stop policy lets the request run without the rest of its prefetch.

        A prefetch may have read all its pages, but not yet its sliding window or Mamba state. The
        request then goes on waiting, unless the policy never waits or the setting `await_sidecars`
        is off. `now_ns` is the current time in nanoseconds.
        """
        if not self.policy.waits:
            return True
        return self.policy.may_stop(prefetch, now_ns) and not self._awaits_sidecars(prefetch)

    def is_blocking(self, request_id: int, now_ns: int) -> bool:
        prefetch = self.active.get(request_id)
        if prefetch is None or prefetch.is_settled:
            return False
        return not self._lets_go(prefetch, now_ns)

    def next_deadline_ns(self, request_ids: Iterable[int], now_ns: int) -> int:
        """Return when the next prefetch of these waiting requests exceeds its deadline, in ns.

        Deadlines before `now_ns` do not count. Return `NEVER` if no deadline is left.
        """
        earliest = NEVER
        if self.policy.deadline_ns is not None:
            waited_for = [self.active[request_id] for request_id in request_ids]
            for prefetch in waited_for:
                deadline = None if prefetch.is_settled else self.policy.deadline_ns(prefetch)
                if deadline is not None and now_ns <= deadline < earliest:
                    earliest = deadline + 1  # the first moment after it
        return earliest

    def check(self, request_id: int, now_ns: int) -> bool:
        """Return True if a request need not wait any longer for its prefetch from storage.

        The call stops the prefetch if the stop policy allows it. With sliding windows or Mamba
        states, the part that was read is useless without the window and state at its end. The
        request then waits until the window and state are read as well. `now_ns` is the current time
        in nanoseconds.
        """
        prefetch = self.active.get(request_id)
        if prefetch is None or prefetch.is_settled:
            return True
        if prefetch.first_poll_ns is None:
            prefetch.first_poll_ns = now_ns
        if not self._lets_go(prefetch, now_ns) or self._shorten(prefetch):
            return False
        self._terminate(prefetch)
        return True

    def on_read(self, prefetch: Prefetch) -> None:
        assert prefetch.is_read
        self.rates.was_read(prefetch)
        if prefetch.phase is Phase.stopped:
            self.lingering.discard(prefetch)
            self._end(prefetch, "unread")
        else:
            self._publish(prefetch)
            self._end(prefetch, "unread" if prefetch.was_stopped else "short")

    def abort(self, request_id: int) -> None:
        prefetch = self.active.get(request_id)
        if prefetch is not None and not prefetch.is_settled:
            self.counters["prefetch/aborted_count"] += 1
            self._settle(prefetch)
            if prefetch.phase is Phase.asking:
                self._end(prefetch, "aborted")
            else:
                self._stop(prefetch)
        self.forget(request_id)

    def forget(self, request_id: int) -> None:
        self.active.pop(request_id, None)

    # -- inside --------------------------------------------------------------------------------

    def _lets_go(self, prefetch: Prefetch, now_ns: int) -> bool:
        if self.verdicts is None or not self.policy.waits:
            return self.can_terminate_prefetch(prefetch, now_ns)
        # the votes precede the latest events, which all ranks know by now
        may_stop = self.verdicts.get(prefetch.request_id, False)
        return may_stop and not self._awaits_sidecars(prefetch)

    def _awaits_sidecars(self, prefetch: Prefetch) -> bool:
        is_awaited = prefetch.has_sidecars and not prefetch.is_read
        is_ending = prefetch.is_complete or prefetch.stop_pages is not None
        return self.config.await_sidecars and is_awaited and is_ending

    def _shorten(self, prefetch: Prefetch) -> bool:
        # let the reader finish with the window and state of the part that it has read
        awaits = self.policy.waits and self.config.await_sidecars and prefetch.has_sidecars
        if not awaits or prefetch.phase is not Phase.reading or prefetch.is_read:
            return False
        usable = prefetch.usable_pages(prefetch.completed_pages)
        if not usable:
            return False
        prefetch.stop_pages = usable
        self._count_stop(prefetch)
        return True

    def _amount(self, prefetch: Prefetch, lengths: list[int]) -> int:
        # number of pages to read: the longest restorable prefix that the policy allows
        if self.policy.prefetch is not None and lengths:
            page, request = self._page, prefetch.sequence.request
            held, restorable = prefetch.start_page * page, [each * page for each in lengths]
            load = self.rates.read_load(page)
            wanted = self.policy.prefetch(request, held, restorable, load)
            if wanted is not None:
                lengths = [each for each in lengths if each * page <= wanted]
        return lengths[-1] if lengths else 0

    def _decline(self, reason: str, num_pages: int) -> None:
        self.declined = f"declined_{reason}"
        self.counters["prefetch/declined_count"] += 1
        self.counters[f"prefetch/declined_{reason}_tokens"] += num_pages * self._page

    def _stage(self, prefetch: Prefetch) -> bool:
        # allocate host pages, all of them or none; `config.cut` may shorten the prefetch to what
        # fits
        demand = Demand(Purpose.prefetch, prefetch.request_id)
        host, pools, config = self.cache.host, self._pools, self.config
        wanted = prefetch.num_pages
        host.make_room(FULL, wanted, demand)
        full = pools[FULL].allocate(wanted)
        if full is None and config.cut is not CutPolicy.abandon:
            fits = self.cache.available_size(FULL, HOST) // self._page
            if config.cut is CutPolicy.restorable and prefetch.restorable is not None:
                fits = max((each for each in prefetch.restorable if each <= fits), default=0)
            if fits * self._page >= config.threshold:
                full = pools[FULL].allocate(fits)
        if full is None:
            return self._give_up("host_room", wanted)
        prefetch.staged[FULL] = full
        for kind, window in prefetch.needs:
            count = min(window.num_pages, len(full))  # a shorter prefix may need more of a chunk
            host.make_room(kind, count, demand)
            page_ids = pools[kind].allocate(count)
            if page_ids is None:
                self._unstage(prefetch)
                return self._give_up("sidecar_room", wanted)
            prefetch.staged[kind] = page_ids
        self.counters["prefetch/staged_pages"] += len(full)
        if len(full) < wanted:
            self.counters["prefetch/cut_count"] += 1
            self.counters["prefetch/cut_tokens"] += (wanted - len(full)) * self._page
            prefetch.num_pages = len(full)
        return True

    def _give_up(self, reason: str, num_pages: int) -> bool:
        self.counters["prefetch/abandoned_count"] += 1
        self.counters[f"prefetch/abandoned_{reason}_tokens"] += num_pages * self._page
        return False

    def _give_back(self, prefetch: Prefetch, keep: int) -> None:
        # free the staged full pages from `keep` on, and the window pages beyond a shorter prefix
        discarded = max(len(prefetch.staged[FULL]) - keep, 0)
        self.counters["prefetch/discarded_miss_pages"] += discarded
        counts = {kind: min(window.num_pages, keep) for kind, window in prefetch.needs}
        for kind, count in {FULL: keep, **counts}.items():
            staged = prefetch.staged[kind]
            self._pools[kind].free(staged[count:])
            prefetch.staged[kind] = staged[:count]

    def _unstage(self, prefetch: Prefetch) -> None:
        # free what is still staged
        for kind in self.cache.tree.kinds.numbers:
            self._pools[kind].free(prefetch.staged[kind])
            prefetch.staged[kind] = NO_PAGES

    def _revoke(self, prefetch: Prefetch, reason: str) -> None:
        # no reader has begun: free everything at once
        self.counters["prefetch/revoked_count"] += 1
        self._settle(prefetch)
        self._end(prefetch, reason)

    def _terminate(self, prefetch: Prefetch) -> None:
        self._count_stop(prefetch)
        if prefetch.is_complete and prefetch.has_sidecars and not prefetch.is_read:
            # the pages are read, but not yet the window and state that make them usable
            self.counters["prefetch/terminated_without_sidecars_count"] += 1
        if prefetch.phase is Phase.asking:
            self._revoke(prefetch, "terminated")
        else:
            self._stop(prefetch)
            self._publish(prefetch)

    def _count_stop(self, prefetch: Prefetch) -> None:
        prefetch.was_stopped = True
        self.counters["prefetch/terminated_count"] += 1

    def _stop(self, prefetch: Prefetch) -> None:
        prefetch.phase = Phase.stopped
        self.lingering.add(prefetch)

    def _publish(self, prefetch: Prefetch) -> None:
        completed = prefetch.settled_pages = prefetch.completed_pages
        kept = prefetch.restored_pages if prefetch.has_sidecars else completed
        prefetch.taken_pages = kept
        if kept:
            pages = [NO_PAGES] * len(prefetch.staged)
            start, counts = prefetch.start_page, {FULL: kept}
            for kind, window in prefetch.needs:
                # a short window is useless below an anchor, unless the rule `short_windows` is on
                is_short = window.first(start + kept) < start and not prefetch.anchor.is_root
                is_useless = is_short and not self.cache.rules.short_windows
                counts[kind] = 0 if is_useless else kept - prefetch.first_page(window, kept)
            for kind, num_pages in counts.items():
                staged = prefetch.staged[kind]
                pages[kind], prefetch.staged[kind] = staged[:num_pages], staged[num_pages:]
            prefetch.published_pages = self.cache.insert_host(
                prefetch.anchor, prefetch.sequence, pages
            )
        unusable = prefetch.staged[FULL][: completed - kept]
        prefetch.staged[FULL] = prefetch.staged[FULL][completed - kept :]
        self._pools[FULL].free(unusable)
        self.cache.fates.count(completed - kept, "not_restorable")
        self._settle(prefetch)

    def _settle(self, prefetch: Prefetch) -> None:
        self.cache.tree.release(prefetch.anchor_lock)
        self.occupied_tokens -= prefetch.asked_pages * self._page

    def _end(self, prefetch: Prefetch, reason: str) -> None:
        # the reader has finished
        prefetch.phase = Phase.ended
        late = prefetch.completed_pages - prefetch.settled_pages
        self.cache.fates.count(late, "late")
        self.counters[f"prefetch/discarded_{reason}_pages"] += len(prefetch.staged[FULL]) - late
        self._unstage(prefetch)

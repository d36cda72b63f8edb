"""Finds out why pages that were seen before are not cached now."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from hicache.cache.kinds import FULL, Window
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.config import ExperimentConfig
from hicache.observe.history import (
    COPY_DROPPED,
    IS_HELD,
    THROWN_AWAY,
    UNOWNED,
    WAS_COPIED,
    WAS_HELD,
    PageHistory,
    PageNumbers,
    Stored,
    num_leading,
)
from hicache.observe.reasons import REASONS, Eviction, Span

Flags = NDArray[np.bool_]
Codes = NDArray[np.int8]  # indices into `REASONS`
Part = tuple[int, int, int, int]  # pages [first, end), the index of their reason, a kind

CODES = {name: code for code, name in enumerate(REASONS)}
NAMES = tuple(REASONS)
NONE = -1  # the page itself is not missing
# by Purpose: the reasons are in its order
EVICTED = [CODES[name] for name in REASONS if name[:8] == "evicted_"]
LOST_FOR = np.array([NONE, *EVICTED, CODES["thrown_away"]], np.int8)
# by Stored
BY_STORED = np.array(
    [CODES["never_written"], CODES["write_dropped"], CODES["write_pending"], NONE], np.int8
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingPages:
    """Explains why pages of a prompt are not in the cache although earlier requests had them.

    Positions in the prompt are counted in pages.

    Attributes:
        history: where each page was held, and how it was evicted.
        config: the settings of the run.
        names_evictions: True if the explanation lists the time and the cause of evictions.
        numbers: the number of each page, in the order of the prompt. Equal numbers mean equal
            prefixes.
        full_end: the end of the full-attention KV that the radix tree holds for this prompt.
        start: the first page of the prefetch from storage. Earlier pages were not looked up in
            storage.
        prefetch: the prefetch from storage for this request, or None if there was none.
        declined: the reason if there was no prefetch, otherwise None.
    """

    history: PageHistory
    config: ExperimentConfig
    names_evictions: bool
    numbers: PageNumbers
    full_end: int
    start: int
    prefetch: Prefetch | None
    declined: str | None

    def spans(self, first: int) -> list[Span]:
        """Return the reasons why the prompt had to be computed from page `first` on.

        `first` is the end of the prefix that the request could use from the cache. Each result is a
        range of tokens with one reason.
        """
        end = len(self.numbers)
        if self.config.storage.kind == "none":
            return self._merged(self._stories(first, end, asks_storage=False))
        parts = self._stories(first, min(self.start, end), asks_storage=False)
        first = max(first, self.start)
        if first < end:
            restorable = max(first, self._restorable_end())
            parts += self._prefetched(first, restorable)
            is_store = self.config.storage.kind != "peers"
            parts += self._stories(restorable, end, asks_storage=is_store)
        return self._merged(parts)

    # -- what storage could have restored ------------------------------------------------------

    def _restorable_end(self, within: int | None = None) -> int:
        # the deepest page end up to which storage has all that a prefix needs
        start = self.start
        numbers = self.numbers[start:within]
        stored = self.history.registry.stored
        leads = num_leading(stored[FULL][numbers] == Stored.written)
        numbers = numbers[:leads]
        flags = np.ones(leads, bool)
        for kind, window in self.history.kinds.extents:
            flags &= _has_last(stored[kind][numbers] == Stored.written, window, start)
        end = start + _last(flags)
        prefetch = self.prefetch
        if within is None and prefetch is not None and prefetch.restorable:
            end = max(end, min(start + prefetch.restorable[-1], len(self.numbers)))
        return end

    def _prefetched(self, first: int, end: int) -> list[Part]:
        if first >= end:
            return []
        prefetch, start = self.prefetch, self.start
        if prefetch is None:
            reason = self.declined or ""
            reason = reason if reason in REASONS else f"prefetch_{reason}"
            return [(first, end, CODES[reason], FULL)]
        if prefetch.restorable is None or prefetch.answered_ns is None:
            return [(first, end, CODES["prefetch_late"], FULL)]  # storage had not answered in time
        offered = min(start + max(prefetch.restorable, default=0), end)
        parts = []
        if first < offered:
            parts += self._offered(prefetch, first, offered)
        if offered < end:
            parts += self._not_offered(prefetch, max(first, offered), end)
        return parts

    def _offered(self, prefetch: Prefetch, first: int, end: int) -> list[Part]:
        # storage had reported these pages
        start = self.start
        assert prefetch.restorable is not None
        hit = prefetch.restorable[-1]
        if hit * self.history.kinds.page_size < self.config.prefetch.threshold:
            return [(first, end, CODES["prefetch_declined_too_short"], FULL)]
        if prefetch.phase is Phase.ended and not prefetch.is_read:
            return [(first, end, CODES["prefetch_no_room"], FULL)]
        ended = CODES["prefetch_stopped" if prefetch.was_stopped else "prefetch_lost"]
        usable = prefetch.usable_pages(prefetch.num_pages)
        if usable not in prefetch.restorable:
            return [(first, end, CODES["prefetch_cut"], FULL)]
        planned = min(max(start + usable, first), end)
        # a stopped reader may have continued since
        read = min(max(start + prefetch.taken_pages, first), end)
        # these pages were read and published, and have been lost again
        parts = self._stories(first, read, asks_storage=False)
        parts += [(read, planned, ended, FULL), (planned, end, CODES["prefetch_cut"], FULL)]
        return parts

    def _not_offered(self, prefetch: Prefetch, first: int, end: int) -> list[Part]:
        # these pages were written to storage, but storage did not report them
        asked = self.start + len(prefetch.names)
        among = min(max(self._restorable_end(asked), first), end)
        registry, numbers = self.history.registry, self.numbers[first:among]
        parts = []
        if first < among:
            came = [registry.written_ns[FULL][numbers[:1]]]
            for kind, window in self.history.kinds.extents:
                last = numbers[max(window.first(among) - first, 0) :]
                came.append(registry.written_ns[kind][last])
            answered_ns = prefetch.answered_ns
            assert answered_ns is not None
            is_late = max(int(each.max()) for each in came if len(each)) >= answered_ns
            parts.append(
                (first, among, CODES["write_pending" if is_late else "storage_lost"], FULL)
            )
        parts.append((among, end, CODES["prefetch_cut"], FULL))
        return parts

    # -- what it could not ---------------------------------------------------------------------

    def _stories(self, first: int, end: int, *, asks_storage: bool) -> list[Part]:
        if first >= end:
            return []
        held = min(self.full_end, end)
        if asks_storage and held < end:
            stored = self.history.registry.stored[FULL][self.numbers[held:end]]
            held += num_leading(stored == Stored.written)
        parts = []
        if first < held:
            parts += self._sidecars(first, held, asks_storage=asks_storage)
        if held < end:
            codes = self._story(FULL, held, end, asks_storage=asks_storage)
            for place in range(1, len(codes)):
                if codes[place] == NONE:  # storage has this page, but not the one before
                    codes[place] = codes[place - 1]
            parts += [
                (place, place + 1, int(codes[place - held]), FULL)
                for place in range(max(first, held), end)
            ]
        return parts

    def _sidecars(self, first: int, end: int, *, asks_storage: bool) -> list[Part]:
        # full pages are held; boundaries are the ends of the pages in [first, end)
        for point in self.history.kinds.points:
            there = first + _last(self._is_there(point, first, end, asks_storage=asks_storage))
            kept = there + _last(self._was_there(point, there, end))
            parts = []
            if first < there:
                parts.append((first, there, *self._obstacle(there, asks_storage=asks_storage)))
            if there < kept:
                story = self._story(point, kept - 1, kept, asks_storage=asks_storage)
                parts.append((there, kept, int(story[0]), point))
            parts.append((kept, end, CODES["state_not_kept"], point))
            return parts
        if self.history.kinds.windows:
            windows = np.ones(end, bool)
            for kind, window in self.history.kinds.windows:
                is_there = self._is_there(kind, 0, end, asks_storage=asks_storage)
                windows &= _has_last(is_there | self._was_there(kind, 0, end), window, 0)
            kept = first + _last(windows[first:])
            parts = [(kept, end, CODES["window_not_kept"], self.history.kinds.windows[0][0])]
            if first < kept:
                parts.insert(0, (first, kept, *self._obstacle(kept, asks_storage=asks_storage)))
            return parts
        return [(first, end, *self._obstacle(end, asks_storage=asks_storage))]

    def _obstacle(self, boundary: int, *, asks_storage: bool) -> tuple[int, int]:
        for kind, window in self.history.kinds.windows:
            edge = max(window.first(boundary), 0)
            is_there = self._is_there(kind, edge, boundary, asks_storage=asks_storage)
            if not is_there.all():
                place = edge + num_leading(is_there)
                if not self._was_there(kind, place, place + 1)[0]:
                    return CODES["window_not_kept"], kind
                story = self._story(kind, place, place + 1, asks_storage=asks_storage)
                return int(story[0]), kind
        # everything is held somewhere: one part in the tree, another in storage
        stored = self.history.registry.stored
        places = [(FULL, min(self.start, boundary - 1))]
        places += [
            (kind, max(window.first(boundary), self.start))
            for kind, window in self.history.kinds.windows
        ]
        places += [(kind, boundary - 1) for kind in self.history.kinds.points]
        for kind, first in places:
            is_stored = stored[kind][self.numbers[first:boundary]] == Stored.written
            if not is_stored.all():
                place = first + num_leading(is_stored)
                code = int(self._story(kind, place, place + 1, asks_storage=True)[0])
                return (CODES["never_written"] if code == NONE else code), kind
        raise AssertionError(
            f"the prefix up to page {boundary} is cached, but no reason explains why it was "
            "not a hit"
        )

    def _story(self, kind: int, first: int, end: int, *, asks_storage: bool) -> Codes:
        history, numbers = self.history, self.numbers[first:end]
        marks = history.marks[kind][numbers]
        codes: Codes = LOST_FOR[history.lost_for[kind][numbers]]
        is_copied = (marks & WAS_COPIED) > 0
        codes[~is_copied & ((marks & COPY_DROPPED) > 0)] = CODES["back_up_dropped"]
        stored = history.registry.stored[kind][numbers]
        if asks_storage:
            codes[is_copied] = BY_STORED[stored[is_copied]]
            codes[stored == Stored.written] = NONE
        codes[((marks & WAS_HELD) == 0) & (stored != Stored.written)] = CODES["other_engine"]
        if kind == FULL:
            owners = history.owners[numbers]
            codes[owners > UNOWNED] = CODES["being_computed"]
            codes[owners == THROWN_AWAY] = CODES["thrown_away"]
        return codes

    def _is_there(self, kind: int, first: int, end: int, *, asks_storage: bool) -> Flags:
        numbers = self.numbers[first:end]
        is_there: Flags = (self.history.marks[kind][numbers] & IS_HELD) > 0
        if asks_storage:
            is_there |= self.history.registry.stored[kind][numbers] == Stored.written
        return is_there

    def _was_there(self, kind: int, first: int, end: int) -> Flags:
        was_there: Flags = (self.history.marks[kind][self.numbers[first:end]] & WAS_HELD) > 0
        return was_there

    # -- what is said of it --------------------------------------------------------------------

    def _merged(self, parts: list[Part]) -> list[Span]:
        page = self.history.kinds.page_size
        spans: list[Span] = []
        filled = (part for part in parts if part[0] < part[1])
        for (code, kind), group in groupby(filled, key=lambda part: part[2:]):
            members = list(group)
            first, end = members[0][0], members[-1][1]
            assert code != NONE, f"pages [{first}, {end}) are gone, and nothing says why"
            evictions = tuple(self._evictions(kind, first, end))
            spans.append(Span(first * page, end * page, NAMES[code], kind, evictions))
        return spans

    def _evictions(self, kind: int, first: int, end: int) -> Iterator[Eviction]:
        if not self.names_evictions:
            return
        history, numbers = self.history, self.numbers[first:end]
        lost = numbers[history.lost_for[kind][numbers] > 0]
        events = np.stack((history.lost_ns[kind][lost], history.lost_to[kind][lost]))
        columns, counts = np.unique(events, axis=1, return_counts=True)
        for (when_ns, request_id), count in zip(columns.T, counts, strict=True):
            yield Eviction(int(when_ns), int(request_id), int(count))


def _last(flags: Flags) -> int:
    places = np.flatnonzero(flags)
    return int(places[-1]) + 1 if len(places) else 0


def _has_last(flags: Flags, window: Window, start: int) -> Flags:
    # of each page from `start` on: true if a request can continue after it
    ends = np.arange(1, len(flags) + 1)
    gaps = np.maximum.accumulate(np.where(flags, 0, ends))
    has: Flags = gaps <= np.maximum(window.first(start + ends) - start, 0)
    return has

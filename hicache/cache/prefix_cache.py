"""The cache controller: it owns the page pools, takes decisions from the radix tree, and queues
copies.

The controller appends each piece of work to `outbox`, in order. The engine passes the work to the
executor, and calls `complete` when a copy is finished.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hicache.cache.kinds import FULL
from hicache.cache.pages import NO_PAGES, FreePages, PageIds, Pools, free
from hicache.cache.tiers import shared
from hicache.cache.tiers.device import Device
from hicache.cache.tiers.host import Host
from hicache.cache.tiers.own_copies import load_last, load_state
from hicache.cache.tiers.storage_writes import StorageWriter
from hicache.cache.tiers.transfer import (
    BackUp,
    Bookings,
    CopyState,
    LoadBack,
    Reported,
    StorageWrite,
    Work,
    WritePolicy,
)
from hicache.cache.tiers.write_back import WriteBack
from hicache.cache.tree.events import Demand, Purpose
from hicache.cache.tree.insertion import attach_state, insert, insert_host
from hicache.cache.tree.node import DEVICE, HOST, TIER_NAMES, MatchResult, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.cache.windows import PageWindows
from hicache.config import StorageConfig

# where a request may find cached tokens; `peer` is the host of another engine
HIT_TIERS = (*TIER_NAMES, "storage", "peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """The cached prefix that a request reuses, in tokens.

    `cached_len` is the length of the whole prefix. It is the sum of four parts, by the tier that
    held them: `device_len`, `host_len`, `storage_len` and `peer_len`. `load_back` is the copy from
    host to device that the request must wait for; None means that there is no copy.
    """

    cached_len: int
    device_len: int
    host_len: int
    load_back: LoadBack | None
    storage_len: int = 0  # host pages that the request's own prefetch had read
    peer_len: int = 0  # those that it had read from the host of another engine
    cold_len: int = 0  # of these tokens, those without KV of the draft

    def with_last(self, load_back: LoadBack, prompt_len: int) -> "Acquired":
        """Return this prefix with the last page of the prompt, of which all but a token is reused.

        `load_back` brings the page from the host.
        """
        added = prompt_len - 1 - self.cached_len
        lengths = {"cached_len": prompt_len - 1, "host_len": self.host_len + added}
        return replace(self, load_back=load_back, **lengths)


class PrefixCache:
    """Manages the cached prefixes of one engine on the device and host tiers.

    The object only takes decisions and queues copies. The engine carries out the copies in
    `outbox`.

    Args:
        tree: the radix tree of the cached prefixes.
        pools: page allocators, by tier and kind of data.
        policy: decides what is copied to the host and to storage.
        storage: settings for writes from host to storage.
        storage_queue_bytes: maximum bytes that may wait to be written to storage. None means that
            there is no storage.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: Pools,
        policy: WritePolicy,
        storage: StorageConfig | None = None,
        *,
        storage_queue_bytes: int | None = None,
    ) -> None:
        self.tree = tree
        self.pools = pools
        self.page_size = tree.page_size
        self._units = tree.kinds.units
        self.knobs = tree.knobs
        self.rules = tree.rules
        self._is_exclusive = tree.knobs.device_host == "exclusive"
        self._read_as = "peer_len" if storage and storage.kind == "peers" else "storage_len"
        self.counters: Counter[str] = Counter()
        self._bookings = Bookings(tree.kinds, pools, self.counters)
        self.outbox: list[Work] = self._bookings.outbox
        self.fates = self._bookings.fates
        self.in_flight = self._bookings.in_flight
        self._writer = None
        if storage_queue_bytes is not None:
            self._writer = StorageWriter(
                tree,
                self._bookings,
                storage or StorageConfig(),
                policy,
                queue_bytes=storage_queue_bytes,
            )
        # each tier makes room with the help of the tier below it
        self.host = Host(tree, self._bookings, self._writer, policy)
        write_back = WriteBack(tree, self._bookings, self.host, policy) if tree.demotes else None
        self.device = Device(tree, self._bookings, write_back)
        self.windows = PageWindows(tree, pools) if tree.rules.trims_leaves else None

    # -- how much room there is ----------------------------------------------------------------

    @property
    def queued_write_bytes(self) -> int:
        return 0 if self._writer is None else self._writer.queued_bytes

    def available_size(self, kind: int, tier: int = DEVICE) -> int:
        return self.pools[tier][kind].num_free * self._units[kind]

    def evictable_size(self, kind: int) -> int:
        return self.device.evictable(kind) * self._units[kind]

    @property
    def device_pages(self) -> int | None:
        return self.pools[DEVICE][FULL].capacity

    def room(self, kind: int = FULL) -> int:
        """Return how many tokens of the device's page pool are free or can be evicted.

        `kind` selects the pool. The pool of Mamba states counts state slots instead of tokens.
        """
        return self.available_size(kind) + self.evictable_size(kind)

    def taken(self, kind: int, claims: Mapping[int, float]) -> float:
        """Return how many tokens (or states) of a kind's device pool the `claims` take.

        `claims` are tokens (or states) by kind. Where the kinds share the device's bytes, claims of
        other kinds take from the pool as well.
        """
        if self.device.is_shared:
            return shared.taken(self.tree.kinds, kind, claims)
        return claims.get(kind, 0)

    def growth_pages(self, kind: int, tokens: int) -> int:
        """Return how many pages of `kind` fit in `tokens` if each paged kind takes as many."""
        pages = tokens // self.page_size
        if self.device.is_shared:
            return shared.growth_pages(self.tree.kinds, kind, pages)
        return pages

    # -- a request's life ----------------------------------------------------------------------

    def match(self, sequence: Sequence, prompt_len: int, *, refreshes: bool = True) -> MatchResult:
        """Find the longest cached prefix that a request can reuse, at most `prompt_len - 1` tokens.

        The call may split nodes of the radix tree. With `refreshes`, it marks the prefix as just
        used.
        """
        tokens, namespace = sequence.tokens, sequence.namespace
        return self.tree.match(tokens, prompt_len - 1, namespace, refreshes=refreshes)

    def touch(self, sequence: Sequence) -> None:
        """Mark the locked prefix of a request as just used."""
        assert sequence.lock is not None
        self.tree.touch(sequence.lock.node)

    def acquire(
        self,
        sequence: Sequence,
        match: MatchResult,
        *,
        prompt_len: int = 0,
        storage_start: int = 0,
        storage_end: int = 0,
        late_slots: bool = False,
    ) -> Acquired | None:
        """Give a request its cached prefix: lock the prefix, and queue a copy of its host part.

        The copy brings the host part to the device. If the host part is too short or the device has
        no room, the request reuses only the device part. The request also gets Mamba state slots if
        the model needs them. The result says what is reused from which tier. It is
        None if the slots do not fit, or with `cache.window=replay` the pages of the window that is
        computed again; the request then holds nothing.

        Args:
            sequence: the tokens of the request. The call stores the lock, the pages and the slots
                in it.
            match: the cached prefix that `match` found for this request.
            prompt_len: the length of the prompt in tokens. It matters only if
                `compat.rules.loads_last_page` is on.
            storage_start: the first token that a prefetch for this request read from storage.
            storage_end: the end of the tokens that this prefetch read.
            late_slots: whether the request gets now only the slot into which a state is copied;
                `take_slots` gives it the others.
        """
        read = storage_start, storage_end
        node, load_back, held = self._load(sequence, match, read)
        if self.windows is not None:
            self.windows.begin(sequence, node, match)
        sequence.lock = self.tree.lock(node)
        if not self._take_slots(sequence, node, load_back, late_slots=late_slots):
            # the load-back continues: its pages are in the tree and will be a device hit next time
            self.abandon(sequence)
            return None
        sequence.begin(node, self.tree.kinds)
        if self.windows is not None and load_back is not None:
            self.windows.take(sequence, load_back)
        if not self._take_replayed(sequence):
            self.abandon(sequence)
            return None
        if self.tree.entries is not None:
            self.tree.entries.started(node, sequence)
        if self._writer is not None:
            self._writer.on_hit(node)
        acquired = self._acquired(node, held, load_back)
        is_last = acquired.cached_len + self.page_size == prompt_len
        if self.rules.loads_last_page and is_last and not self.tree.drops_block:
            last = load_last(self.tree, self._bookings, self.device, node, sequence, load_back)
            return acquired if last is None else acquired.with_last(last, prompt_len)
        return acquired

    def extend(
        self,
        sequence: Sequence,
        num_tokens: int,
        purpose: Purpose = Purpose.prefill,
    ) -> bool:
        """Allocate device pages until the sequence has room for `num_tokens` tokens.

        The call evicts other data if needed. Return False, and allocate nothing, if the device has
        too few pages.
        """
        count = -(-num_tokens // self.page_size) - sequence.num_pages
        if count <= 0:
            return True
        pools, kinds = self.pools[DEVICE], self.tree.kinds
        growing, needed = kinds.paged, count
        if self.device.is_shared:
            growing, needed = (FULL,), shared.growth_in_full_pages(kinds, count)
        for kind in growing:
            if pools[kind].num_free < needed:
                demand = Demand(purpose, sequence.request_id)
                if not self.device.make_room(kind, needed, demand):
                    return False
        for kind in kinds.paged:
            sequence.pages[kind] += pools[kind].allocate(count) or NO_PAGES
        sequence.num_pages += count
        return True

    def make_room(self, count: int, purpose: Purpose, kinds: Iterable[int] | None = None) -> bool:
        """Evict until `count` pages or slots of each of `kinds` are free, as far as possible.

        None means all kinds that have pages. Return True if so many are free.
        """
        pools, own = self.pools[DEVICE], self.tree.kinds
        if kinds is None:
            kinds = own.paged
            if self.device.is_shared:
                kinds, count = (FULL,), shared.growth_in_full_pages(own, count)
        for kind in kinds:
            self.device.make_room(kind, 0, Demand(purpose), spare=count)
        return all(pools[kind].num_free >= count for kind in kinds)

    def leave_window(self, sequence: Sequence, length: int, *, waits: bool = False) -> None:
        """Free the sliding-window pages that only this sequence holds and no longer needs.

        If `waits` is True, `windows` frees them later.

        Tokens from position `length` on do not attend to the freed pages. The window before the
        last page boundary below `length` is kept, because a repeated prompt would resume there.
        With `compat.rules.keeps_for_repeats`, that boundary may be `length`.
        """
        sequence.left_page = (length - 1) // self.page_size
        last_page = (length - 1 + self.rules.keeps_for_repeats) // self.page_size
        kinds = self.tree.kinds
        for kind, window in kinds.all_windows:
            end = min(window.first(last_page), sequence.num_pages)
            if length - kinds.window_lens[kind] > sequence.passed[kind] * self.page_size + 1:
                sequence.passed[kind] = max(sequence.passed[kind], sequence.tree_pages, end)
            if end <= sequence.starts[kind]:
                continue
            first = sequence.own_start(kind, kinds)
            if end > first and waits:
                sequence.leaving.append((kind, first, sequence.pages[kind][first:end]))
            elif end > first:
                self.pools[DEVICE][kind].free(sequence.pages[kind][first:end])
            sequence.starts[kind] = end

    def take_slots(self, sequence: Sequence) -> bool:
        """Give a request the state slots that `acquire` has not given it; False: no room."""
        (kind,) = self.tree.kinds.points
        taken = sequence.working_slot or []
        count = self.rules.states_per_request - len(taken)
        slots = self.device.allocate(kind, count, Demand(Purpose.slot, sequence.request_id))
        if slots is None:
            return False
        sequence.hold_slots(taken + slots)
        return True

    def take_state_slot(self, sequence: Sequence) -> PageIds | None:
        (kind,) = self.tree.kinds.points
        return self.device.allocate(kind, 1, Demand(Purpose.slot, sequence.request_id))

    def publish(
        self,
        sequence: Sequence,
        num_pages: int,
        *,
        is_answer: bool = False,
        keeps_window: bool = True,
        copies: bool = True,
    ) -> None:
        """Insert a sequence's pages and Mamba states into the radix tree, up to page `num_pages`.

        Other requests can then reuse the pages. Pages that were inserted before stay as they are.
        The sequence goes on reading all pages, and its lock grows to cover them. `is_answer` is
        True if the new pages hold generated tokens. If `keeps_window` is False, the sequence keeps
        its sliding windows to itself, so that no other request can continue after the last page.
        If `copies` is False, nothing is copied to the host: the pages are not computed yet.
        """
        tree, kinds, lock = self.tree, self.tree.kinds, sequence.lock
        assert lock is not None
        node = lock.node
        begin = first = sequence.tree_pages
        cuts = {num_pages, *sequence.states}
        windows = kinds.windows if keeps_window else ()
        if self.windows is not None:
            self.windows.note_published(sequence, num_pages, keeps_window=keeps_window)
        for kind, window in windows:
            own = sequence.own_start(kind, kinds)
            begin = min(begin, own)
            if window.first(num_pages) > own + 1 and not self.rules.trims_windows:
                cuts.add(window.first(num_pages))  # so that one lock covers one window
        if begin < first:  # the tree has pages without their window
            node = tree.ancestor(node, sequence.tokens, begin)
        kept = (FULL, *(kind for kind, _ in windows))
        actions: list[FreePages] = []
        for cut in sorted(cut for cut in cuts if begin <= cut <= num_pages):
            node, is_new = insert(tree, node, sequence, cut, actions, kept)
            state = sequence.states.pop(cut, None)
            if state is not None:
                is_found = self.rules.evicts_whole and not is_new
                if copies and is_found and node.held[HOST][FULL] is None:
                    self.save(node, sequence, is_answer=is_answer)  # without the new state
                attach_state(tree, node, state, actions)
        tree.residency.touch_windows(node)
        free(actions, self.pools)
        if self._is_exclusive:
            self.host.leave(node)
        if node is not lock.node:
            sequence.tree_pages = max(num_pages, first)
        if keeps_window:
            sequence.tree_windows = sequence.tree_pages
        if self.windows is not None:
            self.windows.lock(sequence, node)
        elif node is not lock.node:
            sequence.lock = tree.lock(node)
            tree.release(lock)
        if tree.listener is not None:
            tree.listener.published(sequence, first, num_pages)
        if copies:
            self.save(node, sequence, is_answer=is_answer)

    def save(
        self, node: Node, sequence: Sequence, *, is_answer: bool = False, old: int = 0
    ) -> None:
        """Copy computed pages and states to the host, which `publish` has inserted up to `node`.

        Those before page `old` have been saved a moment before.
        """
        num_before = len(self.outbox)
        is_repeated = node.end <= sequence.inserted_pages
        sequence.inserted_pages = max(node.end, sequence.inserted_pages)
        self.host.save_path(node, sequence.request_id, is_answer=is_answer, is_repeated=is_repeated)
        if self.windows is not None and (self.rules.backs_up_answers or not is_answer):
            self.windows.use_on_host(sequence, node, old, self.outbox[num_before:])

    def finish(self, sequence: Sequence, num_pages: int, *, is_answer: bool = True) -> None:
        keeps = not (is_answer and self.rules.keeps_for_repeats)
        self.publish(sequence, num_pages, is_answer=is_answer, keeps_window=keeps)
        self.abandon(sequence)

    def abandon(self, sequence: Sequence) -> None:
        first, end = sequence.tree_pages, sequence.num_pages
        if self.tree.listener is not None:
            self.tree.listener.abandoned(sequence, first, end)
        if self.windows is not None:
            self.windows.end(sequence)
        for kind in self.tree.kinds.paged if end else ():
            own = sequence.own_start(kind, self.tree.kinds)
            self.pools[DEVICE][kind].free(sequence.pages[kind][own:end])
        slots = (sequence.working_slot, sequence.boundary_slot, sequence.spare_slots)
        for slot in (*slots, *sequence.states.values()):
            if slot is not None:
                self.pools[DEVICE][self.tree.kinds.points[0]].free(slot)
        sequence.working_slot = sequence.boundary_slot = sequence.spare_slots = None
        sequence.states.clear()
        sequence.num_pages = sequence.tree_pages = sequence.tree_windows = 0
        if sequence.lock is not None:
            self.tree.release(sequence.lock)
            sequence.lock = None

    def save_aside(self, num_bytes: int, then: StorageWrite | None = None) -> None:
        """Queue a copy of a request's device pages to memory outside the host tier, and a write.

        Without a write, the pages are free already, and the next step waits for the copy.
        """
        root, is_fence = self.tree.root(""), then is None
        copy = BackUp(moves=[], num_bytes=num_bytes, node=root, is_fence=is_fence, then=then)
        self._bookings.book(copy)
        self.counters["transfer/back_up_bytes"] += num_bytes

    def load_aside(self, num_bytes: int) -> LoadBack:
        """Queue a copy to a request's device pages from memory outside the host tier."""
        copy = LoadBack(moves=[], num_bytes=num_bytes, node=self.tree.root(""))
        self._bookings.book(copy)
        self.counters["transfer/load_back_bytes"] += num_bytes
        return copy

    # -- copies that are done ------------------------------------------------------------------

    def complete(self, transfer: Reported) -> None:
        self.in_flight.discard(transfer)
        if isinstance(transfer, StorageWrite):
            if self._writer is not None:
                self._writer.on_written(transfer)
        else:
            for lock in transfer.locks:
                self.tree.release(lock)
        if isinstance(transfer, BackUp) and transfer.then is not None:
            self.outbox.append(transfer.then)
        if isinstance(transfer, BackUp) and self._writer is not None and transfer.moves:
            self._writer.on_backed_up(transfer)
        for host_lock in transfer.host_locks:
            self.tree.release(host_lock)
        if self._is_exclusive:  # the device may hold what was locked by now
            for host_lock in transfer.host_locks:
                self.host.leave(host_lock.node)

    @property
    def is_in_use(self) -> bool:
        """Whether a request, a copy or a read locks any data."""
        return bool(self.in_flight) or any(map(any, self.tree.residency.protected))

    def forget(self) -> None:
        """Drop everything from device and host. No data may be in use."""
        demand = Demand(Purpose.outage)
        for tier in (DEVICE, HOST):
            for kind in self.tree.kinds.numbers:
                while found := self.tree.victim(tier, kind, self.tree.num_nodes):
                    victim, each = found
                    self._bookings.free_evicted(self.tree.evict(victim, tier, each, demand))

    # -- what prefetch has brought -----------------------------------------------------------------

    def insert_host(self, anchor: Node, sequence: Sequence, pages: list[PageIds]) -> int:
        """Insert host pages that were read from storage into the radix tree, after `anchor`.

        `pages` holds page ids by kind: full-attention KV, sliding windows and the Mamba state.
        Return the number of full-attention pages that were new to the tree. Pages that the tree
        had already are freed.
        """
        actions: list[FreePages] = []
        node = insert_host(self.tree, anchor, sequence, pages, actions)
        free(actions, self.pools)
        if self._writer is not None:
            self._writer.on_read(node.span(anchor.end), node, pages)
        doubles = [action.page_ids for action in actions if action.kind == FULL]
        full = set(pages[FULL]).difference(*doubles)
        self.fates.count(len(pages[FULL]) - len(full), "duplicate")
        self.fates.publish(full)
        return len(full)

    # -- inside --------------------------------------------------------------------------------

    def _load(
        self, sequence: Sequence, match: MatchResult, read: tuple[int, int]
    ) -> tuple[Node, LoadBack | None, tuple[int, int, int]]:
        # starts the load-back of a match, and gives the request the states that are loaded for it
        # alone; returns the node at which the prefix on the device then ends, and its full pages
        # that were on the device, on the host, and from storage, of which tokens `read` came
        nothing = match.device_node, None, (match.device_node.end, 0, 0)
        if not match.needs_host_load_back:
            return nothing
        held = self._full_by_tier(match.best_node, *read)
        demand = Demand(Purpose.load_back, sequence.request_id)
        windows = self.windows
        own = () if windows is None else windows.own_loads(sequence, match)
        for kind in self.tree.kinds.points:
            is_twice = self.rules.loads_states_twice and (kind, match.best_node) not in own
            if is_twice and match.host_hits[kind]:
                # the slot may evict data from the device, and its copy others from the host
                lock = self.tree.lock_anchor(match.best_node)
                sequence.working_slot = self.device.allocate(kind, 1, demand)
                self.tree.release(lock)
        load_back = self.device.load(match, demand, own)
        if load_back is None:
            return nothing
        for kind in self.tree.kinds.points:
            slots = [slot for each, _, slot in load_back.own if each == kind]
            sequence.working_slot = next(iter(slots), sequence.working_slot)
        return match.best_node, load_back, held

    def _acquired(
        self, node: Node, held: tuple[int, int, int], load_back: LoadBack | None
    ) -> Acquired:
        # `held`: full pages of the prefix on the device, on the host, and from storage
        on_device, on_host, from_storage = held
        cached, size = self.tree.kinds.replay_start(node.end), self.page_size
        cold = 0
        if self.tree.marks_cold:
            cold = sum(min(each.end, cached) - each.start for each in node.path() if each.is_cold)
        read = min(from_storage, max(cached - on_device - on_host, 0)) * size
        return Acquired(
            cached_len=cached * size,
            device_len=min(on_device, cached) * size,
            host_len=min(on_host, max(cached - on_device, 0)) * size,
            load_back=load_back,
            cold_len=max(cold, 0) * size,
            **{self._read_as: read},
        )

    def _take_slots(
        self,
        sequence: Sequence,
        node: Node,
        load_back: LoadBack | None,
        *,
        late_slots: bool,
    ) -> bool:
        # allocate the working state's slot and the boundary state's slot, if the model has states
        for kind in self.tree.kinds.points:
            taken = sequence.working_slot or []  # a load-back may have allocated the working slot
            state = node.held[DEVICE][kind]
            wanted = int(state is not None) if late_slots else self.rules.states_per_request
            count = max(wanted - len(taken), 0)
            slots = self.device.allocate(kind, count, Demand(Purpose.slot, sequence.request_id))
            if slots is None:
                return False
            slots = taken + slots
            sequence.hold_slots(slots)
            is_own = load_back is not None and any(each == kind for each, _, _ in load_back.own)
            is_twice = self.rules.loads_states_twice and not is_own
            if is_twice and load_back is not None and load_back.counts[kind]:
                load_state(self.tree, self._bookings, load_back, slots[:1])
            elif state is not None:
                self.outbox.append(CopyState(source=state, target=slots[:1]))
        return True

    def _take_replayed(self, sequence: Sequence) -> bool:
        # allocate the window pages of the tokens that the request computes again
        kinds, end = self.tree.kinds, sequence.num_pages
        first = kinds.replay_start(end)
        for kind, _ in kinds.replayed:
            demand = Demand(Purpose.prefill, sequence.request_id)
            page_ids = self.device.allocate(kind, end - first, demand)
            if page_ids is None:
                return False
            sequence.pages[kind][first:] = page_ids
            sequence.starts[kind] = first
        return True

    def _full_by_tier(
        self, node: Node, storage_start: int, storage_end: int
    ) -> tuple[int, int, int]:
        on_device = on_host = from_storage = 0
        first, last = storage_start // self.page_size, storage_end // self.page_size
        for above in node.span():
            if above.held[DEVICE][FULL] is not None:
                on_device += above.num_pages
                continue
            brought = max(min(above.end, last) - max(above.start, first), 0)
            from_storage += brought
            on_host += above.num_pages - brought
        return on_device, on_host, from_storage

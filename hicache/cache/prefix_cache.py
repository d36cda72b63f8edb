"""The controller: it owns the pools, asks the tree what to do, and books the copies.

What has to be carried out lands in `outbox`, in order; the engine hands it to the executor, and
reports each piece with `complete` when it is done.
"""

from collections import Counter
from dataclasses import dataclass

from hicache.cache.pages import PageIds, Pools
from hicache.cache.tiers.back_ups import BackUps
from hicache.cache.tiers.device_allocator import DeviceAllocator
from hicache.cache.tiers.host_allocator import HostAllocator
from hicache.cache.tiers.load_backs import LoadBacks
from hicache.cache.tiers.storage_writes import StorageWriter
from hicache.cache.tiers.transfer import (
    BackUp,
    Bookings,
    CopyState,
    LoadBack,
    Reported,
    StorageWrite,
    Work,
)
from hicache.cache.tree.actions import FreePages, free
from hicache.cache.tree.arrivals import Arrivals
from hicache.cache.tree.insertion import attach_state, insert, insert_host
from hicache.cache.tree.match import MatchResult
from hicache.cache.tree.node import DEVICE, FULL, MAMBA, SWA, Node
from hicache.cache.tree.page_history import Pressure
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.config import StorageWrites, Tiering, WritePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """Where a request starts: tokens it need not compute, by where they were held."""

    cached_len: int
    device_len: int
    host_len: int
    storage_len: int  # host pages that the request's own prefetch had brought
    load_back: LoadBack | None


class PrefixCache:
    """Keeps prefixes on device and host, within the pools it is given.

    Args:
        page_bytes: bytes of one page (full, swa) or slot (mamba), by component.
        storage_queue_bytes: host bytes that storage writes may pin; None: there is no storage.
        tiering: whether what is read from storage stays there.
        storage_writes: when host data is written to storage; `write_hits`: for `selective`.
        backs_up_answers: whether what a request leaves at its end is copied to the host.
        evicts_whole: whether the host makes room for all pages of a copy, not for those missing.
        loads_last_page: where a prompt of whole pages lacks only the last one, a request loads it
            from the host and computes one token.
        spare_pages: pages that stay free when a request takes some, if enough can be evicted.
        states_per_request: slots that a running request holds, at least two.
        loads_states_twice: a state on the host is copied to the request's slot as well.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: Pools,
        *,
        page_bytes: tuple[int, int, int],
        write_policy: WritePolicy = WritePolicy.write_through,
        load_back_threshold: int = 10,
        storage_queue_bytes: int | None = None,
        tiering: Tiering = Tiering.inclusive,
        storage_writes: StorageWrites = StorageWrites.on_back_up,
        write_hits: int = 1,
        backs_up_answers: bool = True,
        evicts_whole: bool = False,
        loads_last_page: bool = False,
        spare_pages: int = 0,
        states_per_request: int = 2,
        loads_states_twice: bool = False,
    ) -> None:
        self.tree = tree
        self.pools = pools
        self.page_size = tree.page_size
        self.write_policy = write_policy
        self._backs_up_answers = backs_up_answers
        self._loads_last_page = loads_last_page
        self._spare_pages = spare_pages
        self.states_per_request = states_per_request
        self._loads_states_twice = loads_states_twice
        self.counters: Counter[str] = Counter()
        self.arrivals = Arrivals(self.counters)
        self._bookings = Bookings(page_bytes)
        self.in_flight = self._bookings.in_flight
        self._writer = None
        if storage_queue_bytes is not None:
            self._writer = StorageWriter(
                tree,
                self._bookings,
                self.counters,
                queue_bytes=storage_queue_bytes,
                tiering=tiering,
                when=storage_writes,
                write_hits=write_hits,
            )
        # each tier makes room with the help of the one below it
        self.host_allocator = HostAllocator(
            tree, pools, self.counters, self.arrivals, self._writer, evicts_whole=evicts_whole
        )
        self._back_ups = BackUps(
            tree,
            self.host_allocator,
            self._bookings,
            self.counters,
            hits=2 if write_policy is WritePolicy.write_through_selective else 1,
        )
        write_back = self._back_ups if write_policy is WritePolicy.write_back else None
        self.device_allocator = DeviceAllocator(
            tree, pools, self.counters, self.arrivals, write_back
        )
        self._load_backs = LoadBacks(
            tree,
            self.device_allocator,
            self._bookings,
            self.counters,
            self.arrivals,
            threshold=load_back_threshold,
        )

    # -- what is to be carried out -------------------------------------------------------------

    @property
    def outbox(self) -> list[Work]:
        """What is to be begun, in order; whoever begins it puts an empty list in its place."""
        return self._bookings.outbox

    @outbox.setter
    def outbox(self, outbox: list[Work]) -> None:
        self._bookings.outbox = outbox

    @property
    def queued_write_bytes(self) -> int:
        """Host bytes that writes to storage pin."""
        return 0 if self._writer is None else self._writer.queued_bytes

    # -- how much room there is ----------------------------------------------------------------

    def available_size(self, kind: int, tier: int = DEVICE) -> int:
        """Free tokens (mamba: slots) of a pool, nothing evicted."""
        return self.pools[tier][kind].num_free * self._unit(kind)

    def evictable_size(self, kind: int) -> int:
        """Tokens (mamba: slots) that eviction could free on the device."""
        return self.device_allocator.evictable(kind) * self._unit(kind)

    def room(self, kind: int) -> int:
        """Tokens (mamba: slots) that allocation on the device can count on."""
        return self.available_size(kind) + self.evictable_size(kind)

    # -- a request's life ----------------------------------------------------------------------

    def match(self, sequence: Sequence, prompt_len: int) -> MatchResult:
        """The longest usable prefix; at least one token is left to compute. Mutates as the tree."""
        return self.tree.match(sequence.tokens, prompt_len - 1, sequence.namespace)

    def acquire(
        self,
        sequence: Sequence,
        match: MatchResult,
        *,
        prompt_len: int = 0,
        storage_start: int = 0,
        storage_end: int = 0,
    ) -> Acquired | None:
        """Lock the matched path, take pages for the load-back now, and give the request its slots.

        `prompt_len`: the tokens to compute end here; needed only for the last page.
        `[storage_start, storage_end)` are the tokens that the request's own prefetch brought.
        Falls back to the device boundary if the load-back finds no pages. None if there are no
        state slots for the request; nothing has changed then.
        """
        load_back = None
        node = match.device_node
        self.tree.history.press(Pressure.load_back, sequence.chain)
        if match.needs_host_load_back:
            held_before = self._full_by_tier(match.best_node, storage_start, storage_end)
            if self._loads_states_twice and match.mamba_host_hit_length:
                sequence.working_slot = self.device_allocator.allocate(MAMBA, 1)
            load_back = self._load_backs.load(match)
            if load_back is not None:
                node = match.best_node
        if load_back is None:
            held_before = (node.end, 0, 0)
        sequence.lock = self.tree.lock(node)
        if self.tree.has_states and not self._take_slots(sequence, node, load_back):
            # a load-back stays: it is in the tree, and will be a device hit the next time
            self._release_lock(sequence)
            return None
        sequence.tree_pages = sequence.num_pages = sequence.swa_start = node.end
        sequence.full_pages, sequence.swa_pages = [], []
        for above in node.span():
            device = above.held[DEVICE]
            sequence.full_pages += device[FULL] or []
            if self.tree.has_swa:
                sequence.swa_pages += device[SWA] or [-1] * above.num_pages
            above.hit_count += 1
        if self._writer is not None:
            self._writer.on_hit(node)
        size = self.page_size
        on_device, on_host, from_storage = held_before
        cached_len, host_len = node.end * size, on_host * size
        if self._loads_last_page and cached_len + size == prompt_len:
            last = self._load_backs.load_last(node, sequence, load_back)
            if last is not None:
                load_back, cached_len, host_len = last, prompt_len - 1, host_len + size - 1
        return Acquired(
            cached_len=cached_len,
            device_len=on_device * size,
            host_len=host_len,
            storage_len=from_storage * size,
            load_back=load_back,
        )

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take pages so that the sequence can hold `num_tokens`; evicts. All pages or none."""
        num_pages = -(-num_tokens // self.page_size)
        count = num_pages - sequence.num_pages
        if count <= 0:
            return True
        chain = sequence.chain
        is_answer = chain is not None and num_tokens > chain.target_len
        self.tree.history.press(Pressure.decode if is_answer else Pressure.prefill, chain)
        full = self.device_allocator.allocate(FULL, count, spare=self._spare_pages)
        if full is None:
            return False
        if self.tree.has_swa:
            swa = self.device_allocator.allocate(SWA, count, spare=self._spare_pages)
            if swa is None:
                self.pools[DEVICE][FULL].free(full)
                return False
            sequence.swa_pages += swa
        sequence.full_pages += full
        sequence.num_pages = num_pages
        return True

    def leave_window(self, sequence: Sequence, length: int) -> None:
        """Free the sequence's own window pages that no token from `length` on will look at.

        Those before the last page boundary below `length` are kept as well, a window of them: that
        is where an equal sequence starts, which computes its last token again.
        """
        if not self.tree.has_swa:
            return
        boundary = (length - 1) // self.page_size * self.page_size
        end = min((boundary - self.tree.window_len) // self.page_size, sequence.num_pages)
        if end <= sequence.swa_start:
            return
        first = max(sequence.swa_start, sequence.tree_pages)
        if end > first:
            self.pools[DEVICE][SWA].free(sequence.swa_pages[first:end])
        sequence.swa_start = end

    def take_state_slot(self) -> PageIds | None:
        """A slot for a state that is about to be captured, or None if every one is locked."""
        self.tree.history.press(Pressure.slot)
        return self.device_allocator.allocate(MAMBA, 1)

    def publish(self, sequence: Sequence, num_pages: int, *, is_answer: bool = False) -> None:
        """Put the sequence's pages `[tree_pages, num_pages)` and its states into the tree.

        The sequence goes on reading them, under a lock that has moved to their end. `is_answer`:
        the prompt has been published before.
        """
        tree = self.tree
        lock = sequence.lock
        assert lock is not None
        node = lock.node
        first = sequence.tree_pages
        cuts = {num_pages, sequence.swa_start, *sequence.states}
        if tree.has_swa and num_pages - tree.window_pages > sequence.swa_start + 1:
            cuts.add(num_pages - tree.window_pages)  # so that one lock pins one window
        actions: list[FreePages] = []
        for cut in sorted(cut for cut in cuts if first <= cut <= num_pages):
            node = insert(tree, node, sequence, cut, actions)
            state = sequence.states.pop(cut, None)
            if state is not None and not attach_state(tree, node, state):
                actions.append(FreePages(DEVICE, MAMBA, state))
        tree.residency.touch_window(node)
        free(actions, self.pools)
        if node is not lock.node:
            sequence.lock = tree.lock(node)
            tree.release(lock)
            sequence.tree_pages = max(num_pages, first)
        if sequence.chain is not None:
            tree.history.press(Pressure.back_up, sequence.chain)
            tree.history.publish(sequence.chain, first, num_pages)
        if self.write_policy is not WritePolicy.write_back and (
            self._backs_up_answers or not is_answer
        ):
            self._back_ups.save_path(node)

    def finish(self, sequence: Sequence, num_pages: int, *, is_answer: bool = True) -> None:
        """Publish the first `num_pages` and give everything else back."""
        self.publish(sequence, num_pages, is_answer=is_answer)
        self.abandon(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """Give back all that the sequence holds and the tree does not."""
        first, end = sequence.tree_pages, sequence.num_pages
        if sequence.chain is not None:
            self.tree.history.abandon(sequence.chain, first, end)
        self.pools[DEVICE][FULL].free(sequence.full_pages[first:end])
        if self.tree.has_swa:
            own = max(first, sequence.swa_start)
            self.pools[DEVICE][SWA].free(sequence.swa_pages[own:end])
        slots = (sequence.working_slot, sequence.boundary_slot, sequence.spare_slots)
        for slot in (*slots, *sequence.states.values()):
            if slot is not None:
                self.pools[DEVICE][MAMBA].free(slot)
        sequence.working_slot = sequence.boundary_slot = sequence.spare_slots = None
        sequence.states.clear()
        sequence.num_pages = sequence.tree_pages = 0
        self._release_lock(sequence)

    # -- copies that are done ------------------------------------------------------------------

    def complete(self, transfer: Reported) -> None:
        """Release what a transfer held; a back-up goes on to storage."""
        self.in_flight.discard(transfer)
        if isinstance(transfer, StorageWrite):
            assert self._writer is not None
            self._writer.on_written(transfer)
        else:
            for lock in transfer.locks:
                self.tree.release(lock)
        if isinstance(transfer, BackUp) and self._writer is not None:
            self._writer.on_backed_up(transfer)
        for host_lock in transfer.host_locks:
            self.tree.release(host_lock)

    # -- what prefetch has brought -----------------------------------------------------------------

    def insert_host(
        self,
        anchor: Node,
        sequence: Sequence,
        pages: tuple[PageIds, PageIds, PageIds],
    ) -> int:
        """Publish staged pages below `anchor`, with their window and state.

        Returns how many full pages were new.
        """
        actions: list[FreePages] = []
        node = insert_host(self.tree, anchor, sequence, pages, actions)
        free(actions, self.pools)
        if self._writer is not None:
            self._writer.on_read(node.span(anchor.end), node, pages)
        full = set(pages[FULL])
        for action in actions:
            if action.kind == FULL:
                full.difference_update(action.page_ids)
        self.arrivals.count(len(pages[FULL]) - len(full), "duplicate")
        self.arrivals.publish(full)
        return len(full)

    # -- inside --------------------------------------------------------------------------------

    def _unit(self, kind: int) -> int:
        return 1 if kind == MAMBA else self.page_size

    def _take_slots(self, sequence: Sequence, node: Node, load_back: LoadBack | None) -> bool:
        self.tree.history.press(Pressure.slot, sequence.chain)
        taken = sequence.working_slot or []  # what a load-back filled has its slot already
        slots = self.device_allocator.allocate(MAMBA, self.states_per_request - len(taken))
        if slots is None:
            self.pools[DEVICE][MAMBA].free(taken)
            sequence.working_slot = None
            return False
        slots = taken + slots
        sequence.working_slot, sequence.boundary_slot = slots[:1], slots[1:2]
        sequence.spare_slots = slots[2:]
        state = node.held[DEVICE][MAMBA]
        if self._loads_states_twice and load_back is not None and load_back.num_pages[MAMBA]:
            self._load_backs.load_again(load_back, sequence.working_slot)
        elif state is not None:
            self.outbox.append(CopyState(source=state, target=sequence.working_slot))
        return True

    def _release_lock(self, sequence: Sequence) -> None:
        if sequence.lock is not None:
            self.tree.release(sequence.lock)
            sequence.lock = None

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

"""The controller: it owns the pools, asks the tree what to do, and books the copies.

What has to be carried out lands in `outbox`, in order; the engine hands it to the executor, and
reports each piece with `complete` when it is done.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hicache.cache.actions import FreePages, Plan
from hicache.cache.insertion import attach_state, insert, insert_host
from hicache.cache.keys import keys_of
from hicache.cache.lock import Lock
from hicache.cache.match import MatchResult
from hicache.cache.node import DEVICE, FULL, HOST, KIND_NAMES, MAMBA, SWA, TIER_NAMES, Node
from hicache.cache.pages import NO_PAGES, PageAllocator, PageIds
from hicache.cache.sequence import Sequence
from hicache.cache.transfer import (
    BackUp,
    CopyState,
    LoadBack,
    Move,
    StorageDelete,
    StorageWrite,
)
from hicache.cache.tree import RadixTree
from hicache.config import StorageWrites, Tiering, WritePolicy

Pools = tuple[list[PageAllocator], list[PageAllocator]]  # by tier and component


class OutOfPagesError(RuntimeError):
    """The prefill of an admitted request found no pages: admission had promised too much."""


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
    ) -> None:
        self.tree = tree
        self.pools = pools
        self.page_size = tree.page_size
        self.page_bytes = page_bytes
        self.outbox: list[LoadBack | BackUp | CopyState | StorageWrite | StorageDelete] = []
        self.counters: Counter[str] = Counter()
        self.queued_write_bytes = 0
        self.in_flight: set[LoadBack | BackUp | StorageWrite] = set()
        self.write_policy = write_policy
        self._back_up_hits = 2 if write_policy is WritePolicy.write_through_selective else 1
        self._load_back_threshold = load_back_threshold
        self._storage_queue_bytes = storage_queue_bytes
        has_storage = storage_queue_bytes is not None
        self._is_exclusive = has_storage and tiering is Tiering.exclusive
        self._writes_hits = has_storage and storage_writes is StorageWrites.selective
        self._writes_evicted = has_storage and storage_writes is StorageWrites.on_host_eviction
        self._write_hits = write_hits

    # -- how much room there is ----------------------------------------------------------------

    def available_size(self, kind: int, tier: int = DEVICE) -> int:
        """Free tokens (mamba: slots) of a pool, nothing evicted."""
        return self.pools[tier][kind].num_free * self._unit(kind)

    def evictable_size(self, kind: int) -> int:
        """Tokens (mamba: slots) that eviction could free on the device."""
        tree = self.tree
        return (
            tree.residency.resident[DEVICE][kind] - tree.residency.protected[DEVICE][kind]
        ) * self._unit(kind)

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
        storage_start: int = 0,
        storage_end: int = 0,
    ) -> Acquired | None:
        """Lock the matched path, take pages for the load-back now, and give the request its slots.

        `[storage_start, storage_end)` are the tokens that the request's own prefetch brought.
        Falls back to the device boundary if the load-back finds no pages. None if there are no
        state slots for the request; nothing has changed then.
        """
        load_back = None
        node = match.device_node
        if match.needs_host_load_back:
            held_before = self._full_by_tier(match.best_node, storage_start, storage_end)
            load_back = self._load_back(match)
            if load_back is not None:
                node = match.best_node
        if load_back is None:
            held_before = (node.end, 0, 0)
        sequence.lock = self.tree.lock(node)
        if self.tree.has_states and not self._take_slots(sequence, node):
            # a load-back stays: it is in the tree, and will be a device hit the next time
            self._release_lock(sequence)
            return None
        sequence.tree_pages = sequence.num_pages = sequence.swa_start = node.end
        sequence.reserve(node.end + 1)
        for above in node.span():
            for kind, table in ((FULL, sequence.full_pages), (SWA, sequence.swa_pages)):
                page_ids = above.held[DEVICE][kind]
                if page_ids is not None:
                    table[above.start : above.end] = page_ids
            above.hit_count += 1
        if self._writes_hits:
            self._write_hit(node)
        size = self.page_size
        on_device, on_host, from_storage = held_before
        return Acquired(
            cached_len=node.end * size,
            device_len=on_device * size,
            host_len=on_host * size,
            storage_len=from_storage * size,
            load_back=load_back,
        )

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take pages so that the sequence can hold `num_tokens`; evicts. All pages or none."""
        num_pages = -(-num_tokens // self.page_size)
        count = num_pages - sequence.num_pages
        if count <= 0:
            return True
        full = self._allocate(DEVICE, FULL, count)
        if full is None:
            return False
        swa = NO_PAGES
        if self.tree.has_swa:
            taken = self._allocate(DEVICE, SWA, count)
            if taken is None:
                self.pools[DEVICE][FULL].free(full)
                return False
            swa = taken
        sequence.reserve(num_pages)
        sequence.full_pages[sequence.num_pages : num_pages] = full
        if self.tree.has_swa:
            sequence.swa_pages[sequence.num_pages : num_pages] = swa
        sequence.num_pages = num_pages
        return True

    def leave_window(self, sequence: Sequence, length: int) -> None:
        """Free the sequence's own window pages that no token from `length` on will look at.

        Those that a prefix ending at the last page boundary needs are kept as well: it is where
        the sequence will be published.
        """
        if not self.tree.has_swa:
            return
        boundary = length // self.page_size * self.page_size
        end = min((boundary - self.tree.window_len) // self.page_size, sequence.num_pages)
        if end <= sequence.swa_start:
            return
        first = max(sequence.swa_start, sequence.tree_pages)
        if end > first:
            self.pools[DEVICE][SWA].free(sequence.swa_pages[first:end])
            sequence.swa_pages[first:end] = -1
        sequence.swa_start = end

    def take_state_slot(self) -> PageIds | None:
        """A slot for a state that is about to be captured, or None if every one is locked."""
        return self._allocate(DEVICE, MAMBA, 1)

    def publish(self, sequence: Sequence, num_pages: int) -> None:
        """Put the sequence's pages `[tree_pages, num_pages)` and its states into the tree.

        The sequence goes on reading them, under a lock that has moved to their end.
        """
        tree = self.tree
        lock = sequence.lock
        assert lock is not None
        node = lock.node
        first = sequence.tree_pages
        cuts = {num_pages, sequence.swa_start, *sequence.states}
        if tree.has_swa:  # so that one lock pins one window
            cuts.add(num_pages - tree.window_pages)
        actions: list[FreePages] = []
        for cut in sorted(cut for cut in cuts if first <= cut <= num_pages):
            node = insert(tree, node, sequence, cut, actions)
            state = sequence.states.pop(cut, None)
            if state is not None and (node.is_root or not attach_state(tree, node, state)):
                actions.append(FreePages(DEVICE, MAMBA, state))
        self._apply(actions)
        if node is not lock.node:
            sequence.lock = tree.lock(node)
            tree.release(lock)
            sequence.tree_pages = max(num_pages, first)
        if self.write_policy is not WritePolicy.write_back:
            self._back_up_path(node)

    def finish(self, sequence: Sequence, num_pages: int) -> None:
        """Publish the first `num_pages` and give everything else back."""
        self.publish(sequence, num_pages)
        self.abandon(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """Give back all that the sequence holds and the tree does not."""
        first, end = sequence.tree_pages, sequence.num_pages
        self.pools[DEVICE][FULL].free(sequence.full_pages[first:end])
        if self.tree.has_swa:
            own = max(first, sequence.swa_start)
            self.pools[DEVICE][SWA].free(sequence.swa_pages[own:end])
        for slot in (sequence.working_slot, sequence.boundary_slot, *sequence.states.values()):
            if slot is not None:
                self.pools[DEVICE][MAMBA].free(slot)
        sequence.working_slot = sequence.boundary_slot = None
        sequence.states.clear()
        sequence.num_pages = sequence.tree_pages = 0
        self._release_lock(sequence)

    # -- copies that are done ------------------------------------------------------------------

    def complete(self, transfer: LoadBack | BackUp | StorageWrite) -> None:
        """Release what a transfer held; a back-up goes on to storage."""
        self.in_flight.discard(transfer)
        if isinstance(transfer, StorageWrite):
            self.queued_write_bytes -= transfer.num_bytes
        else:
            for lock in transfer.locks:
                self.tree.release(lock)
        if isinstance(transfer, BackUp) and self._storage_queue_bytes is not None:
            if self._writes_hits:
                self._write_hit(transfer.node)
            elif not self._writes_evicted:
                self._write_to_storage(transfer)
        for host_lock in transfer.host_locks:
            self.tree.release(host_lock)

    # -- host memory for prefetch --------------------------------------------------------------

    def allocate_host(self, kind: int, count: int, *, evict: bool) -> PageIds | None:
        """Host pages (mamba: slots), all or none."""
        if evict:
            return self._allocate(HOST, kind, count)
        return self.pools[HOST][kind].allocate(count)

    def evict_host(self, kind: int, count: int) -> None:
        """Drop this many pages (mamba: slots) of the host, or all that may go, free or not."""
        pool = self.pools[HOST][kind]
        wanted = pool.num_free + count
        while pool.num_free < wanted and self._evict_one(HOST, kind):
            pass

    def free_host(self, kind: int, page_ids: PageIds) -> None:
        """Give staged host pages back."""
        self.pools[HOST][kind].free(page_ids)

    def insert_host(
        self, anchor: Node, sequence: Sequence, pages: tuple[PageIds, PageIds, PageIds]
    ) -> int:
        """Publish staged pages below `anchor`; returns how many full pages were there already."""
        actions: list[FreePages] = []
        node = insert_host(self.tree, anchor, sequence, pages, actions)
        self._apply(actions)
        self._came_from_storage(node.span(anchor.end), node, pages)
        return sum(len(action.page_ids) for action in actions if action.kind == FULL)

    # -- inside --------------------------------------------------------------------------------

    def _unit(self, kind: int) -> int:
        return 1 if kind == MAMBA else self.page_size

    def _apply(self, actions: list[FreePages]) -> None:
        for action in actions:
            self.pools[action.tier][action.kind].free(action.page_ids)

    def _allocate(self, tier: int, kind: int, count: int) -> PageIds | None:
        pool = self.pools[tier][kind]
        if pool.num_free < count:
            if tier == DEVICE and self.room(kind) < count * self._unit(kind):
                return None  # evicting everything would not do
            while pool.num_free < count:
                if not self._evict_one(tier, kind):
                    return None
        return pool.allocate(count)

    def _evict_one(self, tier: int, kind: int) -> bool:
        tree = self.tree
        actions: list[FreePages] = []
        if tier == HOST:
            victim = tree.residency.host_victim(kind)
            if victim is None:
                return False
            if self._writes_evicted:
                self._write_leaving(victim, kind)
            tree.evict_host(victim, kind, actions)
        else:
            victim = tree.residency.device_victim(kind)
            if victim is None:
                return False
            if self.write_policy is WritePolicy.write_back:
                self._save_victim(victim, kind)
                if not tree.residency.may_leave_device(victim):
                    return False
            tree.evict_device(victim, kind, actions)
        for action in actions:
            name = f"evict/{TIER_NAMES[action.tier]}_{KIND_NAMES[action.kind]}_pages"
            self.counters[name] += len(action.page_ids)
        self._apply(actions)
        return True

    def _take_slots(self, sequence: Sequence, node: Node) -> bool:
        slots = self._allocate(DEVICE, MAMBA, 2)
        if slots is None:
            return False
        sequence.working_slot, sequence.boundary_slot = slots[:1], slots[1:]
        state = node.held[DEVICE][MAMBA]
        if state is not None:
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

    def _load_back(self, match: MatchResult) -> LoadBack | None:
        tree, node = self.tree, match.best_node
        wants_sidecar = match.swa_host_hit_length or match.mamba_host_hit_length
        if match.host_hit_length < self._load_back_threshold and not wants_sidecar:
            return None
        plan = tree.plan_load_back(node)
        lock = tree.lock(node)
        swa_start = plan.swa[0].start if plan.swa else node.end
        full_start = plan.full[0].start if plan.full else node.end
        host_lock = tree.lock_host(
            node, full_start, swa_start=swa_start, with_state=bool(plan.mamba)
        )
        taken: list[PageIds] = []
        for kind in (FULL, SWA, MAMBA):
            count = plan.num_pages(kind)
            page_ids = self._allocate(DEVICE, kind, count) if count else NO_PAGES
            if page_ids is None:
                for earlier, page_ids in enumerate(taken):
                    self.pools[DEVICE][earlier].free(page_ids)
                tree.release(host_lock)
                tree.release(lock)
                self.counters["load_back/failed_count"] += 1
                return None
            taken.append(page_ids)
        moves = []
        for kind in (FULL, SWA, MAMBA):
            nodes = plan[kind]
            if not nodes:
                continue
            sources = []
            for each, part in _dealt(taken[kind], nodes, kind):
                held = each.held[HOST][kind]
                assert held is not None
                sources.append(held)
                tree.residency.put(each, DEVICE, kind, part)
            moves.append(Move(kind, np.concatenate(sources), taken[kind]))
        counts = (len(taken[FULL]), len(taken[SWA]), len(taken[MAMBA]))
        load_back = LoadBack(
            moves=moves,
            num_bytes=self._bytes(counts),
            node=node,
            locks=[lock],
            host_locks=[host_lock],
            num_pages=counts,
        )
        self.in_flight.add(load_back)
        self.outbox.append(load_back)
        self.counters["transfer/load_back_bytes"] += load_back.num_bytes
        return load_back

    def _bytes(self, counts: tuple[int, int, int]) -> int:
        return sum(count * size for count, size in zip(counts, self.page_bytes, strict=True))

    def _back_up_path(self, node: Node) -> None:
        # write_through_selective: only as deep as has been hit often enough
        while not node.is_root and node.hit_count < self._back_up_hits:
            assert node.parent is not None
            node = node.parent
        if not node.is_root:
            self._back_up(node, self.tree.plan_back_up(node), is_fence=False)

    def _save_victim(self, victim: Node, kind: int) -> None:
        device, host = victim.held
        leaf = victim in self.tree.residency.leaves[DEVICE]
        kinds = self.tree.kinds if leaf else [other for other in (SWA, MAMBA) if other >= kind]
        lost = [
            [victim] if other in kinds and device[other] is not None and host[other] is None else []
            for other in (FULL, SWA, MAMBA)
        ]
        self._back_up(victim, Plan(*lost), is_fence=True)

    def _back_up(self, node: Node, plan: Plan, *, is_fence: bool) -> None:
        tree = self.tree
        lock = tree.lock(node)  # making room on the host may take other device data along
        moves: list[Move] = []
        counts = [0, 0, 0]
        for kind in (FULL, SWA, MAMBA):
            sources, targets = [], []
            for each in plan[kind]:
                if kind != FULL and plan.full and each.held[HOST][FULL] is None:
                    continue  # its full pages found no room, and sidecars need them
                source = each.held[DEVICE][kind]
                assert source is not None
                target = self._allocate(HOST, kind, len(source))
                if target is None:
                    lost = plan.num_pages(kind) - counts[kind]
                    self.counters[f"back_up/dropped_{KIND_NAMES[kind]}_pages"] += lost
                    break
                tree.residency.put(each, HOST, kind, target)
                sources.append(source)
                targets.append(target)
                counts[kind] += len(source)
            if sources:
                moves.append(Move(kind, np.concatenate(sources), np.concatenate(targets)))
        if not moves:
            tree.release(lock)
            return
        copied = [
            [each for each in plan[kind] if each.held[HOST][kind] is not None]
            for kind in (FULL, SWA, MAMBA)
        ]
        deepest = max((each for nodes in copied for each in nodes), key=lambda each: each.end)
        full_start = copied[FULL][0].start if copied[FULL] else deepest.end
        swa_start = copied[SWA][0].start if copied[SWA] else deepest.end
        num_bytes = self._bytes((counts[0], counts[1], counts[2]))
        back_up = BackUp(
            moves=moves,
            num_bytes=num_bytes,
            node=deepest,
            full_start=full_start,
            swa_start=swa_start,
            state_nodes=copied[MAMBA],
            is_fence=is_fence,
            host_locks=self._lock_copies(deepest, full_start, swa_start, copied[MAMBA]),
        )
        if not is_fence:
            back_up.locks = [tree.lock(deepest), *(tree.lock(each) for each in copied[MAMBA])]
        tree.release(lock)
        self.in_flight.add(back_up)
        self.outbox.append(back_up)
        self.counters["transfer/back_up_bytes"] += num_bytes

    def _lock_copies(
        self, node: Node, full_start: int, swa_start: int, state_nodes: list[Node]
    ) -> list[Lock]:
        tree = self.tree
        locks = [tree.lock_host(node, full_start, swa_start=swa_start)]
        # evicting a node's window would take its state along, so the state's lock holds both
        locks += [
            tree.lock_host(each, each.end, swa_start=each.start, with_state=True)
            for each in state_nodes
        ]
        return locks

    def _came_from_storage(
        self, nodes: list[Node], last: Node, pages: tuple[PageIds, PageIds, PageIds]
    ) -> None:
        # what was read: full pages of all nodes, the window before the end and the state at it
        swa_first = last.end - len(pages[SWA])
        read = [(each, FULL) for each in nodes]
        read += [(each, SWA) for each in nodes if each.start >= swa_first]
        read += [(last, MAMBA)] if len(pages[MAMBA]) else []
        for each, kind in read:
            each.stored[kind] = not self._is_exclusive
        if self._is_exclusive:
            keys = [key for each, kind in read for key in keys_of(each, kind)]
            self.outbox.append(StorageDelete(keys=keys))
            self.counters["storage/dropped_read_pages"] += len(keys)

    def _write_hit(self, node: Node) -> None:
        # what of the path has been hit often enough, is whole on the host, and is not there yet;
        # to be inserted counts as a hit of its own
        worthy = [
            (each, kind)
            for each in node.span()
            if each.hit_count > self._write_hits
            for kind in self.tree.kinds
            if each.held[HOST][kind] is not None and not each.stored[kind]
        ]
        if worthy:
            coming = self._coming()
            self._write_nodes([item for item in worthy if item[0] not in coming])

    def _coming(self) -> set[Node]:
        # nodes whose host copies are still under way
        nodes: set[Node] = set()
        for transfer in self.in_flight:
            if isinstance(transfer, BackUp):
                first = min(transfer.full_start, transfer.swa_start)
                nodes.update(transfer.node.span(first), transfer.state_nodes)
        return nodes

    def _write_leaving(self, victim: Node, kind: int) -> None:
        # before the victim's host data is evicted: what of it is nowhere else
        device, host = victim.held
        is_leaf = victim in self.tree.residency.leaves[HOST]
        leaving = [
            (victim, other)
            for other in self.tree.kinds
            if (is_leaf or other >= kind) and host[other] is not None and device[other] is None
            if not victim.stored[other]
        ]
        if leaving:
            self._write_nodes(leaving, is_given_away=True)

    def _write_nodes(self, items: list[tuple[Node, int]], *, is_given_away: bool = False) -> None:
        keys: list[bytes] = []
        pages: list[tuple[int, int]] = []
        for node, kind in items:
            page_ids = node.held[HOST][kind]
            assert page_ids is not None
            keys += keys_of(node, kind)
            pages += [(kind, page_id) for page_id in page_ids.tolist()]
        num_bytes = sum(self.page_bytes[kind] for kind, _ in pages)
        assert self._storage_queue_bytes is not None
        if not pages:
            return
        if self.queued_write_bytes + num_bytes > self._storage_queue_bytes:
            self.counters["storage/dropped_write_pages"] += len(pages)
            return
        locks = [] if is_given_away else [self._lock_host_alone(*item) for item in items]
        write = StorageWrite(
            keys=keys,
            pages=pages,
            num_bytes=num_bytes,
            host_locks=locks,
            is_given_away=is_given_away,
        )
        for node, kind in items:
            # an exclusive store loses it again when it is read
            node.stored[kind] = True
        self.queued_write_bytes += num_bytes
        self.in_flight.add(write)
        self.outbox.append(write)

    def _lock_host_alone(self, node: Node, kind: int) -> Lock:
        return self.tree.lock_host(
            node,
            node.start if kind == FULL else node.end,
            swa_start=node.start if kind == SWA else None,
            with_state=kind == MAMBA,
        )

    def _write_to_storage(self, back_up: BackUp) -> None:
        node = back_up.node
        keys: list[bytes] = []
        pages: list[tuple[int, int]] = []
        spans = (node.span(back_up.full_start), node.span(back_up.swa_start))
        for kind, nodes in zip((FULL, SWA), spans, strict=True):
            for each in nodes:
                page_ids = each.held[HOST][kind]
                if page_ids is None:
                    continue
                keys += keys_of(each, kind)
                pages += [(kind, page_id) for page_id in page_ids.tolist()]
        for each in back_up.state_nodes:
            slot = each.held[HOST][MAMBA]
            if slot is not None:
                keys += keys_of(each, MAMBA)
                pages.append((MAMBA, int(slot[0])))
        num_bytes = sum(self.page_bytes[kind] for kind, _ in pages)
        assert self._storage_queue_bytes is not None
        if self.queued_write_bytes + num_bytes > self._storage_queue_bytes:
            self.counters["storage/dropped_write_pages"] += len(pages)
            return
        write = StorageWrite(
            keys=keys,
            pages=pages,
            num_bytes=num_bytes,
            host_locks=self._lock_copies(
                node, back_up.full_start, back_up.swa_start, back_up.state_nodes
            ),
        )
        self.queued_write_bytes += num_bytes
        self.in_flight.add(write)
        self.outbox.append(write)


def _dealt(page_ids: PageIds, nodes: list[Node], kind: int) -> list[tuple[Node, PageIds]]:
    # each node's share of ids that were allocated for all of them
    bounds = [0]
    for node in nodes:
        bounds.append(bounds[-1] + (1 if kind == MAMBA else node.num_pages))
    parts = [page_ids[first:last] for first, last in pairwise(bounds)]
    return list(zip(nodes, parts, strict=True))

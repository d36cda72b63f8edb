"""Checks that the cache is consistent, by recomputing everything from the radix tree.

Messages number the invariants ("laws"). 1: windows and states need full-attention KV. 2: no node is
empty. 3: a prefix is held whole. 4: locks nest. 5: pages are conserved. 6: queues equal their
definitions. 7: copies name nodes that exist and are locked. 8: exclusive tiers hold different data.
9: each prefetched page has one fate.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NoReturn

import numpy as np

from hicache.cache.kinds import FULL
from hicache.cache.pages import PageIds
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import FATES, BackUp, LoadBack, StorageWrite
from hicache.cache.tree.node import DEVICE, HOST, TIER_NAMES, TIERS, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.engine.loop import Engine

ByKind = tuple[list[list[PageIds]], ...]  # by tier and kind


class BrokenLawError(AssertionError):
    """Raised when a check finds that the state of the KV cache is inconsistent."""


def check(
    cache: PrefixCache,
    prefetcher: Prefetcher | None,
    sequences: Iterable[Sequence],
    loose_slots: Iterable[PageIds] = (),
) -> None:
    """Check that the state of the KV cache is consistent. O(nodes + pages).

    Args:
        cache: the cache, with its radix tree, page pools and unfinished copies.
        prefetcher: the running reads from storage to host; None if there is no storage.
        sequences: all running requests that hold cache pages.
        loose_slots: Mamba state slots that the current step will fill, and that no request holds
            yet.

    Raises:
        BrokenLawError: the state is inconsistent.
    """
    tree = cache.tree
    survey = _Survey(tree)
    # only write_back allows host copies without the parent's, and sidecars without full
    strict_host = not cache.tree.demotes
    for node in tree.nodes():
        _check_node(tree, node, strict_host=strict_host)
        survey.count(node)
    _check_locks(tree, survey)
    _check_counts(tree, survey)
    _check_queues(tree, survey)
    running = list(sequences)
    _check_pages(cache, prefetcher, survey.page_ids, running, loose_slots)
    _check_fates(cache, survey.page_ids[HOST][FULL])
    # a load-back may also fill the slot in which a running request computes
    for kind in tree.kinds.points:
        survey.locked[DEVICE][kind] += [each.working_slot for each in running if each.working_slot]
    _check_transfers(cache, survey.locked)
    if prefetcher is not None:
        _check_anchors(prefetcher, set(survey.nodes))


def check_laws(engine: Engine) -> None:
    scheduler = engine.scheduler
    reqs = [*scheduler.running, *scheduler.started]
    reqs += [extend.req for extend in engine.extending]
    tree = engine.cache.tree
    slots = [slot for extend in engine.extending for _, slot in extend.saves]
    if slots:  # some enter the tree when planned
        held = {id(node.held[DEVICE][kind]) for node in tree.nodes() for kind in tree.kinds.points}
        slots = [slot for slot in slots if id(slot) not in held]
    check(engine.cache, engine.prefetcher, {req.sequence for req in reqs}, slots)
    for req in reqs:
        if req.blocked_since_ns is not None:
            raise BrokenLawError(
                f"law 9: request {req.request.id} is running but still counted as "
                "waiting for storage"
            )


class _Survey:
    def __init__(self, tree: RadixTree) -> None:
        self.nodes: list[Node] = []  # parents before their children
        places = range(tree.kinds.size)
        self.page_ids: ByKind = tuple([[] for _ in places] for _ in TIERS)
        self.locked: ByKind = tuple([[] for _ in places] for _ in TIERS)  # part of `page_ids`
        self.evictable: tuple[list[set[Node]], ...] = tuple([set() for _ in places] for _ in TIERS)
        self._kinds, self._evicts_mirrors = tree.kinds, tree.evicts_mirrors

    def count(self, node: Node) -> None:
        self.nodes.append(node)
        device, num_pages, points = node.held[DEVICE], node.num_pages, self._kinds.points
        mirrors = self._evicts_mirrors
        for tier in TIERS:
            held, locks = node.held[tier], node.locks[tier]
            for kind in self._kinds.numbers:
                page_ids = held[kind]
                if page_ids is None:
                    continue
                wanted = 1 if kind in points else num_pages
                if len(page_ids) != wanted:
                    _break(5, f"{node} holds {len(page_ids)} page ids instead of {wanted}")
                self.page_ids[tier][kind].append(page_ids)
                if node.path_locks if kind == FULL and tier == DEVICE else locks[kind]:
                    self.locked[tier][kind].append(page_ids)
                elif kind != FULL and (tier == DEVICE or mirrors or device[kind] is None):
                    self.evictable[tier][kind].add(node)
        is_there, is_free = device[FULL] is not None, not node.path_locks
        if is_there and is_free and not node.num_children[DEVICE]:
            self.evictable[DEVICE][FULL].add(node)
        on_host = node.held[HOST][FULL] is not None
        may_leave = mirrors if is_there else is_free
        if on_host and may_leave and not node.num_children[HOST] and not any(node.locks[HOST]):
            self.evictable[HOST][FULL].add(node)


def check_drained(cache: PrefixCache, prefetcher: Prefetcher | None) -> None:
    check(cache, prefetcher, [])
    for tier in TIERS:
        for kind in cache.tree.kinds.numbers:
            protected = cache.tree.residency.protected[tier][kind]
            name = cache.tree.kinds.names[kind]
            what = f"{name} pages are still locked on the {TIER_NAMES[tier]}"
            _hold(protected == 0, 5, f"{protected} {what}")
    for node in cache.tree.nodes():
        if node.path_locks or any(map(any, node.locks)):
            _break(4, f"{node} is still locked after the run")
    _hold(not cache.in_flight, 7, f"{len(cache.in_flight)} transfers are still under way")
    _hold(cache.queued_write_bytes == 0, 7, f"{cache.queued_write_bytes} bytes wait to be written")
    if prefetcher is not None:
        _hold(not prefetcher.active, 5, f"{len(prefetcher.active)} prefetches are still active")
        _hold(not prefetcher.lingering, 5, f"{len(prefetcher.lingering)} prefetches are unread")
        tokens = prefetcher.occupied_tokens
        _hold(tokens == 0, 5, f"{tokens} tokens are still occupied by prefetches")
        counters = cache.counters
        discarded = [name for name in counters if name.startswith("prefetch/discarded_")]
        ended = sum(counters[name] for name in ("prefetch/read_pages", *discarded))
        _hold(
            counters["prefetch/staged_pages"] == ended,
            9,
            f"{counters['prefetch/staged_pages']} pages were staged and {ended} accounted for",
        )


def _hold(condition: object, law: int, message: str) -> None:
    if not condition:
        raise BrokenLawError(f"law {law}: {message}")


def _break(law: int, message: str) -> NoReturn:
    raise BrokenLawError(f"law {law}: {message}")


def _check_node(tree: RadixTree, node: Node, *, strict_host: bool) -> None:
    parent = node.parent
    assert parent is not None
    if parent.children.get(node.edge[: tree.page_bytes]) is not node:
        _break(2, f"{node} is not its parent's child")
    if len(node.edge) != node.num_pages * tree.page_bytes:
        _break(2, f"{node} has an edge that is not as long as its pages")
    if node.start != parent.start + parent.num_pages:
        _break(2, f"{node} does not begin where its parent ends")
    device, host = node.held
    # with `keeps_sidecars`, windows and states may outlive their full-attention KV
    is_used = tree.keeps_sidecars and (node.children or any(map(any, node.held)))
    if device[FULL] is None and host[FULL] is None and not is_used:
        _break(2, f"{node} is on neither the device nor the host")
    if tree.knobs.device_host == "exclusive":
        for kind in tree.kinds.numbers:
            if None not in (device[kind], host[kind]) and not node.locks[HOST][kind]:
                _break(8, f"{node} has {tree.kinds.names[kind]} on device and host")
    if node.digests is not None and len(node.digests) != node.num_pages:
        _break(2, f"{node} has another number of digests than pages")
    for tier in (DEVICE, HOST) if strict_host else (DEVICE,):
        held = node.held[tier]
        if held[FULL] is None:
            if not tree.keeps_sidecars and any(held[kind] is not None for kind in tree.kinds.aux):
                _break(1, f"{node} holds sidecars without full on the {TIER_NAMES[tier]}")
        elif not parent.is_root and parent.held[tier][FULL] is None:
            _break(3, f"{node} is on the {TIER_NAMES[tier]} and its parent {parent} is not")
    locks = node.locks[HOST]
    for point in tree.kinds.points:
        for window, _ in tree.kinds.windows:
            if locks[point] > locks[window] and host[window] is not None:
                _break(4, f"{node} has a locked state but an unlocked window")


def _check_locks(tree: RadixTree, survey: _Survey) -> None:
    num_ending: dict[Node, int] = {}  # locks of the device that end at a node or below
    for node in reversed(survey.nodes):
        locked = [child for child in node.children.values() if child.path_locks]
        own = node.path_locks - len(locked)
        if own < 0:
            _break(4, f"{node} has fewer locks than locked children")
        num_ending[node] = own + sum([num_ending[child] for child in locked])
        locks = node.locks[DEVICE]
        for kind, window in tree.kinds.windows:
            # with the rule `trims_leaves`, a lock covers what its request still reads
            covers = window.first(node.end) < node.end and not tree.rules.trims_leaves
            least = own if covers else 0
            if not least <= locks[kind] <= num_ending[node]:
                _break(4, f"{node} has window locks that do not match its full locks")
        for kind in tree.kinds.points:
            if locks[kind] != own:
                _break(4, f"{node} has state locks that do not match its full locks")


def _check_counts(tree: RadixTree, survey: _Survey) -> None:
    residency, count = tree.residency, len(survey.nodes)
    _hold(tree.num_nodes == count, 6, f"the tree counts {tree.num_nodes} nodes but has {count}")
    for tier in TIERS:
        for kind in tree.kinds.numbers:
            there = (survey.page_ids[tier][kind], survey.locked[tier][kind])
            found = tuple(sum(map(len, page_ids)) for page_ids in there)
            counted = (residency.resident[tier][kind], residency.protected[tier][kind])
            _hold(
                found == counted,
                5,
                f"{TIER_NAMES[tier]} {tree.kinds.names[kind]}: resident and protected pages are "
                f"{found}, counted as {counted}",
            )


def _check_queues(tree: RadixTree, survey: _Survey) -> None:
    for node in (*tree.roots.values(), *survey.nodes):
        for tier, num in zip(TIERS, node.num_children, strict=True):
            there = [each for each in node.children.values() if each.held[tier][FULL] is not None]
            if num != len(there):
                _break(6, f"{node} counts {num} children on the {TIER_NAMES[tier]}")
    for tier in TIERS:
        for kind in tree.kinds.numbers:
            queue = tree.residency.queues[tier][kind]
            # a window or state that was locked after it was queued may stay queued
            queued = {node for node in queue if kind == FULL or not node.locks[tier][kind]}
            what = f"the {tree.kinds.names[kind]} queue of the {TIER_NAMES[tier]}"
            _hold(queued == survey.evictable[tier][kind], 6, f"{what} differs from the tree")


def _check_pages(
    cache: PrefixCache,
    prefetcher: Prefetcher | None,
    held: ByKind,
    sequences: list[Sequence],
    loose_slots: Iterable[PageIds],
) -> None:
    device, kinds = held[DEVICE], cache.tree.kinds
    for sequence in sequences:
        end = sequence.num_pages
        for kind in kinds.paged if end else ():
            own = sequence.own_start(kind, kinds)
            device[kind].append(sequence.pages[kind][own:end])
        for kind, _, page_ids in sequence.leaving:
            device[kind].append(page_ids)
        slots = (
            sequence.working_slot,
            sequence.boundary_slot,
            sequence.spare_slots,
            *sequence.states.values(),
        )
        for kind in kinds.points:
            device[kind] += [slot for slot in slots if slot is not None]
    for kind in kinds.points:
        device[kind] += loose_slots
    if prefetcher is not None:
        for prefetch in {*prefetcher.active.values(), *prefetcher.lingering}:
            for kind in kinds.numbers:
                held[HOST][kind].append(prefetch.staged[kind])
    for tier in TIERS:
        for kind in kinds.numbers:
            name = f"{TIER_NAMES[tier]} {kinds.names[kind]}"
            there = held[tier][kind]
            count = sum(map(len, there))
            num_owners = np.bincount(np.fromiter(chain.from_iterable(there), np.intp, count))
            if num_owners.max(initial=0) > 1:
                _break(5, f"page {num_owners.argmax()} of {name} has two owners")
            if not cache.pools[tier][kind].are_taken(num_owners > 0):
                taken = cache.pools[tier][kind].taken
                owned = set(np.flatnonzero(num_owners).tolist())
                what = f"{len(taken)} pages of {name} are allocated and {len(owned)} owned"
                _break(5, f"{what}; they differ in {sorted(taken ^ owned)}")


def _check_fates(cache: PrefixCache, on_host: Iterable[PageIds]) -> None:
    unused, counters = cache.fates.unused, cache.counters
    left = unused.difference(*on_host)
    _hold(
        not left, 9, f"pages {left} were read from storage but are neither counted nor on the host"
    )
    fates = sum(counters[f"prefetch/{fate}_pages"] for fate in FATES)
    _hold(
        counters["prefetch/read_pages"] == fates + len(unused),
        9,
        f"{counters['prefetch/read_pages']} pages were read, {fates} have a fate and "
        f"{len(unused)} may be used",
    )


def _check_anchors(prefetcher: Prefetcher, nodes: set[Node]) -> None:
    for prefetch in prefetcher.active.values():
        anchor = prefetch.anchor
        if not prefetch.is_settled and not anchor.is_root:
            _hold(anchor in nodes, 7, f"anchor {anchor} is gone")
            _hold(anchor.held[HOST][FULL] is not None, 7, f"anchor {anchor} is not on the host")


def _check_transfers(cache: PrefixCache, locked: ByKind) -> None:
    # every page that a copy still reads or fills is locked
    for transfer in cache.in_flight:
        for tier, kind, moving in _ends(transfer):
            loose = moving.difference(*locked[tier][kind])
            what = f"{TIER_NAMES[tier]} {cache.tree.kinds.names[kind]} pages"
            _hold(not loose, 7, f"{what} {sorted(loose)} of a copy are not locked")


def _ends(transfer: LoadBack | BackUp | StorageWrite) -> Iterator[tuple[int, int, set[int]]]:
    # (tier, kind, pages) that a transfer needs until it is done
    if isinstance(transfer, StorageWrite):
        for kind, page_ids in transfer.parts if not transfer.is_given_away else ():
            yield HOST, kind, set(page_ids)
        return
    source, target = (DEVICE, HOST) if isinstance(transfer, BackUp) else (HOST, DEVICE)
    for move in transfer.moves:
        if not move.is_own:
            yield target, move.kind, set(move.targets)
        if not (isinstance(transfer, BackUp) and transfer.is_fence):
            yield source, move.kind, set(move.sources)

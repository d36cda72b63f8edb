"""Reads from the hosts of other engines, over the link between engines (`storage.kind=peers`)."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import BackUp
from hicache.cache.tree.keys import Key
from hicache.cache.tree.lookup import path_of
from hicache.cache.tree.node import HOST, Node
from hicache.executor.simulated.executor import IoJob, SimulatedIo, Workers
from hicache.executor.storage_script import Load
from hicache.scheduler.handover import Outage


class Peer(Protocol):
    """What other engines see of an engine."""

    cache: PrefixCache
    is_gone: bool  # lost with its caches
    is_returning: bool  # waits until its caches are no longer in use

    def catch_up(self, now_ns: int) -> None: ...


class PeerIo(SimulatedIo):
    """Lets each engine read what the hosts of other engines hold, instead of a storage engine.

    A query asks a directory that is always up to date: the engine whose host can restore most is
    the source of the read, among equals the next one by number. A read locks the pages that are
    still there when it begins, until it ends. To the source, it counts as no use.
    """

    _bytes_read = "transfer/peer_bytes"
    engines: Sequence[Peer] = ()

    def connect(self, engines: Sequence[Peer]) -> None:
        self.engines = engines
        self._held: dict[Prefetch, set[Key]] = {}  # by read under way
        count = self.config.read_workers
        for number in range(len(engines)):
            self._workers[f"read{number}"] = Workers("read", count, count * len(engines))

    def read(self, engine: int, prefetch: Prefetch, page_bytes: Sequence[int]) -> IoJob:
        source = prefetch.source
        assert source is not None
        peer = self.engines[source]
        self._held[prefetch], nodes = self._look(source, prefetch)
        tree = peer.cache.tree
        kinds = tree.kinds.numbers
        locks = [tree.lock_host(node, dict.fromkeys(kinds, node.start)) for node in nodes]
        yield from super().read(engine, prefetch, page_bytes)
        peer.catch_up(self.now_ns)
        for lock in locks:
            tree.release(lock)
        del self._held[prefetch]
        if peer.is_returning:
            self._done.append((source, Outage(is_over=True)))

    def _ask(self, engine: int, prefetch: Prefetch) -> list[int]:
        best: tuple[int, int, list[int]] = (0, 0, [])
        for source in (*range(engine + 1, len(self.engines)), *range(engine)):
            held, _ = self._look(source, prefetch)
            lengths = prefetch.ask(partial(_flags, held))
            found = max(lengths, default=0), prefetch.leading_pages, lengths
            if prefetch.source is None or found[:2] > best[:2]:
                best, prefetch.source = found, source
        _, prefetch.leading_pages, lengths = best
        return lengths

    def _look(self, source: int, prefetch: Prefetch) -> tuple[set[Key], list[Node]]:
        # the keys of a prefetch that an engine's host holds, and the nodes that hold them
        peer, held, nodes = self.engines[source], set[Key](), list[Node]()
        if peer.is_gone:
            return held, nodes
        peer.catch_up(self.now_ns)
        cache, start, sequence = peer.cache, prefetch.start_page, prefetch.sequence
        tree, end = cache.tree, start + prefetch.num_pages
        copies = [each for each in cache.in_flight if isinstance(each, BackUp)]
        moves = [move for each in copies for move in each.moves]
        coming = {(move.kind, page_id) for move in moves for page_id in move.targets}
        for node, reached in path_of(tree, sequence.tokens, end, sequence.namespace):
            if reached <= start:
                continue
            nodes.append(node)
            for kind, page_ids in enumerate(node.held[HOST]):
                first, last = max(node.start - start, 0), reached - start
                if kind in tree.kinds.points:
                    first = last - 1 if reached == node.end else last
                if page_ids and (kind, page_ids[0]) not in coming:
                    held.update(prefetch.keys(kind, first, last))
        return held, nodes

    def _read_links(self, engine: int, prefetch: Prefetch) -> tuple[str, ...]:
        source = prefetch.source
        hosts = f"host_memory{source}", f"host_memory{engine}"
        return f"sends{source}", f"receives{engine}", *hosts

    def _load(self, engine: int, prefetch: Prefetch, load: Load) -> int:
        assert prefetch.source is not None
        held = set() if self.engines[prefetch.source].is_gone else self._held[prefetch]
        return [*_flags(held, load.keys), False].index(False)

    def _latency_ns(self, engine: int) -> int:
        return super()._latency_ns(engine) + self._link_ns


def _flags(held: set[Key], keys: Sequence[Key]) -> list[bool]:
    return [key in held for key in keys]

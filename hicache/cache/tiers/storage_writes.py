"""Writes from host to storage: which pages are written, when, and how many bytes may wait."""

from hicache.cache.kinds import FULL
from hicache.cache.pages import PageIds
from hicache.cache.tiers.transfer import (
    COPIED,
    EVICTED,
    HIT,
    BackUp,
    Bookings,
    Load,
    StorageDelete,
    StorageWrite,
    WritePolicy,
)
from hicache.cache.tree.keys import Key
from hicache.cache.tree.node import HOST, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.config import StorageConfig, Tiering


class StorageWriter:
    """Queues writes of cached pages from host to storage.

    `queued_bytes` counts the bytes of unfinished writes. A write that would raise this number above
    `queue_bytes` is dropped. So is one whose prefix was dropped: no prompt could use it.
    """

    def __init__(
        self,
        tree: RadixTree,
        bookings: Bookings,
        config: StorageConfig,
        policy: WritePolicy,
        *,
        queue_bytes: int,
    ) -> None:
        self.queued_bytes = 0
        self._tree = tree
        self._bookings = bookings
        self._counters = bookings.counters
        self._queue_bytes = queue_bytes
        self._is_exclusive = config.tiering is Tiering.exclusive
        self._policy = policy
        self._moments = policy.moments["storage"]
        self._is_chosen = HIT in self._moments  # not every copy is written

    def on_hit(self, node: Node) -> None:
        if self._is_chosen:
            self._write_admitted(node.span(), HIT)

    def on_backed_up(self, back_up: BackUp) -> None:
        if self._is_chosen:
            self._write_admitted(back_up.node.span(), COPIED)
        elif COPIED in self._moments:
            self._write_copies(back_up)

    def on_leaving(self, victim: Node, kind: int) -> None:
        if EVICTED not in self._moments:
            return
        device, host = victim.held
        leaving = [
            (victim, other)
            for other in self._tree.lost(victim, HOST, kind)
            if host[other] is not None and device[other] is None and not victim.stored[other]
            if self._admits(victim, other, EVICTED)
        ]
        if leaving:
            self._write_nodes(leaving, is_given_away=True)

    def on_read(self, nodes: list[Node], last: Node, pages: list[PageIds]) -> None:
        """Record that storage holds the data that was just read from there.

        The host has read the full-attention pages of `nodes`. It has also read window pages and a
        Mamba state at the end of `last`. Exclusive storage must not keep data that the host has
        read; the call then queues a deletion.
        """
        read = _items(
            nodes,
            {kind: last.end - len(pages[kind]) for kind in self._tree.kinds.paged},
            [(kind, last) for kind in self._tree.kinds.points if pages[kind]],
        )
        for each, kind in read:
            each.stored[kind] = not self._is_exclusive
        if self._is_exclusive:
            keys = [key for each, kind in read for key in self._tree.keys(each, kind)]
            self._bookings.outbox.append(StorageDelete(keys=keys))
            if self._tree.listener is not None:
                self._tree.listener.taken_out(read)
            self._counters["storage/dropped_read_pages"] += len(keys)

    def on_written(self, write: StorageWrite) -> None:
        self.queued_bytes -= write.num_bytes
        if self._tree.listener is not None:
            self._tree.listener.write_ended(write)

    # -- inside --------------------------------------------------------------------------------

    def _admits(self, node: Node, kind: int, moment: str) -> bool:
        room = self.queued_bytes, self._queue_bytes
        return self._policy.admits(self._tree, node, Load(moment, self._bookings, kind, HOST, room))

    def _write_admitted(self, nodes: list[Node], moment: str) -> None:
        # data that is on the host, not yet stored, and admitted
        worthy = [
            (each, kind)
            for each in nodes
            for kind in self._tree.kinds.numbers
            if each.held[HOST][kind] is not None and not each.stored[kind]
            if self._admits(each, kind, moment)
        ]
        if worthy:
            coming = self._coming()
            self._write_nodes([item for item in worthy if item[0] not in coming])

    def _coming(self) -> set[Node]:
        # nodes whose host copies are not finished
        nodes: set[Node] = set()
        for transfer in self._bookings.in_flight:
            if isinstance(transfer, BackUp):
                first = min(transfer.starts.values(), default=transfer.node.end)
                nodes.update(transfer.node.span(first), (node for _, node in transfer.points))
        return nodes

    def _write_nodes(self, items: list[tuple[Node, int]], *, is_given_away: bool = False) -> None:
        write = self._queue(items)
        if write is None:
            return
        write.is_given_away = is_given_away
        if not is_given_away:
            write.host_locks = [
                self._tree.lock_host(node, {kind: node.start}) for node, kind in items
            ]

    def _write_copies(self, back_up: BackUp) -> None:
        first = min(back_up.starts.values(), default=back_up.node.end)
        copied = _items(back_up.node.span(first), back_up.starts, back_up.points)
        if self._tree.rules.evicts_whole:  # all of a node, but nothing before its full pages
            nodes = {each: None for each, _ in copied if each.held[HOST][FULL] is not None}
            copied = [(each, kind) for each in nodes for kind in self._tree.kinds.numbers]
            # those of a fence were locked before, but for nodes that it found on the host
            held = back_up.host_locks if back_up.is_fence else []
            locked = {lock.node for lock in held if (FULL, lock.node.start) in lock.starts}
            missing = [each for each in nodes if each not in locked]
            back_up.host_locks += map(self._tree.lock_anchor, missing)
        write = self._queue([item for item in copied if item[0].held[HOST][item[1]] is not None])
        if write is not None:
            # the locks of the back-up protect the copies until they are written
            write.host_locks, back_up.host_locks = back_up.host_locks, []

    def _queue(self, items: list[tuple[Node, int]]) -> StorageWrite | None:
        # all data is on the host; this function locks nothing. None: nothing to write, or dropped
        if not items:
            return None
        keys: list[Key] = []
        parts: list[tuple[int, PageIds]] = []
        num_bytes = 0
        for node, kind in items:
            page_ids = node.held[HOST][kind]
            assert page_ids is not None
            keys += self._tree.keys(node, kind)
            parts.append((kind, page_ids))
            num_bytes += self._bookings.page_bytes[kind] * len(page_ids)
        listener = self._tree.listener
        above = items[0][0].parent
        is_dropped = self.queued_bytes + num_bytes > self._queue_bytes
        is_dropped |= above is not None and above.stored[FULL] is None
        for node, kind in items:
            # exclusive storage deletes it again when it is read
            node.stored[kind] = None if is_dropped else True
        if is_dropped:
            self._counters["storage/dropped_write_pages"] += len(keys)
            if listener is not None:
                listener.write_dropped(items)
            return None
        self.queued_bytes += num_bytes
        self._counters["storage/queued_write_pages"] += len(keys)
        write = StorageWrite(keys=keys, parts=parts, num_bytes=num_bytes)
        self._bookings.book(write)
        if listener is not None:
            listener.write_queued(write, items)
        return write


def _items(
    nodes: list[Node], starts: dict[int, int], points: list[tuple[int, Node]]
) -> list[tuple[Node, int]]:
    # (node, kind) of the nodes from each kind's start on, and of the points
    spans = [
        (node, kind) for kind, start in starts.items() for node in nodes if node.start >= start
    ]
    return spans + [(node, kind) for kind, node in points]

"""Copies from the host to pages and states that one request owns, and not the radix tree.

They are part of a request's load-back (`Device.load`), for settings that few runs use.
"""

from hicache.cache.kinds import FULL
from hicache.cache.pages import PageIds
from hicache.cache.tiers.device import Device
from hicache.cache.tiers.transfer import Bookings, LoadBack, Move
from hicache.cache.tree.events import Demand, Purpose
from hicache.cache.tree.node import HOST, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence


def load_state(tree: RadixTree, bookings: Bookings, load_back: LoadBack, slot: PageIds) -> None:
    """Copy the state that `load_back` brings to the tree also to a request's own `slot`."""
    (states,) = (move for move in load_back.moves if move.kind in tree.kinds.points)
    _add(bookings, load_back, states._replace(targets=slot, is_own=True))


def load_last(
    tree: RadixTree,
    bookings: Bookings,
    device: Device,
    node: Node,
    sequence: Sequence,
    load_back: LoadBack | None,
) -> LoadBack | None:
    """Copy the page after `node` from the host to a device page that only this sequence owns.

    The copy is added to `load_back`, which must not have started. If `load_back` is None, a new
    copy is queued. Return the copy. Return None if the host lacks the page or the device has no
    free page. The result is also None for a model with sliding windows or Mamba states.
    """
    end = node.end + 1
    if tree.kinds.aux:
        return None
    last = tree.descend(node, sequence.tokens, end)
    held = None if last is None else last.held[HOST][FULL]
    if last is None or held is None:
        return None
    host_lock = tree.lock_host(last, {FULL: node.end})
    page_ids = device.allocate(FULL, 1, Demand(Purpose.load_back, sequence.request_id))
    if page_ids is None:
        tree.release(host_lock)
        return None
    last.tick = tree.residency.tick
    bookings.fates.close(held, "used")
    sequence.pages[FULL] += page_ids
    sequence.num_pages = end
    if load_back is None:
        load_back = LoadBack(moves=[], num_bytes=0, node=node, locks=[tree.lock(node)])
        bookings.book(load_back)
    else:
        # the allocation may have booked a back-up that still reads the page: load after it
        bookings.outbox.remove(load_back)
        bookings.outbox.append(load_back)
    load_back.host_locks.append(host_lock)
    _add(bookings, load_back, Move(FULL, held, page_ids, is_own=True))
    return load_back


def _add(bookings: Bookings, load_back: LoadBack, move: Move) -> None:
    num_bytes = bookings.bytes_of([move])
    load_back.moves.append(move)
    load_back.num_bytes += num_bytes
    bookings.counters["transfer/load_back_bytes"] += num_bytes

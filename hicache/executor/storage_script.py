"""The storage operations of a read and of a write, in order: one script for all executors.

A script yields one operation at a time. The driver carries it out and writes the result into the
operation; then the script continues. Simulated time charges links for each, real time calls the
storage engines in a thread, and the ranks of an engine agree on their progress.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import compress
from operator import not_

from hicache.cache.kinds import FULL
from hicache.cache.pages import PageIds
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import StorageWrite
from hicache.cache.tree.keys import Key

Item = tuple[int, int]  # (kind, host page id)


@dataclass(slots=True)
class Load:
    """One batch of pages to read from storage into host memory.

    `keys` are the storage keys of the pages, and `parts` the host pages to fill: pairs (kind of
    data, page ids). The executor sets `found` to the number of pages before the first missing one.
    `restores` is 0 for full-attention KV. For sliding windows and Mamba states, it is the length in
    pages of the prefix that becomes usable with them.
    """

    keys: Items[Key]
    parts: list[tuple[int, PageIds]]
    restores: int = 0
    found: int = 0

    @property
    def items(self) -> list[Item]:
        return [(kind, int(page_id)) for kind, page_ids in self.parts for page_id in page_ids]

    @property
    def is_whole(self) -> bool:
        return self.found == len(self.keys)


@dataclass(slots=True)
class Ask:
    keys: Items[Key]
    present: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class Store:
    keys: Items[Key]


def read_script(prefetch: Prefetch, batch_pages: int) -> Iterator[Load]:
    """Yield the batches of pages that a prefetch reads from storage, one after another.

    The caller reads each batch and sets its `found` before it asks for the next one. Full-attention
    pages come first, at most `batch_pages` at a time, until one is missing. Then one batch has the
    sliding windows and Mamba states that the pages read so far need. When `prefetch.stop_pages` is
    set, no more full-attention pages follow. When `prefetch.is_settled` is true, nothing more
    follows.
    """
    # another thread may settle the prefetch during the read: copy the staged pages at the call
    return _loads(prefetch, list(prefetch.staged), prefetch.num_pages, batch_pages)


def _loads(
    prefetch: Prefetch, staged: list[PageIds], num_pages: int, batch_pages: int
) -> Iterator[Load]:
    completed = 0
    for first in range(0, num_pages, batch_pages):
        if prefetch.is_settled:
            return
        if prefetch.stop_pages is not None:
            break
        end = min(first + batch_pages, num_pages)
        load = Load(prefetch.keys(FULL, first, end), [(FULL, staged[FULL][first:end])])
        yield load
        completed += load.found
        if not load.is_whole:
            break
    end = prefetch.stop_pages or prefetch.usable_pages(completed)
    if end and prefetch.has_sidecars and not prefetch.is_settled:
        sidecars = [
            (kind, staged[kind][: end - prefetch.first_page(window, end)])
            for kind, window in prefetch.needs
        ]
        yield Load(prefetch.sidecar_keys(end), sidecars, restores=end)


def write_script(work: StorageWrite, batch_pages: int) -> Iterator[Ask | Store]:
    ask = Ask(work.keys)
    yield ask
    keys: Items[Key] = work.keys
    if True in ask.present:
        keys = list(compress(keys, map(not_, ask.present)))
    for first in range(0, len(keys), batch_pages):
        yield Store(keys[first : first + batch_pages])

"""The storage operations of a read and of a write, in order: one script for all executors.

A script yields one operation at a time. The driver carries it out and writes the result into the
operation; then the script continues. Simulated time charges links for each, real time calls the
storage engines in a thread, and the ranks of an engine agree on their progress.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from hicache.cache.kinds import FULL
from hicache.cache.pages import PageIds
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import StorageWrite
from hicache.cache.tree.keys import Key

Item = tuple[int, int]  # (kind, host page id)


@dataclass(slots=True)
class Load:
    """Read pages into the host. `found` is the number of leading pages found without a gap.

    `restores`: 0 for full pages; for a window or a state, the length of the prefix (in pages of the
    prefetch) that it completes.
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
    """Read pages in batches until one is missing, then the windows and states that they can use.

    `Prefetch.stop_pages` ends the batches early. Once the prefetch is settled, the script stops
    after the current batch. Another thread may settle it during the read, so the staged pages are
    copied at the call.
    """
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
        keys = [key for key, is_there in zip(keys, ask.present, strict=True) if not is_there]
    for first in range(0, len(keys), batch_pages):
        yield Store(keys[first : first + batch_pages])

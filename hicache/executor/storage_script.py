"""What a read and a write ask of storage, and in which order: one script for every driver.

A script yields one thing after another to be done, and goes on with what came of it, which whoever
drives it has written into the thing. Simulated time charges links for each, real time calls the
engines in a thread, and the ranks of an engine agree on how far they are.
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
    """Pages to be read into the host. `found`: how many lead without a gap.

    `restores`: 0 for full pages; for a window and a state, the length of the prefix (in pages of
    the prefetch) that can be restored with them.
    """

    keys: Items[Key]
    parts: list[tuple[int, PageIds]]
    restores: int = 0
    found: int = 0

    @property
    def items(self) -> list[Item]:
        """Where they go, as long as the keys."""
        return [(kind, int(page_id)) for kind, page_ids in self.parts for page_id in page_ids]

    @property
    def is_whole(self) -> bool:
        """Whether all were found."""
        return self.found == len(self.keys)


@dataclass(slots=True)
class Ask:
    """Keys to be looked for. `present`: whether each is stored."""

    keys: Items[Key]
    present: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class Store:
    """Pages to be written."""

    keys: Items[Key]


def read_script(prefetch: Prefetch, batch_pages: int) -> Iterator[Load]:
    """Pages in batches until one is missing; then the windows and state of what can be restored.

    `Prefetch.stop_pages` ends the batches early. Once the prefetch is settled, nothing more is read
    after the batch at hand. Another thread may settle it meanwhile, so its staged pages are noted
    at the call.
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
        sidecars = [(kind, staged[kind][: min(pages, end)]) for kind, pages in prefetch.needs]
        yield Load(prefetch.sidecar_keys(end), sidecars, restores=end)


def write_script(work: StorageWrite, batch_pages: int) -> Iterator[Ask | Store]:
    """Pages in batches, without those that storage has; each batch is visible when written."""
    ask = Ask(work.keys)
    yield ask
    keys: Items[Key] = work.keys
    if True in ask.present:
        keys = [key for key, is_there in zip(keys, ask.present, strict=True) if not is_there]
    for first in range(0, len(keys), batch_pages):
        yield Store(keys[first : first + batch_pages])

"""Storage with a page of the draft's KV for each page of full KV, in a simulated run."""

from collections.abc import Sequence

from hicache.cache.kinds import FULL, KEY_TAGS
from hicache.cache.tree.keys import Key, kinds_of
from hicache.cache.tree.keys import keys as keys_of
from hicache.executor.simulated.stores import KeyStore

DRAFT = len(KEY_TAGS) - 1  # the kind of the draft's pages, in their keys alone


class WithSidecars:
    """Keeps each page of full KV with a page of the draft's KV, under a key of its own.

    Storage may lose one of the two. Without the draft's page, the page counts as missing.
    """

    def __init__(self, store: KeyStore) -> None:
        self._store = store

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        sidecars = iter(self._store.contains(_sidecars(keys)))
        there = [kind != FULL or next(sidecars) for kind in kinds_of(keys)]
        return [a and b for a, b in zip(self._store.contains(keys), there, strict=True)]

    def read(self, keys: Sequence[Key]) -> int:
        count, sidecars = self._store.read(keys), _sidecars(keys)
        return min(count, self._store.read(sidecars)) if sidecars else count

    def write(self, keys: Sequence[Key]) -> int:
        return self._store.write(keys) + self._store.write(_sidecars(keys))

    def delete(self, keys: Sequence[Key]) -> None:
        self._store.delete([*keys, *_sidecars(keys)])


def _sidecars(keys: Sequence[Key]) -> Sequence[Key]:
    # of the pages of full KV among `keys`
    pages = [key for key, kind in zip(keys, kinds_of(keys), strict=True) if kind == FULL]
    return keys_of(pages, DRAFT)

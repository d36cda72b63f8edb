"""Names the faults of a user's storage class."""

from collections.abc import Callable

from hicache.storage.base import Storage, StorageError, StorageStats
from hicache.storage.guards.base import GuardStorage, Result
from hicache.user_code import UserCodeError, user_code


class OwnStorage(GuardStorage):
    """A wrapper around a user's storage class, `name` in error messages.

    What the class raises, except `StorageError`, becomes a `UserCodeError`.
    """

    def __init__(self, inner: Storage, name: str) -> None:
        super().__init__(inner)
        self._name = name

    def stats(self) -> StorageStats:
        stats = self._call(self._inner.stats, StorageStats())
        if not isinstance(stats, StorageStats):
            raise UserCodeError(f"{self._name}: expected StorageStats of stats, got {stats!r:.80}")
        return stats

    def close(self) -> None:
        self._call(self._inner.close, None)

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        with user_code(self._name, StorageError):
            return call()

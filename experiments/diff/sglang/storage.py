"""A storage backend for SGLang's dynamic loader that keeps keys and no bytes."""

from collections import Counter
from collections.abc import Sequence

from sglang.srt.mem_cache.hicache_storage import PoolName

from hicache.storage.integrations.sglang import HiCacheStore, HostPool


class KeyStorage(HiCacheStore):
    """Storage backend for SGLang that remembers only which keys were written, and no page."""

    def __init__(self, storage_config: object, kwargs: object) -> None:
        self.keys: dict[str, set[str]] = {}
        self.moved: Counter[tuple[str, str]] = Counter()  # number of keys, by pool and direction
        self.registered_pools: dict[str, HostPool] = {}

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        self.registered_pools[PoolName(host_pool_name).value] = host_pool

    def of(self, pool: str) -> set[str]:
        return self.keys.setdefault(str(PoolName(pool).value), set())

    def close(self) -> None: ...

    def _contains(self, pool: str, keys: Sequence[str]) -> list[bool]:
        return [key in self.of(pool) for key in keys]

    def _read(self, name: str, pool: HostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        there = self._contains(name, keys)
        self.moved[PoolName(name).value, "read"] += sum(there)
        return there

    def _write(self, name: str, pool: HostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        held = self.of(name)
        before = len(held)
        held.update(keys)  # existing keys are not written again
        self.moved[PoolName(name).value, "write"] += len(held) - before
        return [True] * len(keys)

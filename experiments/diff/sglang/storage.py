"""A storage backend for SGLang's dynamic loader that keeps keys and no bytes."""

from collections import Counter
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)


class KeyStorage(HiCacheStorage):  # type: ignore[misc]  # the package is not there to be typed
    def __init__(self, storage_config: object, kwargs: object) -> None:
        self.keys: dict[str, set[str]] = {}
        self.moved: Counter[tuple[str, str]] = Counter()  # number of keys, by pool and direction

    def of(self, pool: object) -> set[str]:
        return self.keys.setdefault(str(PoolName(pool).value), set())

    def _write(self, pool: object, keys: list[str]) -> list[bool]:
        held = self.of(pool)
        before = len(held)
        held.update(keys)  # existing keys are not written again
        self.moved[PoolName(pool).value, "write"] += len(held) - before
        return [True] * len(keys)

    def _read(self, pool: object, keys: list[str]) -> list[bool]:
        there = [key in self.of(pool) for key in keys]
        self.moved[PoolName(pool).value, "read"] += sum(there)
        return there

    def batch_set_v1(self, keys: list[str], host_indices: object, extra_info: object = None) -> Any:
        return self._write(PoolName.KV, keys)

    def batch_get_v1(self, keys: list[str], host_indices: object, extra_info: object = None) -> Any:
        return self._read(PoolName.KV, keys)

    def batch_set_v2(self, transfers: Any, extra_info: object = None) -> Any:
        return {each.name: self._write(each.name, each.keys or []) for each in transfers}

    def batch_get_v2(self, transfers: Any, extra_info: object = None) -> Any:
        return {each.name: self._read(each.name, each.keys or []) for each in transfers}

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: object = None
    ) -> Any:
        leading = next(
            (place for place, key in enumerate(keys) if key not in self.of(PoolName.KV)),
            len(keys),
        )
        lengths = list(range(1, leading + 1))
        hits = {PoolName.KV: leading} if leading else {}
        for transfer in pool_transfers or []:
            there = [key in self.of(transfer.name) for key in keys]
            trailing = max(1, len(transfer.keys or []))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = [each for each in lengths if all(there[:each])]
            else:
                lengths = [each for each in lengths if all(there[max(0, each - trailing) : each])]
            if lengths:
                hits[transfer.name] = lengths[-1]
        return PoolTransferResult(
            kv_hit_pages=lengths[-1] if lengths else 0,
            extra_pool_hit_pages=hits,
            restorable_prefix_pages=lengths,
        )

    def exists(self, key: str) -> bool:
        return key in self.of(PoolName.KV)

    def _unasked(self, *_: object, **__: object) -> Any:
        raise NotImplementedError("only version 1 of the storage interface is implemented")

    get = set = batch_get = batch_set = _unasked  # abstract methods of the package's class

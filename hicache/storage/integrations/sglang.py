"""Our storage engines inside SGLang, through its dynamic backend. Only SGLang imports this module.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "hicache", "module_path": "hicache.storage.integrations.sglang",
        "class_name": "HiCacheStore", "interface_v1": 1,
        "hicache": {"kind": "slab", "root": "/var/cache/hicache", "capacity_gib": 100}}'

`hicache` holds the knobs of `StorageConfig`, including `faults`. The class implements interfaces of
SGLang 0.5.23: v1 (pages of the anchor pool by index) and v2 (pages of every pool of a hybrid model,
with the boundaries that could be restored). A page is stored as the flat bytes that SGLang's host
pools define, so the pool's layout is part of its key.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from hicache.clock import WallClock
from hicache.config import FaultsConfig, StorageConfig
from hicache.storage.base import DIGEST_BYTES, Storage, StorageError
from hicache.storage.factory import open_guarded_storage

COMPONENTS = {PoolName.KV.value: 0, PoolName.SWA.value: 1, PoolName.MAMBA.value: 2}
OTHER_COMPONENT = 255  # pools that only SGLang defines; their names are part of the digest
BATCH_PAGES = 16  # pages copied out of a pool at a time; larger batches are no faster

HostPool = Any  # sglang.srt.mem_cache.pool_host.base.HostKVCache


class HiCacheStore(HiCacheStorage):
    """SGLang's storage backend for one rank, on top of a storage engine of this package.

    All ranks share the engine. Each rank stores its part of a page under its own key. The KV of MLA
    is the same on all ranks, so the ranks share its key. A failure of the engine is a cache miss.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        self._config = storage_config
        self._knobs = _knobs((storage_config.extra_config or {}).get("hicache", {}))
        self._storage: Storage | None = None
        self._layouts: dict[str, str] = {}
        self.registered_pools: dict[str, HostPool] = {}

    # -- pools ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Register SGLang's main host pool (the KV pages), and open the storage engine.

        Raises:
            StorageError: the engine cannot be opened; SGLang then starts without storage.
        """
        self.mem_pool_host = mem_pool_host
        self._layouts[PoolName.KV.value] = _layout(mem_pool_host)
        if self._storage is None:
            guarded = open_guarded_storage(
                self._knobs,
                namespace=f"sglang-{self._config.model_name}-p{mem_pool_host.page_size}",
                page_bytes=None,
                clock=WallClock(),
                seed=self._config.tp_rank,
            )
            self._storage = None if guarded is None else guarded.storage

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        name = PoolName(host_pool_name).value
        self.registered_pools[name] = host_pool
        self._layouts[name] = _layout(host_pool)

    # -- v2: every pool ------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the prefix lengths, in pages, that all host pools can restore from storage.

        A hybrid model has one host pool each for full-attention KV, sliding-window KV and Mamba
        states. The result also has the longest prefix that each pool can restore.
        """
        num_pages = _leading(self._contains(PoolName.KV, keys))
        hits = {PoolName.KV: num_pages} if num_pages else {}
        restorable = list(range(1, num_pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            held = self._contains(transfer.name, keys[:num_pages])
            lengths = _restorable(held, transfer)
            if lengths:
                hits[transfer.name] = lengths[-1]
            wanted = set(lengths)
            restorable = [length for length in restorable if length in wanted]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._transfer(transfers, self._read)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._transfer(transfers, self._write)

    # -- v1: pages of the anchor pool ----------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        pool = self.mem_pool_host
        return self._read(PoolName.KV, pool, keys, _first_rows(pool, host_indices))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        pool = self.mem_pool_host
        return self._write(PoolName.KV, pool, keys, _first_rows(pool, host_indices))

    def exists(self, key: str) -> bool:
        return self._contains(PoolName.KV, [key])[0]

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return _leading(self._contains(PoolName.KV, keys))

    def _unasked(self, *_: object, **__: object) -> Any:
        raise NotImplementedError("version 0 of the storage interface is not supported")

    get = set = batch_get = batch_set = _unasked  # abstract methods of SGLang's class

    def close(self) -> None:
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    # -- inside --------------------------------------------------------------------------------

    def _engine(self) -> Storage:
        if self._storage is None:
            raise StorageError("the store is closed, or no host pool has been registered yet")
        return self._storage

    def _key(self, pool: str, key: str) -> bytes:
        name = PoolName(pool).value
        config = self._config
        # MLA's KV is the same on every rank; states differ
        is_shared = config.is_mla_model and name != PoolName.MAMBA.value
        ranks = [(config.pp_rank, config.pp_size), (config.attn_cp_rank, config.attn_cp_size)]
        ranks.append((config.dcp_rank, config.dcp_size))
        if not is_shared:
            ranks.append((config.tp_rank, config.tp_size))
        text = f"{name}|{self._layouts.get(name)}|{ranks}|{key}"
        digest = blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        return digest + bytes([COMPONENTS.get(name, OTHER_COMPONENT)])

    def _contains(self, pool: str, keys: Sequence[str]) -> list[bool]:
        return self._engine().contains([self._key(pool, key) for key in keys])

    def _transfer(
        self,
        transfers: list[PoolTransfer],
        move: Callable[[str, HostPool, Sequence[str], list[int]], list[bool]],
    ) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys = transfer.keys or []
            pool = self.registered_pools[PoolName(transfer.name).value]
            rows = [] if transfer.host_indices is None else _first_rows(pool, transfer.host_indices)
            is_whole = len(rows) == len(keys)
            moved = move(transfer.name, pool, keys, rows) if is_whole else [False] * len(keys)
            results[transfer.name] = moved
        return results

    def _read(self, name: str, pool: HostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        model = pool.get_dummy_flat_data_page()
        page_bytes = model.numel() * model.element_size()
        scratch = torch.empty((min(len(keys), BATCH_PAGES), page_bytes), dtype=torch.uint8)
        results: list[bool] = []
        for first in range(0, len(keys), BATCH_PAGES):
            part = [self._key(name, key) for key in keys[first : first + BATCH_PAGES]]
            pages = list(scratch[: len(part)])
            flags = self._engine().read(part, [_view(page) for page in pages])
            for page, flag, row in zip(pages, flags, rows[first:], strict=False):
                if flag:
                    pool.set_from_flat_data_page(row, page.view(model.dtype))
            results += flags
        return results

    def _write(self, name: str, pool: HostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        results: list[bool] = []
        for first in range(0, len(keys), BATCH_PAGES):
            part = [self._key(name, key) for key in keys[first : first + BATCH_PAGES]]
            flags = self._engine().contains(part)
            missing = [index for index, flag in enumerate(flags) if not flag]
            pages = [pool.get_data_page(rows[first + index], flat=True) for index in missing]
            stored = self._engine().write(
                [part[index] for index in missing], [_view(page.contiguous()) for page in pages]
            )
            for index, flag in zip(missing, stored, strict=True):
                flags[index] = flag
            results += flags
        return results


def _knobs(values: dict[str, Any]) -> StorageConfig:
    known = {field.name for field in fields(StorageConfig)}
    unknown = sorted(set(values) - known)
    if unknown or values.get("kind", "none") == "none":
        raise ValueError(
            "`hicache` in the extra config must set kind to a storage engine, and may set "
            f"{', '.join(sorted(known))}, got {values}"
        )
    faults = FaultsConfig(**values.get("faults", {}))
    if faults.corrupt_rate:
        raise ValueError("`hicache` must not set corrupt_rate: SGLang would use the corrupt pages")
    return StorageConfig(**{**values, "faults": faults})


def _layout(pool: HostPool) -> str:
    # all that decides the byte order of a flat page; the engine checks its length
    return f"{type(pool).__name__}-{pool.layout}-{pool.dtype}"


def _first_rows(pool: HostPool, host_indices: torch.Tensor) -> list[int]:
    rows: list[int] = host_indices[:: pool.page_size].tolist()
    return rows


def _view(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _leading(flags: Sequence[bool]) -> int:
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))


def _restorable(held: Sequence[bool], transfer: PoolTransfer) -> list[int]:
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return list(range(1, _leading(held) + 1))
    if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
        raise ValueError(
            f"the hit policy must be all_pages or trailing_pages, got {transfer.hit_policy.value}"
        )
    trailing = max(len(transfer.keys or []), 1)
    lengths = []
    run = 0
    for index, is_held in enumerate(held):
        run = run + 1 if is_held else 0
        if run >= min(index + 1, trailing):
            lengths.append(index + 1)
    return lengths

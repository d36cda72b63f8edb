"""A process that stores pages of SGLang's own host pools in HiCacheStore, or reads them back.

    python sglang_pools.py write|read|misfit|spoil KIND ROOT

Each builds the pools of a hybrid model (full KV, sliding-window KV, Mamba states) on the CPU with
SGLang 0.5.23, and loads HiCacheStore through SGLang's own factory. `write` fills pools from seeds
and stores them through the interfaces v1 and v2; `read` has another order of pages, and exits
with 0 only if every byte of every page is the writer's.
"""

import sys
from typing import Any

import torch

import experiments.diff.sglang.device  # noqa: F401  # before anything of the package

# isort: split
from sglang.srt.mem_cache import hicache_storage as sglang_storage
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE = 16
NUM_PAGES = 40  # more than one batch of HiCacheStore
WINDOW_PAGES = 3
SHAPES = {"kv": (3, 2, 8), "swa": (2, 4, 16)}  # layers, heads, head dim


def kv_pool(layers: int, heads: int, dim: int, layout: str) -> Any:
    size = NUM_PAGES * PAGE
    device = MHATokenToKVPool(
        size=size, page_size=PAGE, dtype=torch.bfloat16, head_num=heads, head_dim=dim,
        layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(), 2.0, 0, PAGE, layout, pin_memory=False,
        device_capacity_tokens=size, start_layer=0, end_layer=layers - 1,
    )  # fmt: skip


def mamba_pool() -> Any:
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, 9, 4, 8, 16, dtype=torch.float32),
        conv=(torch.zeros(2, 9, 48, 3, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(
        info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first"
    )  # fmt: skip


def build(layout: str) -> dict[str, Any]:
    pools = {name: kv_pool(*shape, layout) for name, shape in SHAPES.items()}
    return {**pools, "mamba": mamba_pool()}


def keys() -> list[str]:
    """Page hashes as SGLang makes them: hexadecimal SHA-256."""
    return [f"{number:064x}" for number in range(NUM_PAGES)]


def expected(pool: Any, name: str, number: int) -> torch.Tensor:
    """The bytes of one page, equal in every process."""
    model = pool.get_dummy_flat_data_page()
    seed = torch.Generator().manual_seed(1000 * len(name) + number)
    return torch.randint(
        0, 256, (model.numel() * model.element_size(),), generator=seed, dtype=torch.uint8
    ).view(model.dtype)


def row(pool: Any, number: int, *, turned: bool) -> int:
    """The first row of a page in its pool; `turned` is the order of pages of the reader."""
    count = pool.size // pool.page_size
    return (count - 1 - number if turned else number) * pool.page_size


def rows(pool: Any, numbers: range, *, turned: bool) -> torch.Tensor:
    firsts = [row(pool, number, turned=turned) for number in numbers]
    return torch.cat([torch.arange(first, first + pool.page_size) for first in firsts])


def open_backend(pools: dict[str, Any], kind: str, root: str) -> Any:
    config = sglang_storage.HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=False,
        model_name="org/tiny",
        extra_config={
            "backend_name": "hicache", "module_path": "hicache.storage.integrations.sglang",
            "class_name": "HiCacheStore", "interface_v1": 1,
            "hicache": {"kind": kind, "root": root},
        },
    )  # fmt: skip
    backend = StorageBackendFactory.create_backend("dynamic", config, pools["kv"])
    backend.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, sglang_storage.PoolName(name))
    backend.on_host_pools_registered()
    return backend


def sidecars(pools: dict[str, Any], end: int, *, turned: bool) -> list[sglang_storage.PoolTransfer]:
    """The window before page `end` and the state after it."""
    first = end - WINDOW_PAGES
    swa, mamba = pools["swa"], pools["mamba"]
    return [
        sglang_storage.PoolTransfer(
            name=sglang_storage.PoolName.SWA,
            keys=keys()[first:end],
            host_indices=rows(swa, range(first, end), turned=turned),
            hit_policy=sglang_storage.PoolHitPolicy.TRAILING_PAGES,
        ),
        sglang_storage.PoolTransfer(
            name=sglang_storage.PoolName.MAMBA,
            keys=keys()[end - 1 : end],
            host_indices=rows(mamba, range(1), turned=turned),
            hit_policy=sglang_storage.PoolHitPolicy.TRAILING_PAGES,
        ),
    ]


def fill(pools: dict[str, Any]) -> None:
    for name in ("kv", "swa"):
        for number in range(NUM_PAGES):
            page = expected(pools[name], name, number)
            pools[name].set_from_flat_data_page(row(pools[name], number, turned=False), page)
    pools["mamba"].set_from_flat_data_page(0, expected(pools["mamba"], "mamba", 0))


def assert_page(pool: Any, name: str, number: int, first_row: int) -> None:
    got = pool.get_data_page(first_row, flat=True).contiguous().view(torch.uint8)
    want = expected(pool, name, number).view(torch.uint8)
    assert torch.equal(got, want), f"page {number} of {name} differs"


def write(pools: dict[str, Any], backend: Any) -> None:
    fill(pools)
    indices = rows(pools["kv"], range(NUM_PAGES), turned=False)
    assert backend.batch_set_v1(keys(), indices) == [True] * NUM_PAGES
    for results in backend.batch_set_v2(sidecars(pools, NUM_PAGES, turned=False)).values():
        assert all(results)
    assert backend.batch_set_v2(sidecars(pools, 8, turned=False)[:1]) == {"swa": [True] * 3}


def read(pools: dict[str, Any], backend: Any) -> None:
    found = backend.batch_exists_v2([*keys(), "f" * 64], sidecars(pools, 10, turned=True))
    assert found.kv_hit_pages == NUM_PAGES, found
    # a window is stored before page 8 as well, and no state: only the end can be restored
    assert found.restorable_prefix_pages == [NUM_PAGES], found
    window = backend.batch_exists_v2(keys()[:10], sidecars(pools, 10, turned=True)[:1])
    assert (window.kv_hit_pages, window.restorable_prefix_pages) == (8, [8]), window
    assert backend.batch_exists([*keys(), "f" * 64]) == NUM_PAGES
    assert not backend.exists("f" * 64)
    assert all(backend.batch_get_v1(keys(), rows(pools["kv"], range(NUM_PAGES), turned=True)))
    for results in backend.batch_get_v2(sidecars(pools, NUM_PAGES, turned=True)).values():
        assert all(results)
    for number in range(NUM_PAGES):
        assert_page(pools["kv"], "kv", number, row(pools["kv"], number, turned=True))
    for number in range(NUM_PAGES - WINDOW_PAGES, NUM_PAGES):
        assert_page(pools["swa"], "swa", number, row(pools["swa"], number, turned=True))
    assert_page(pools["mamba"], "mamba", 0, row(pools["mamba"], 0, turned=True))


def spoil(pools: dict[str, Any], backend: Any) -> None:
    """Read a page and change one bit, so that the comparison fails."""
    backend.batch_get_v1(keys()[:1], rows(pools["kv"], range(1), turned=True))
    pools["kv"].kv_buffer.view(torch.uint8)[0, 0, row(pools["kv"], 0, turned=True), 0, 0] ^= 1
    assert_page(pools["kv"], "kv", 0, row(pools["kv"], 0, turned=True))


def misfit(pools: dict[str, Any], backend: Any) -> None:
    """Pages of another layout must be misses: their bytes are in another order."""
    assert backend.batch_exists(keys()) == 0
    indices = rows(pools["kv"], range(2), turned=True)
    assert backend.batch_get_v1(keys()[:2], indices) == [False, False]


def main(what: str, kind: str, root: str) -> None:
    pools = build("page_first_direct" if what == "misfit" else "layer_first")
    backend = open_backend(pools, kind, root)
    {"write": write, "read": read, "misfit": misfit, "spoil": spoil}[what](pools, backend)
    backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

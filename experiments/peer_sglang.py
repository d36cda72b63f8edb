"""SGLang 0.5.23's own prefix cache on a CPU, driven one request at a time.

Runs in an environment of its own, where the public package is installed (`docs/validity.md` says
how); nothing of ours needs it. What a GPU would do is stood in for: streams and events that are
always done, memory that is never pinned, copies of pages as plain indexing. Every decision -
matching, eviction, write-through, load-back, prefetch - is the package's own code.
"""

import logging
import os
import time
import warnings
from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from experiments.peer_sides import Hits, Pools, Residency

warnings.filterwarnings("ignore")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "0")
# the package imports torchvision's operators, and only the CUDA build of it defines these two
_LIBRARY = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    schema = f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]


class _Done:
    """A stream or an event with nothing before it."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


def _stand_in_for_the_device() -> None:
    device = SimpleNamespace(
        __name__="cpu",
        Event=_Done,
        Stream=_Done,
        current_stream=_Done,
        default_stream=_Done,
        stream=lambda _: nullcontext(),
        synchronize=lambda *_: None,
        current_device=lambda: "cpu",
        empty_cache=lambda: None,
        set_device=lambda *_: None,
    )
    from sglang.srt import utils
    from sglang.srt.utils import common

    common.get_device_module = utils.get_device_module = lambda: device
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import common as host_common
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    host_common._cuda_host_register = lambda *_, **__: None
    host_common._cuda_host_unregister = lambda *_, **__: None
    l2_transfer.device_module = cache_controller.device_module = device
    HostKVCache.pin_memory = property(lambda _: False, lambda *_: None)
    # bytes are of no interest here, decisions are
    for pool in (MHATokenToKVPoolHost, MambaPoolHost):
        pool.backup_from_device_all_layer = lambda *_, **__: None
        pool.load_to_device_per_layer = lambda *_, **__: None


_stand_in_for_the_device()

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req  # noqa: E402
from sglang.srt.mem_cache.allocation import alloc_req_slots  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import (  # noqa: E402
    checkpoint_kv_cache,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)

from experiments.peer_sglang_memory import make_memory, take_pages  # noqa: E402

POOLS = {
    ComponentType.FULL: PoolName.KV,
    ComponentType.SWA: PoolName.SWA,
    ComponentType.MAMBA: PoolName.MAMBA,
}
logging.disable(logging.WARNING)
torch.set_num_threads(1)


class KeyStorage(HiCacheStorage):  # type: ignore[misc]  # the package is not there to be typed
    """A storage backend that keeps keys and no bytes."""

    def __init__(self, storage_config: object, kwargs: object) -> None:
        self.keys: dict[str, set[str]] = {}

    def _of(self, pool: object) -> set[str]:
        return self.keys.setdefault(str(pool), set())

    def batch_set_v1(self, keys: list[str], host_indices: object, extra_info: object = None) -> Any:
        """Keep pages of full KV."""
        self._of(PoolName.KV).update(keys)
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: object, extra_info: object = None) -> Any:
        """Which pages of full KV are there."""
        return [key in self._of(PoolName.KV) for key in keys]

    def batch_set_v2(self, transfers: Any, extra_info: object = None) -> Any:
        """Keep pages of any pool."""
        for transfer in transfers:
            self._of(transfer.name).update(transfer.keys or [])
        return {each.name: [True] * len(each.keys or []) for each in transfers}

    def batch_get_v2(self, transfers: Any, extra_info: object = None) -> Any:
        """Which pages of any pool are there."""
        return {
            each.name: [key in self._of(each.name) for key in each.keys or []] for each in transfers
        }

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: object = None
    ) -> Any:
        """The lengths that could be restored, in pages."""
        leading = next(
            (place for place, key in enumerate(keys) if key not in self._of(PoolName.KV)),
            len(keys),
        )
        lengths = list(range(1, leading + 1))
        hits = {PoolName.KV: leading} if leading else {}
        for transfer in pool_transfers or []:
            there = [key in self._of(transfer.name) for key in keys]
            trailing = max(1, len(transfer.keys or []))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = [each for each in lengths if all(there[:each])]
            else:
                lengths = [each for each in lengths if all(there[max(0, each - trailing) : each])]
            if lengths:
                hits[transfer.name] = lengths[-1]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def exists(self, key: str) -> bool:
        """Whether a page of full KV is there."""
        return key in self._of(PoolName.KV)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """A page."""
        return target_location if self.exists(key) else None

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Keep a page."""
        self._of(PoolName.KV).add(key)
        return True

    def batch_get(self, keys: list[str], target_locations: Any = None, sizes: Any = None) -> Any:
        """Pages."""
        return [self.get(key, place) for key, place in zip(keys, target_locations, strict=True)]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, sizes: Any = None
    ) -> bool:
        """Keep pages."""
        return all(self.set(key) for key in keys)


class SglangSide:
    """`UnifiedRadixCache` with what its scheduler does around it."""

    def __init__(self, pools: Pools, *, core: str) -> None:
        """`core`: python or rust."""
        page = self._page = pools.page_size
        self._spare = page if pools.spare_page else 0
        self._has_host = pools.host_tokens > 0
        args = {"model_path": "dummy", "page_size": page, "device": "cpu"}
        if self._has_host:
            args |= {
                "hicache_ratio": pools.host_ratio,
                "hicache_io_backend": "kernel",
                "hicache_mem_layout": "page_first",
                "hicache_write_policy": "write_through",
                "hicache_storage_prefetch_policy": "wait_complete",
            }
        if pools.has_storage:
            args |= {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": (
                    '{"backend_name": "keys", "module_path": "experiments.peer_sglang",'
                    ' "class_name": "KeyStorage", "interface_v1": 1}'
                ),
            }
        server_args = ServerArgs(**args)
        server_args._mamba_cache_chunk_size = page
        set_global_server_args_for_scheduler(server_args)
        # kept: the package forgets them when this is collected
        self._ranks = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        self._ranks.__enter__()
        memory = make_memory(pools)
        self._allocator, self._rows = memory.allocator, memory.rows
        self._has_window = pools.window_len > 0
        self._has_states = pools.num_states > 0
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=self._allocator,
            page_size=page,
            sliding_window_size=pools.window_len or None,
            enable_mamba_extra_buffer=self._has_states,
            tree_components=memory.components,
            tree_core_backend=core,
        )
        self.cache = UnifiedRadixCache(params)
        if self._has_host:
            self.cache.init_hicache(server_args, params)
        self._running: dict[int, tuple[Any, Any]] = {}

    def admit(self, number: int, tokens: Any, prompt_len: int) -> Hits:
        """What the scheduler does with a new request, up to the end of its prefill."""
        cache = self.cache
        prompt = array("q", tokens[:prompt_len].astype(np.int64).tobytes())
        req = Req(
            rid=str(number),
            origin_input_text="",
            origin_input_ids=prompt,
            sampling_params=SamplingParams(temperature=0, max_new_tokens=8),
        )
        req.init_next_round_input(cache, cow_mamba=False)
        brought = self._prefetch(req)
        if self._has_host:
            cache.check_hicache_events()
        req.init_next_round_input(cache)
        device = req.prefix_len
        if req.needs_host_load_back():
            loaded = cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=req.best_match_node,
                    host_hit_length=req.host_hit_length,
                    req=req,
                )
            )
            assert loaded is not None
            num_loaded, req.last_node = loaded
            req.prefix_len += num_loaded
            req.kv.cache_protected_len = req.prefix_len
            cache.ready_to_load_host_cache()
            cache.loading_check()
        host = req.prefix_len - device
        storage = min(brought, host)
        req.lock = cache.lock(req.last_node)
        alloc_req_slots(self._rows, [req], cache)
        prefix = cache.path_device_indices(req.last_node)
        row = req.kv.req_pool_idx
        self._rows.write((row, slice(0, req.prefix_len)), prefix)
        self._extend(req, req.prefix_len, prompt_len)
        req.extend_end = prompt_len
        if self._has_states:
            self._track_prefill(req, prompt_len)
        checkpoint_kv_cache(req, cache)
        self._settle()
        self._running[number] = (req, tokens)
        return Hits(device, host - storage, storage)

    def finish(self, number: int) -> None:
        """The answer is complete."""
        req, tokens = self._running.pop(number)
        prompt_len = len(req.origin_input_ids)
        req.output_ids = array("q", tokens[prompt_len:].astype(np.int64).tobytes())
        self._extend(req, prompt_len, len(tokens) - 1)
        if self._has_states and (len(tokens) - 1) // self._page > prompt_len // self._page:
            # as decoding captures them, at every page
            self._track(req, (len(tokens) - 1) // self._page * self._page)
        if self._has_window:
            self.cache.evict_sliding_windows(req, len(tokens) - 2)
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)
        self._settle()

    def residency(self) -> Residency:
        """Tokens of full KV on each tier."""
        cache = self.cache
        core = cache.tree_core
        held = {
            kind: core.component_evictable_size(kind) + core.component_protected_size(kind)
            for kind in cache.tree_components
        }
        host = dict.fromkeys(held, 0)
        if self._has_host:
            group = cache.cache_controller.mem_pool_host
            for kind, name in POOLS.items():
                entry = group.entry_map.get(name) if kind in held else None
                if entry is not None:
                    host[kind] = entry.host_pool.size - entry.host_pool.available_size()
        return Residency(
            *(tier.get(kind, 0) for kind in POOLS for tier in (held, host)),
        )

    def close(self) -> None:
        """Stop the package's threads."""
        if self._has_host:
            self.cache.cache_controller._stop_storage_threads()

    def _extend(self, req: Any, start: int, end: int) -> None:
        # as alloc_paged_token_slots_extend and _decode ask for it: a page more than is needed
        page = self._page
        held = -(-start // page) * page
        if end > held:
            count = -(-end // page) * page - held
            wanted = end - start + page if self._spare else count
            evict_from_tree_cache(self.cache, wanted)
            slots = take_pages(self._allocator, count)
            assert slots is not None, "the device pool is too small for what runs"
            self._rows.write((req.kv.req_pool_idx, slice(held, held + count)), slots)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end

    def _track_prefill(self, req: Any, prompt_len: int) -> None:
        # as ScheduleBatch.prepare_for_extend chooses the one state that a prefill captures
        page, start = self._page, req.prefix_len
        if prompt_len - start < page:
            return
        branch = req.mamba_branching_seqlen
        last = start + (prompt_len - start) // page * page
        self._track(req, branch if branch is not None and start < branch < prompt_len else last)

    def _track(self, req: Any, length: int) -> None:
        kv = req.kv
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self._rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
        kv.mamba_last_track_seqlen = length

    def _prefetch(self, req: Any) -> int:
        cache = self.cache
        if not self._has_host or not cache.enable_storage:
            return 0
        node = req.last_host_node
        if not (cache.is_backuped(node) or cache.is_root(node)):
            return 0
        tokens = req.full_untruncated_fill_ids
        matched = req.prefix_len + req.host_hit_length
        handle = req.cache_request_handle
        cache.prefetch_from_storage(
            handle,
            node,
            tokens[matched : len(tokens) - 1],
            cache.get_last_hash_value(node),
            None,
            matched_prefix_tokens=tokens[:matched],
        )
        while True:
            cache.check_hicache_events()
            if cache.check_prefetch_progress(handle):
                return int(cache.pop_prefetch_loaded_tokens(handle))
            time.sleep(2e-4)

    def _settle(self) -> None:
        # every copy and every write is done before the next decision
        cache = self.cache
        if not self._has_host:
            return
        while True:
            cache.check_hicache_events()
            controller = cache.cache_controller
            busy = cache.ongoing_write_through or cache.ongoing_load_back or cache.ongoing_backup
            if not busy and not controller.ack_write_queue:
                return
            time.sleep(2e-4)

"""Differences between releases in the interface of requests and cache, detected by feature.

| since | change |
|---|---|
| 0.5.16 | `mem_cache.allocation` allocates the pages of a request, before that `common`; |
|        | states may have any host layout, before that `page_first_direct` only |
| 0.5.17 | nodes are numbers that the cache resolves; before that, objects |
| 0.5.16 | `req.kv` holds what is allocated; since 0.5.19 also the rest of a request's KV, |
|        | which the request itself held before |
| 0.5.20 | prefetches are identified by a handle; before that, by the request's id |
| 0.5.22 | `cache.lock` returns a receipt, `checkpoint_kv_cache` publishes a prompt, and a |
|        | request has `prefix_len`; before that `inc_lock_ref`, `cache_unfinished_req`, |
|        | `prefix_indices` |

Checkouts between two releases work too, because no code here checks a version.
"""

import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache import common

from experiments.diff.sglang.device import first_of


def copy_settings(*, has_states: bool) -> dict[str, str]:
    if has_states and find_spec("sglang.srt.mem_cache.allocation") is None:
        return {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
    return {"hicache_io_backend": "kernel", "hicache_mem_layout": "page_first"}


def alloc_request(rows: Any, req: Any, cache: Any) -> None:
    first_of("allocation:alloc_req_slots", "common:alloc_req_slots")(rows, [req], cache)
    if getattr(req, "kv", req) is None:  # created with its first pages
        req.kv = schedule_batch.ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)


def book(req: Any, **values: object) -> None:
    kv = getattr(req, "kv", None)
    for name, value in values.items():
        setattr(kv if hasattr(kv, name) else req, name, value)


def booked(req: Any, name: str) -> Any:
    kv = getattr(req, "kv", None)
    return getattr(kv if hasattr(kv, name) else req, name)


def prefix_len(req: Any) -> int:
    if hasattr(req, "prefix_indices"):
        return len(req.prefix_indices)
    return int(req.prefix_len)


def add_loaded(req: Any, loaded: tuple[Any, Any]) -> None:
    """Extend a request's prefix by what SGLang has loaded back from the host.

    `loaded` is the result of `init_load_back`: a count or indices, and the last node of the prefix.
    """
    brought, req.last_node = loaded
    if hasattr(req, "prefix_indices"):
        req.prefix_indices = torch.cat([req.prefix_indices, brought])
    else:
        req.prefix_len += brought
    book(req, cache_protected_len=prefix_len(req))


def lock_prefix(cache: Any, req: Any) -> None:
    if hasattr(cache, "lock"):
        req.lock = cache.lock(req.last_node)
        return
    adder = SimpleNamespace(tree_cache=cache, is_hybrid_swa=cache.supports_swa())
    PrefillAdder._req_inc_lock_ref(adder, req)


def write_prefix(cache: Any, rows: Any, req: Any) -> None:
    if hasattr(req, "prefix_indices"):
        indices = req.prefix_indices
    else:
        indices = cache.path_device_indices(req.last_node)
    rows.write((booked(req, "req_pool_idx"), slice(0, len(indices))), indices)


def publish_prompt(cache: Any, req: Any, prompt_len: int) -> None:
    if hasattr(common, "checkpoint_kv_cache"):
        req.extend_end = prompt_len
        common.checkpoint_kv_cache(req, cache)
    else:
        req.set_extend_range(prefix_len(req), prompt_len)
        cache.cache_unfinished_req(req)


def release(cache: Any, req: Any) -> None:
    if "checkpoint" in inspect.signature(common.release_kv_cache).parameters:
        common.release_kv_cache(req, cache, checkpoint=True)
    else:
        common.release_kv_cache(req, cache)


def leave_window(cache: Any, rows: Any, allocator: Any, req: Any, length: int) -> None:
    """Free the sliding-window pages of a request that are no longer needed.

    Tokens from position `length` on do not attend to these pages.
    """
    if hasattr(cache, "evict_sliding_windows"):
        cache.evict_sliding_windows(req, length)
        return
    batch = SimpleNamespace(
        tree_cache=cache, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator
    )
    schedule_batch.ScheduleBatch._evict_swa(batch, req, length)


def handle_of(req: Any) -> Any:
    return getattr(req, "cache_request_handle", req.rid)


def start_prefetch(cache: Any, req: Any) -> bool:
    node = req.last_host_node
    if hasattr(cache, "is_backuped"):
        is_anchor = cache.is_backuped(node) or cache.is_root(node)
        last_hash = cache.get_last_hash_value(node) if is_anchor else None
    else:
        is_anchor = node.backuped or node is cache.root_node
        last_hash = node.get_last_hash_value() if is_anchor else None
    if not is_anchor:
        return False
    tokens = req.full_untruncated_fill_ids
    matched = prefix_len(req) + req.host_hit_length
    more = {}
    if "matched_prefix_tokens" in inspect.signature(cache.prefetch_from_storage).parameters:
        more["matched_prefix_tokens"] = tokens[:matched]
    cache.prefetch_from_storage(
        handle_of(req), node, tokens[matched : len(tokens) - 1], last_hash, None, **more
    )
    return True


def tree_size(cache: Any, component: Any) -> int:
    core = getattr(cache, "tree_core", cache)
    return sum(
        int(getattr(core, name)(component))
        if hasattr(core, name)
        else int(getattr(core, f"{name}_")[component])
        for name in ("component_evictable_size", "component_protected_size")
    )


def free_sizes(allocator: Any, rows: Any) -> dict[str, int]:
    full = getattr(allocator, "full_attn_allocator", allocator)
    window = getattr(allocator, "swa_attn_allocator", None)
    states = getattr(rows, "mamba_allocator", None) or getattr(rows, "mamba_pool", None)
    pools = {"full": full, "swa": window, "mamba": states}
    return {name: int(pool.available_size()) for name, pool in pools.items() if pool is not None}


def root_of(cache: Any) -> Any:
    core = getattr(cache, "tree_core", None)
    if core is None:
        return cache.root_node
    return getattr(core, "root_node", None)

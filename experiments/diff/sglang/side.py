"""Drives SGLang's cache one request at a time, and does its scheduler's part."""

import functools
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from os.path import commonprefix
from typing import Any

import numpy as np
import torch.distributed

from experiments.diff.counting import Tally, admission_word, joined
from experiments.diff.pages import NodeView, PageSpan, page_span, state_of
from experiments.diff.protocol import (
    STAGES,
    Arrival,
    Hits,
    Outcome,
    Pools,
    Side,
    SideError,
    Span,
    StepRow,
    Tokens,
)
from experiments.diff.sglang import device  # before anything of the package
from experiments.diff.sglang.clock import Clock
from experiments.diff.sglang.stages import Stages

import sglang  # isort: skip
from sglang.srt.environ import envs  # isort: skip
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req  # isort: skip
from sglang.srt.mem_cache import utils  # isort: skip
from sglang.srt.mem_cache.allocation import alloc_req_slots  # isort: skip
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams  # isort: skip
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # isort: skip
from sglang.srt.mem_cache.common import (  # isort: skip
    checkpoint_kv_cache,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.hicache_storage import PoolName  # isort: skip
from sglang.srt.mem_cache.radix_cache import RadixKey  # isort: skip
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # isort: skip
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # isort: skip
from sglang.srt.runtime_context import get_parallel  # isort: skip
from sglang.srt.sampling.sampling_params import SamplingParams  # isort: skip
from sglang.srt.server_args import (  # isort: skip
    ServerArgs,
    set_global_server_args_for_scheduler,
)
from experiments.diff.sglang.memory import make_memory, take_pages  # isort: skip

NAMES = {ComponentType.FULL: "full", ComponentType.SWA: "swa", ComponentType.MAMBA: "mamba"}
POOLS = {
    ComponentType.FULL: PoolName.KV,
    ComponentType.SWA: PoolName.SWA,
    ComponentType.MAMBA: PoolName.MAMBA,
}
PATIENCE_S = 60.0  # the package's threads take milliseconds


class SglangSide:
    def __init__(self, pools: Pools, options: Mapping[str, str]) -> None:
        """Open SGLang's cache with the given pool sizes.

        `options` may contain `core` (python or rust), `eviction` and `write_policy`. An eviction
        policy is a name that SGLang knows, or `module:Class`.
        """
        core, eviction = options.get("core", "python"), options.get("eviction", "lru")
        page = self._page = pools.page_size
        if pools.in_flight and pools.num_states:  # KVCacheConfigurator.resolve_max_num_reqs
            pools = replace(pools, max_running=min(pools.max_running, pools.num_states // 5))
        self.pools = pools
        self._core, self._eviction = core, eviction
        self._write_policy = options.get("write_policy", "write_through")
        Clock.delay = pools.copy_delay
        self._has_host = pools.host_tokens > 0
        args = {
            "model_path": "dummy",
            "page_size": page,
            "device": "cpu",
            "attention_backend": "torch_native",
            "chunked_prefill_size": pools.chunk_tokens,
            "max_running_requests": pools.max_running,
            "pp_max_micro_batch_size": pools.max_running,
            "mamba_radix_cache_strategy": "extra_buffer" if pools.num_states else "auto",
            "mamba_track_interval": page,  # of answers: a state at each page
        }
        if self._has_host:
            args |= {
                "hicache_ratio": pools.host_ratio,
                "hicache_io_backend": "kernel",
                "hicache_mem_layout": "page_first",
                "hicache_write_policy": self._write_policy,
                "hicache_storage_prefetch_policy": "wait_complete",
            }
        if pools.has_storage:
            args |= {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": (
                    '{"backend_name": "keys", "module_path": "experiments.diff.sglang.storage",'
                    ' "class_name": "KeyStorage", "interface_v1": 1}'
                ),
            }
        server_args = ServerArgs(**args)
        server_args._mamba_cache_chunk_size = page
        set_global_server_args_for_scheduler(server_args)
        # keep a reference: the package drops them when this object is collected
        rank, stages = int(options.get("rank", 0)), int(options.get("stages", 1))
        self._ranks = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=rank, pp_size=stages)
        self._ranks.__enter__()
        memory = make_memory(pools)
        self.allocator, self.rows = memory.allocator, memory.rows
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            sliding_window_size=pools.window_len or None,
            enable_mamba_extra_buffer=pools.num_states > 0,
            tree_components=memory.components,
            eviction_policy=known_policy(eviction),
            tree_core_backend=core,
            is_eagle=options.get("speculation") == "eagle",
            pp_rank=rank,
            pp_size=stages,
            pp_cache_group=torch.distributed.group.WORLD if stages > 1 else None,
        )
        self.cache = UnifiedRadixCache(params)
        if self._has_host:
            self.cache.init_hicache(server_args, params)
        if options.get("votes") == "no":
            self.cache.pp_rank, self.cache.pp_size = 0, 1
        self._kinds = memory.components
        self._host_pools = self._find_host_pools()
        self._tally = Tally(pools)
        device.count_copies(self._count_copy)
        self._count_evictions()
        self._running: dict[int, tuple[Any, Any]] = {}
        # by node: name of the preceding page, length, its pages
        self._pages: dict[int, tuple[int, int, PageSpan]] = {}
        self._steps: Any = None
        if pools.in_flight:
            # it imports the package's server, in seconds
            self._steps = import_module("experiments.diff.sglang.steps").Steps(self, options)

    def about(self) -> dict[str, str]:
        version = getattr(sglang, "__version__", "of a checkout")
        return {
            "engine": "sglang",
            "version": version,
            "core": self._core,
            "eviction": self._eviction,
            "write_policy": self._write_policy,
            "aborts": "yes",
        }

    def admit(self, number: int, tokens: Tokens, prompt_len: int, stage: str = "") -> Outcome:
        cache = self.cache
        Clock.now = number
        req = request_of(f"{number}", tokens, prompt_len)
        self._settle()
        req.init_next_round_input(cache, cow_mamba=False)
        brought = self._prefetch(req, stage)
        if self._has_host:
            cache.check_hicache_events()
        if stage in STAGES[:2]:
            return self._outcome(Hits(0, 0, 0))
        req.init_next_round_input(cache)
        on_device = req.prefix_len
        admission = self._admission(req, prompt_len, len(tokens) - prompt_len)
        swa_loaded, states_loaded = req.swa_host_hit_length, req.mamba_host_hit_length
        if req.needs_host_load_back():
            self._load_back(req)
        host = req.prefix_len - on_device
        storage = min(brought, host)
        req.lock = cache.lock(req.last_node)
        alloc_req_slots(self.rows, [req], cache)
        indices = cache.path_device_indices(req.last_node)
        self.rows.write((req.kv.req_pool_idx, slice(0, len(indices))), indices)
        self._prefill(req, prompt_len, is_part=stage == "chunk")
        if req.prefix_len < prompt_len:
            # as process_pending_chunked_abort
            release_kv_cache(req, cache, checkpoint=False)
            self._settle()
        elif stage:
            self._end(req, tokens[: prompt_len + 1])
        else:
            self._running[number] = (req, tokens)
        return self._outcome(
            Hits(on_device, host - storage, storage), swa_loaded, states_loaded, admission
        )

    def _outcome(
        self,
        hits: Hits,
        swa_loaded: int = 0,
        states_loaded: int = 0,
        admission: str | None = None,
    ) -> Outcome:
        self._count_storage()
        return self._tally.outcome(
            hits,
            self._held(),
            swa_loaded=swa_loaded,
            states_loaded=states_loaded,
            admission=admission,
            state=self._state(),
        )

    def finish(self, number: int) -> None:
        self._end(*self._running.pop(number))

    def abort(self, number: int) -> None:
        # a running request decodes one step more, and ends as if its answer were complete
        req, tokens = self._running.pop(number)
        prompt_len = len(req.origin_input_ids)
        self._end(req, tokens[: prompt_len + (len(tokens) - prompt_len + 1) // 2])

    def _end(self, req: Any, tokens: Tokens) -> None:
        prompt_len = len(req.origin_input_ids)
        req.output_ids = array("q", tokens[prompt_len:].astype(np.int64).tobytes())
        self._decode(req, prompt_len, len(tokens) - 1)
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)
        self._settle()

    def step(self, arrivals: list[Arrival]) -> StepRow:
        row: StepRow = self._steps.step(arrivals)
        if self._has_host:  # the next pass would begin with it
            self.cache.check_hicache_events()
        free = self._available("full") + int(self.cache.full_evictable_size())
        return row | {
            "free": free // self._page,
            "pools": {NAMES[kind]: self._available(NAMES[kind]) for kind in self._kinds},
            "held": self._held(),
            "moved": self._tally.take(),
        }

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        # the Rust core reports only what storage holds
        extra = int(
            self.cache.tree_core.is_eagle
        )  # a page of bigrams ends with a token of the next
        ids = tokens[: (len(tokens) - extra) // self._page * self._page + extra].tolist()
        found: dict[str, list[Span]] = {}
        self._probe_tree(ids, found)
        if self.pools.has_storage:
            self._probe_storage(ids, found)
        return {name: joined(spans, self._page, name) for name, spans in found.items()}

    def close(self) -> None:
        if self._has_host:
            self.cache.cache_controller._stop_storage_threads()

    # -- what the scheduler does -------------------------------------------------------------------

    def _admission(self, req: Any, prompt_len: int, num_new: int) -> str:
        cache, page = self.cache, self._page
        extend = prompt_len - req.prefix_len
        computed, chunk_tokens = extend - req.host_hit_length, self.pools.chunk_tokens
        lock = cache.inc_lock_ref(req.last_node)
        budget = self.allocator.create_prefill_budget(cache)
        may, chunk = budget.check_prefill(
            extend_input_len=computed,
            total_tokens=extend + num_new + page,
            max_new_tokens=num_new,
            input_tokens=computed,
            swa_host_hit_length=req.swa_host_hit_length,
            chunk_limit=chunk_tokens,
        )
        cache.dec_lock_ref(req.last_node, lock.to_dec_params())
        return admission_word(chunk if may else None, min(computed, chunk_tokens))

    def _load_back(self, req: Any) -> None:
        cache = self.cache
        loaded = cache.init_load_back(
            InitLoadBackParams(
                best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
            )
        )
        if loaded is None:
            return
        brought, req.last_node = loaded
        req.prefix_len += brought
        req.kv.cache_protected_len = req.prefix_len
        # the prefill waits for loads layer by layer; they are acknowledged after its first chunk
        with Clock.at_once():
            cache.ready_to_load_host_cache()

    def _prefill(self, req: Any, prompt_len: int, *, is_part: bool) -> None:
        # as the scheduler does after each chunk (stash_chunked_request); a part is one chunk
        while req.prefix_len < prompt_len:
            end = min(req.prefix_len + self.pools.chunk_tokens, prompt_len)
            self._extend(req, req.prefix_len, end)
            if self.pools.num_states:
                self._track_prefill(req, end)
            req.extend_end = end
            self._settle()  # the next pass first takes in the events of the step, then the chunk
            checkpoint_kv_cache(req, self.cache)
            if is_part:
                break
        self._settle()

    def _extend(self, req: Any, start: int, end: int) -> None:
        # a prefill asks for a page more than it needs (alloc_paged_token_slots_extend)
        page = self._page
        held = -(-start // page) * page
        if end > held:
            count = -(-end // page) * page - held
            evict_from_tree_cache(self.cache, count + page)
            self._take(req, held, count)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end

    def _decode(self, req: Any, start: int, end: int) -> None:
        # as the decode steps for the tokens [start, end): a step makes room for a page that it
        # needs (check_decode_mem), frees windows (maybe_evict_swa), and asks for a page, needed or
        # not (alloc_paged_token_slots_decode)
        page, interval = self._page, envs.SGLANG_SWA_EVICTION_INTERVAL.get()
        for place in range(start, end):
            if place % page == 0:
                if self.pools.num_states and place > start:
                    self._track(req, place)
                evict_from_tree_cache(self.cache, page)
            if self.pools.window_len and place > start:
                self.cache.evict_sliding_windows(req, place, eviction_interval=interval)
            evict_from_tree_cache(self.cache, page)
            if place % page == 0:
                self._take(req, place, page)
        if self.pools.num_states and end % page == 0 and end > start:
            self._track(req, end)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end

    def _take(self, req: Any, start: int, count: int) -> None:
        slots = take_pages(self.allocator, count)
        if slots is None:
            raise self.pools.too_small(start + count)
        self.rows.write((req.kv.req_pool_idx, slice(start, start + count)), slots)

    def _track_prefill(self, req: Any, end: int) -> None:
        # as ScheduleBatch.prepare_for_extend chooses the one state that a chunk captures
        page, start = self._page, req.prefix_len
        if end - start < page:
            return
        branch = req.mamba_branching_seqlen
        last = start + (end - start) // page * page
        self._track(req, branch if branch is not None and start < branch < end else last)

    def _track(self, req: Any, length: int) -> None:
        turn = req.kv.mamba_next_track_idx
        req.kv.mamba_last_track_idx = turn
        req.kv.mamba_next_track_idx = self.rows.get_mamba_ping_pong_other_idx(turn)
        req.kv.mamba_last_track_seqlen = length

    def _prefetch(self, req: Any, stage: str) -> int:
        cache, node = self.cache, req.last_host_node
        if not self._has_host or not cache.enable_storage:
            return 0
        if not (cache.is_backuped(node) or cache.is_root(node)):
            return 0
        handle = req.cache_request_handle
        tokens = req.full_untruncated_fill_ids
        matched = req.prefix_len + req.host_hit_length
        cache.prefetch_from_storage(
            handle,
            node,
            tokens[matched : len(tokens) - 1],
            cache.get_last_hash_value(node),
            None,
            matched_prefix_tokens=tokens[:matched],
        )
        if stage == "queued":
            cache.release_aborted_request(handle)
            return 0
        if stage == "prefetching":
            self._abort_prefetch(handle)
            return 0

        def is_done() -> bool:
            cache.check_hicache_events()
            return bool(cache.check_prefetch_progress(handle))

        wait_for(is_done, "a prefetch")
        return int(cache.pop_prefetch_loaded_tokens(handle))

    def _abort_prefetch(self, handle: Any) -> None:
        # once host pages are taken; the reader begins after the abort, and reads nothing
        cache, buffer = self.cache, self.cache.cache_controller.prefetch_buffer
        waiting: list[Any] = []
        buffer.put = waiting.append

        def is_taken() -> bool:
            cache.check_hicache_events()
            return bool(waiting) or handle not in cache.ongoing_prefetch

        wait_for(is_taken, "an answer of storage")
        del buffer.put
        cache.release_aborted_request(handle)
        for operation in waiting:
            left = self._on_host()["full"] - len(operation.host_indices)
            buffer.put(operation)

            def is_free(left: int = left) -> bool:
                cache.check_hicache_events()
                return self._on_host()["full"] == left

            wait_for(is_free, "the end of an aborted prefetch")

    def _settle(self) -> None:
        # complete all due copies and writes before the next decision
        cache = self.cache
        if not self._has_host:
            return

        def is_done() -> bool:
            cache.check_hicache_events()
            if cache.ongoing_backup:
                return False
            if self.pools.copy_delay:
                return True
            controller = cache.cache_controller
            return not (
                cache.ongoing_write_through or cache.ongoing_load_back or controller.ack_write_queue
            )

        wait_for(is_done, "a copy")

    # -- what is counted -----------------------------------------------------------------------

    def _find_host_pools(self) -> dict[Any, Any]:
        if not self._has_host:
            return {}
        group = self.cache.cache_controller.mem_pool_host
        entries = getattr(group, "entry_map", None)
        if entries is None:  # a model of full attention alone has no group
            return {ComponentType.FULL: group}
        return {
            kind: entries[name].host_pool
            for kind, name in POOLS.items()
            if kind in self._kinds and name in entries
        }

    def _count_copy(self, pool: object, how: str, amount: int) -> None:
        for kind, ours in self._host_pools.items():
            if ours is pool:
                self._tally.moved(NAMES[kind], how, amount)

    def _count_storage(self) -> None:
        if not self.pools.has_storage:
            return
        storage = self.cache.cache_controller.storage_backend
        moved, storage.moved = storage.moved, type(storage.moved)()
        names = {pool.value: NAMES[kind] for kind, pool in POOLS.items()}
        for (pool, how), amount in moved.items():
            self._tally.moved(names[pool], how, amount * self.pools.unit(names[pool]))

    def _count_evictions(self) -> None:
        # evicted amounts by difference, independent of the release's own counts
        cache = self.cache
        cache._evict = self._counting(cache._evict, "device", self._on_device)
        cache.evict_host = self._counting(cache.evict_host, "host", self._on_host)

    def _counting(
        self, evict: Callable[..., Any], tier: str, held: Callable[[], dict[str, int]]
    ) -> Callable[..., Any]:
        @functools.wraps(evict)
        def counted(*args: object, **more: object) -> object:
            before = held()
            result = evict(*args, **more)
            for name, amount in held().items():
                self._tally.evicted(f"{name}/{tier}", max(before[name] - amount, 0))
            return result

        return counted

    def _on_device(self) -> dict[str, int]:
        core = self.cache.tree_core
        sizes = (core.component_evictable_size, core.component_protected_size)
        return {NAMES[kind]: sum(int(size(kind)) for size in sizes) for kind in self._kinds}

    def _on_host(self) -> dict[str, int]:
        return {
            NAMES[kind]: pool.size - pool.available_size()
            for kind, pool in self._host_pools.items()
        }

    def _held(self) -> dict[str, int]:
        held = {f"{name}/device": amount for name, amount in self._on_device().items()}
        held |= {f"{name}/host": amount for name, amount in self._on_host().items()}
        if self.pools.has_storage:
            storage = self.cache.cache_controller.storage_backend
            for kind in self._kinds:
                unit = self.pools.unit(NAMES[kind])
                held[f"{NAMES[kind]}/storage"] = len(storage.of(POOLS[kind])) * unit
        return held

    def _state(self) -> dict[str, int]:
        names = [NAMES[kind] for kind in self._kinds]
        state = {f"free/{name}/device": self._available(name) for name in names}
        if self._root is None:
            return state
        return state | state_of(self._nodes(), self.pools)

    def _available(self, name: str) -> int:
        allocator = self.allocator
        free = {
            "full": getattr(allocator, "full_attn_allocator", allocator),
            "swa": getattr(allocator, "swa_attn_allocator", None),
            "mamba": getattr(self.rows, "mamba_allocator", None),
        }
        return int(free[name].available_size())

    @property
    def _root(self) -> Any:
        return getattr(self.cache.tree_core, "root_node", None)  # the Rust core has none to show

    def _values(self, node: Any, kind: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
        data = node.component_data[kind]
        return ("device", data.value), ("host", data.host_value)

    def _nodes(self) -> Iterator[NodeView]:
        # all nodes below the root; the names of a node's pages are computed once
        places = [(kind, f"{NAMES[kind]}/device", f"{NAMES[kind]}/host") for kind in self._kinds]
        waiting = [(self._root, 0)]
        while waiting:
            parent, before = waiting.pop()
            for node in parent.children.values() if parent is not None else ():
                count, known = len(node.key), self._pages.get(node.id)
                if known is None or known[:2] != (before, count):
                    tokens = np.array(node.key.token_ids[:count], np.int32)
                    known = before, count, page_span(tokens, self._page, before)
                    self._pages[node.id] = known
                held: list[str] = []
                locks: dict[str, int] = {}
                for kind, upper, lower in places:
                    data = node.component_data[kind]
                    if data.value is not None:
                        held.append(upper)
                    if data.host_value is not None:
                        held.append(lower)
                    if data.lock_ref:
                        locks[upper] = data.lock_ref
                    if data.host_lock_ref:
                        locks[lower] = data.host_lock_ref
                yield NodeView(known[2], held, locks)
                waiting.append((node, known[2].last))

    def _probe_tree(self, ids: list[int], found: dict[str, list[Span]]) -> None:
        page, extra, start = self._page, int(self.cache.tree_core.is_eagle), 0
        node, first = self._root, page + extra
        while node is not None and start < len(ids) - extra:
            children = {tuple(each.key.token_ids[:first]): each for each in node.children.values()}
            node = children.get(tuple(ids[start : start + first]))
            if node is None:
                return
            key = list(node.key.token_ids[: len(node.key) + extra])
            same = len(commonprefix([key, ids[start:]])) - extra  # noqa: RUF071 - lists
            same = same // page * page
            for kind in self._kinds:
                for tier, value in self._values(node, kind):
                    whole = kind != ComponentType.MAMBA or same == len(node.key)
                    if value is not None and whole:
                        span = (start // page, (start + same) // page)
                        found.setdefault(f"{NAMES[kind]}/{tier}", []).append(span)
            start += same
            if same < len(node.key):
                return

    def _probe_storage(self, ids: list[int], found: dict[str, list[Span]]) -> None:
        storage, page = self.cache.cache_controller.storage_backend, self._page
        extra = int(self.cache.tree_core.is_eagle)
        key = None
        for place in range(len(ids) // page):
            end = (place + 1) * page + extra
            text = RadixKey(array("q", ids[place * page : end]), is_bigram=extra > 0)
            key = utils.get_hash_str(text, key)
            for kind in self._kinds:
                if key in storage.of(POOLS[kind]):
                    found.setdefault(f"{NAMES[kind]}/storage", []).append((place, place + 1))


def wait_for(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        if time.monotonic() > deadline:
            raise SideError(f"{what} did not finish within {PATIENCE_S:.0f} s")
        time.sleep(2e-4)


def request_of(name: str, tokens: Tokens, prompt_len: int) -> Any:
    sampling = SamplingParams(temperature=0, max_new_tokens=len(tokens) - prompt_len)
    sampling.normalize(None)
    return Req(
        rid=name,
        origin_input_text="",
        origin_input_ids=array("q", tokens[:prompt_len].astype(np.int64).tobytes()),
        sampling_params=sampling,
    )


def known_policy(eviction: str) -> str:
    if ":" not in eviction:
        return eviction
    module, _, name = eviction.partition(":")
    try:
        policy = getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError) as error:
        raise SideError(f"--eviction {eviction} cannot be loaded: {error}") from error
    if not hasattr(policy, "get_priority"):
        raise SideError(f"--eviction {eviction} must have get_priority(node), which SGLang calls")
    utils._EVICTION_POLICY_FACTORIES["own"] = lambda **_: policy()
    return "own"


def open_side(pools: Pools, options: Mapping[str, str]) -> Side:
    if int(options.get("stages", 1)) > 1:
        return Stages(SglangSide, pools, options)
    return SglangSide(pools, options)

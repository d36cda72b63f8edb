"""Drives vLLM's scheduler one request at a time."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from experiments.diff.counting import Tally, joined
from experiments.diff.protocol import (
    Arrival,
    Hits,
    Outcome,
    Pools,
    SideError,
    Span,
    StepRow,
    Tokens,
)
from experiments.diff.vllm.engine import make_scheduler  # before anything else of the package

import vllm  # isort: skip
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (  # isort: skip
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams  # isort: skip
from vllm.utils.hashing import sha256  # isort: skip
from vllm.v1.core.kv_cache_utils import (  # isort: skip
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # isort: skip
from vllm.v1.request import Request, RequestStatus  # isort: skip
from experiments.diff.vllm.corrected import correct  # isort: skip
from experiments.diff.vllm.dialect import on_device  # isort: skip
from experiments.diff.vllm.steps import VllmSteps  # isort: skip

GROUP_BYTES = 4  # suffix of an offloaded block's key, after the hash


class VllmSide:
    def __init__(self, pools: Pools, options: Mapping[str, str]) -> None:
        """Start vLLM's scheduler with an empty cache and the given pool sizes.

        `options` may contain `eviction`, the eviction policy of the CPU tier: lru, arc, or
        `module:Class`. If `options` contains `corrected`, known faults of vLLM are corrected.
        If `scheduling` is `asynchronous`, a step is scheduled before the one before it has ended.
        """
        if options.get("core", "python") != "python":
            raise SideError(f"vllm {vllm.__version__} has no {options['core']} core")
        eviction = options.get("eviction", "lru")
        self._pools, self._eviction = pools, eviction
        self._page, self._kinds = pools.page_size, pools.components
        init_none_hash(sha256)
        self._hash_blocks = get_request_block_hasher(self._page, sha256)
        is_late = pools.in_flight > 0 and options.get("scheduling") == "asynchronous"
        self._scheduler = make_scheduler(
            pools,
            eviction=eviction,
            is_late=is_late,
            has_draft=options.get("speculation") == "eagle",
        )
        self._steps = VllmSteps(self._scheduler, pools, is_late=is_late)
        if options.get("corrected"):
            correct(self._scheduler)
        self._blocks = self._scheduler.kv_cache_manager.block_pool
        self._tally = Tally(pools)
        self._on_host: set[bytes] = set()  # keys on the host
        self._num_held: Counter[str] = Counter()  # blocks, as `full/device`
        self._loaded: Counter[str] = Counter()  # loaded for the current request
        self._running: dict[int, tuple[Any, Tokens]] = {}
        self._late: deque[tuple[int, int]] = deque()  # copies to the host: when done, number
        self._now = 0
        self._count_evictions()

    def about(self) -> dict[str, str]:
        return {"engine": "vllm", "version": vllm.__version__, "eviction": self._eviction}

    def admit(self, number: int, tokens: Tokens, prompt_len: int) -> Outcome:
        self._now = number
        request = self._make_request(str(number), tokens, prompt_len)
        found = request.prefill_stats
        self._loaded.clear()
        scheduler = self._scheduler
        others, scheduler.running = scheduler.running, []
        scheduler.add_request(request)
        # an answer of one token would end the request here; `finish` must end it
        has_more = len(tokens) > prompt_len + 1
        self._compute(request, prompt_len, tokens[prompt_len : prompt_len + has_more])
        scheduler.running = [*others, *scheduler.running]
        self._running[number] = request, tokens
        hits = Hits(found.num_local_cached_tokens, found.num_external_cached_tokens, 0)
        if set(self._loaded) == {"full"}:  # corrected, vLLM takes blocks that it looked for on the
            loaded = self._loaded["full"]  # host from the device, if that has them
            hits = Hits(sum(hits) - loaded, loaded, 0)
        return self._tally.outcome(
            hits,
            self._held(),
            swa_loaded=self._loaded["swa"],
            states_loaded=self._loaded["mamba"],
            admission=None,
        )

    def finish(self, number: int) -> None:
        request, tokens = self._running.pop(number)
        scheduler = self._scheduler
        others = [each for each in scheduler.running if each is not request]
        scheduler.running = [request]
        last = len(tokens) - 1  # sampled, never computed
        while request.num_computed_tokens < last:
            end = min((request.num_computed_tokens // self._page + 1) * self._page, last)
            request.append_output_token_ids(tokens[request.num_tokens : end].tolist())
            self._compute(request, end, tokens[end : end + 1])
        if not request.is_finished():
            request.append_output_token_ids(int(tokens[-1]))
            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_LENGTH_CAPPED)
        scheduler.running = []
        self._step()  # in this step the connector stores the request's last blocks
        scheduler.running = others

    def step(self, arrivals: list[Arrival]) -> StepRow:
        self._now += 1
        for number, tokens, prompt_len in arrivals:
            request = self._make_request(str(number), tokens, prompt_len)
            self._steps.add(request, tokens)
        row = self._steps.step(self._copy)
        return row | {"held": self._held(), "moved": self._tally.take()}

    def probe(self, tokens: Tokens) -> dict[str, list[Span]]:
        hashes = self._make_request("probe", tokens, len(tokens)).block_hashes
        found: dict[str, list[Span]] = {}
        for group, kind in enumerate(self._kinds):
            for place, block_hash in enumerate(hashes):
                span = (place, place + 1)
                if self._blocks.get_cached_block(block_hash, [group]):
                    found.setdefault(f"{kind}/device", []).append(span)
                if block_hash + group.to_bytes(GROUP_BYTES, "big") in self._on_host:
                    found.setdefault(f"{kind}/host", []).append(span)
        return {name: joined(spans, self._page, name) for name, spans in found.items()}

    def close(self) -> None: ...

    # -- what an engine's loop and its worker do -----------------------------------------------

    def _make_request(self, name: str, tokens: Tokens, prompt_len: int) -> Any:
        return Request(
            request_id=name,
            prompt_token_ids=tokens[:prompt_len].tolist(),
            sampling_params=SamplingParams(
                max_tokens=max(len(tokens) - prompt_len, 1), ignore_eos=True, temperature=0.0
            ),
            pooling_params=None,
            block_hasher=self._hash_blocks,
        )

    def _compute(self, request: Any, end: int, sampled: Tokens) -> None:
        # steps until tokens up to `end` are computed, the last of which samples
        while request.num_computed_tokens < end:
            before = request.num_computed_tokens, request.status
            self._step(request, end, sampled.tolist())
            if (request.num_computed_tokens, request.status) == before:
                raise self._pools.too_small(end)

    def _step(self, request: Any = None, end: int = 0, sampled: list[int] | None = None) -> None:
        output = self._scheduler.schedule()
        connected = self._copy(output.kv_connector_metadata)
        names = list(output.num_scheduled_tokens)
        is_end = request is not None and request.num_computed_tokens >= end
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=[sampled or [] if is_end else [] for _ in names],
                kv_connector_output=connected,
            ),
        )

    def _copy(self, asked: Any) -> Any:
        # load-backs complete in the step that requests them
        if asked is None:
            return None
        done, received = set(), set()
        for number, job in asked.load_jobs.items():
            done.add(number)
            received.add(job.req_id)
            self._loaded.update(self._count_copy(job, "load_back"))
        for number, job in asked.store_jobs.items():
            self._late.append((self._now + self._pools.copy_delay, number))
            self._count_copy(job, "back_up")
        # a job may be flushed again before its end was reported
        done.update({number for _, number in self._late}.intersection(asked.jobs_to_flush or ()))
        while self._late and self._late[0][0] <= self._now:
            done.add(self._late.popleft()[1])
        self._late = deque(each for each in self._late if each[1] not in done)
        return KVConnectorOutput(
            finished_recving=received,
            kv_connector_worker_meta=OffloadingWorkerMetadata(
                completed_jobs=dict.fromkeys(sorted(done), 1)
            ),
        )

    # -- what is counted -----------------------------------------------------------------------

    def _count_copy(self, job: Any, how: str) -> dict[str, int]:
        sizes = on_device(job, is_store=how == "back_up").group_sizes
        if how == "load_back":  # a corrected scheduler loads only what the device lacks
            managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
            sizes = [
                getattr(manager, "num_loaded", {}).get(job.req_id, size)
                for manager, size in zip(managers, sizes, strict=True)
            ]
        amounts = {
            kind: size * self._pools.unit(kind)
            for kind, size in zip(self._kinds, sizes, strict=True)
        }
        for kind, amount in amounts.items():
            self._tally.moved(kind, how, amount)
        return amounts

    def _count_evictions(self) -> None:
        blocks = self._blocks
        evict = blocks._maybe_evict_cached_block

        def counting_evict(block: Any) -> bool:
            key = block.block_hash
            is_evicted = bool(evict(block))
            if is_evicted:
                kind = self._kinds[get_group_id(key)]
                self._tally.evicted(f"{kind}/device", self._pools.unit(kind))
            return is_evicted

        blocks._maybe_evict_cached_block = counting_evict
        self._count_cached(blocks.cached_block_hash_to_block)
        if self._scheduler.connector is None:
            return
        manager = self._scheduler.connector.connector_scheduler.manager
        prepare, complete = manager.prepare_store, manager.complete_store

        def counting_prepare(*args: Any, **more: Any) -> Any:
            prepared = prepare(*args, **more)
            for key in prepared.evicted_keys if prepared is not None else ():
                self._on_host.remove(key)
                kind = self._kind_of(key)
                self._num_held[f"{kind}/host"] -= 1
                self._tally.evicted(f"{kind}/host", self._pools.unit(kind))
            return prepared

        def counting_complete(keys: Any, *args: Any, **more: Any) -> None:
            complete(keys, *args, **more)
            for key in set(keys) - self._on_host:
                self._on_host.add(key)
                self._num_held[f"{self._kind_of(key)}/host"] += 1

        manager.prepare_store, manager.complete_store = counting_prepare, counting_complete

    def _count_cached(self, cached: Any) -> None:
        # `cached` may hold several blocks of a key; keys count
        def counting(change: Any) -> Any:
            def change_and_count(key: Any, block: Any) -> Any:
                before = len(cached)
                result = change(key, block)
                self._num_held[f"{self._kinds[get_group_id(key)]}/device"] += len(cached) - before
                return result

            return change_and_count

        cached.insert, cached.pop = counting(cached.insert), counting(cached.pop)

    def _held(self) -> dict[str, int]:
        return {
            f"{kind}/{tier}": self._num_held[f"{kind}/{tier}"] * self._pools.unit(kind)
            for kind in self._kinds
            for tier in ("device", "host")
        }

    def _kind_of(self, key: bytes) -> str:
        return self._kinds[int.from_bytes(key[-GROUP_BYTES:], "big")]


open_side = VllmSide  # as the protocol asks for it

"""SGLang's decode server without a GPU: its queues and its cache, driven by a list of calls.

`DecodePreallocQueue.pop_preallocated` and `resume_retracted_reqs`,
`DecodeTransferQueue.pop_transferred`, `ScheduleBatch.retract_decode`, both HiCache mixins, the fake
receiver, tree, pools and prefetch are the package's own code. Stand-ins are the scheduler that the
queues read and its handling of aborts, the steps that decode, and the bytes of all copies.
"""

import pickle
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.diff.protocol import Pools, Tokens
from experiments.diff.sglang.clock import Clock
from experiments.diff.sglang.side import SglangSide, request_of, wait_for

import torch.distributed  # isort: skip
from sglang.srt.disaggregation.base import KVPoll  # isort: skip
from sglang.srt.disaggregation.decode import (  # isort: skip
    DecodePreallocQueue,
    DecodeTransferQueue,
    _bind_root_prefix,
)
from sglang.srt.disaggregation.decode_hicache_mixin import HiCacheRestoreResult  # isort: skip
from sglang.srt.disaggregation.utils import (  # isort: skip
    FAKE_BOOTSTRAP_HOST,
    MetadataBuffers,
    ReqToMetadataIdxAllocator,
    TransferBackend,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, ScheduleBatch  # isort: skip
from sglang.srt.mem_cache.common import (  # isort: skip
    checkpoint_kv_cache,
    discard_kv_cache_backup,
    release_kv_cache,
)
from sglang.srt.runtime_context import get_disagg, get_parallel  # isort: skip
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # isort: skip


class Preallocation(DecodePreallocQueue):  # type: ignore[misc]
    """SGLang's queue, which also notes what it found for the last request that it considered."""

    found: Any = None

    def _match_prefix_and_lock(self, req: Any) -> Any:
        self.found = super()._match_prefix_and_lock(req)
        return self.found


class Running(ScheduleBatch):  # type: ignore[misc]
    """SGLang's batch of the requests that decode, which retracts one when it is told to."""

    def __init__(self, side: SglangSide) -> None:
        self.reqs: list[Any] = []
        self.req_to_token_pool, self.tree_cache = side.rows, side.cache
        self.token_to_kv_pool_allocator = side.allocator
        self.hisparse_coordinator = None

    def check_decode_mem(self, selected_indices: Any = None) -> bool:
        return True

    def filter_batch(self, *, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[place] for place in sorted(keep_indices)]


class DivergedError(Exception):
    """Raised when a request should decode that does not run here: a decision was another one."""


class DecodeServer:
    """A decode server that computes nothing; all copies end at once."""

    def __init__(self, pools: Pools, reserved: int, folder: Path) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1
        )
        self._side = side = SglangSide(pools, {})
        group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
        # the server's options refuse a cache on decode engines with fake transfers
        self._options = [
            get_parallel().override(attn_tp_group=group, attn_tp_rank=0, dp_rank=None),
            get_disagg().override(
                disaggregation_decode_enable_radix_cache=True,
                disaggregation_transfer_backend="fake",
                disaggregation_mode="decode",
                disaggregation_decode_retraction_backup="cpu_tensor",
            ),
        ]
        for each in self._options:
            each.__enter__()
        side.allocator.get_cpu_copy = side.allocator.load_cpu_copy = _nothing
        self._requests: dict[int, tuple[Any, Tokens]] = {}
        self._scheduler = scheduler = SimpleNamespace(
            running_batch=Running(side),
            enable_overlap=False,
            waiting_queue=[],
            last_batch=None,
            enable_hisparse=False,
            enable_lora=False,
            enable_priority_scheduling=False,
            enable_decode_hicache=pools.host_tokens > 0,
            kv_checksum_computer=None,
            random_seed=0,
            server_args=None,
            sliding_window_size=pools.window_len or None,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            model_config=SimpleNamespace(num_hidden_layers=1),
            tp_worker=SimpleNamespace(
                is_hybrid_swa=pools.window_len > 0,
                model_runner=SimpleNamespace(
                    kv_cache_dtype_str="bfloat16", swa_max_total_num_tokens=pools.swa_tokens
                ),
            ),
            batch_result_processor=SimpleNamespace(_maybe_update_reasoning_tokens=_nothing),
            metrics_reporter=SimpleNamespace(enable_metrics=False),
            output_streamer=SimpleNamespace(stream_output=_nothing),
        )
        slots = ReqToMetadataIdxAllocator(pools.max_running)
        buffers = MetadataBuffers(pools.max_running, 1, torch.bfloat16, 1)
        self._transfers = DecodeTransferQueue(slots, buffers, scheduler, side.cache)
        self._queue = scheduler.disagg_decode_prealloc_queue = Preallocation(
            side.rows,
            side.allocator,
            None,
            slots,
            buffers,
            scheduler,
            self._transfers,
            side.cache,
            gpu_id=0,
            bootstrap_port=0,
            max_total_num_tokens=pools.device_tokens,
            num_reserved_decode_tokens=reserved,
            transfer_backend=TransferBackend.FAKE,
        )

    def ask(self, number: int, tokens: Tokens, prompt_len: int, stage: str) -> list[Any]:
        req = request_of(f"{number}", tokens, prompt_len)
        req.vocab_size = 1 << 31
        req.bootstrap_host, req.bootstrap_room = FAKE_BOOTSTRAP_HOST, number
        self._requests[number] = req, tokens
        self._queue.add(req)
        return self.again(holds=stage == "restored")

    def again(self, *, holds: bool = False) -> list[Any]:
        """Do as `process_decode_queue` does.

        Return which requests resumed, whether another is admitted, what was found of it, and the
        promise. If the request is admitted and its transfer `holds`, it is aborted when its KV is
        restored.
        """
        numbers: list[int] = []
        while True:  # until no more requests resume
            resumed, *answer = self._pass(holds=holds)
            numbers += resumed
            if answer[0] or not resumed:
                return [numbers, *answer]

    def _pass(self, *, holds: bool) -> list[Any]:
        Clock.now += 1
        self._side._settle()
        self._scheduler.waiting_queue = resumed = self._queue.resume_retracted_reqs()
        for req in resumed:
            _bind_root_prefix(req, self._side.cache)
        numbers = [int(req.rid) for req in resumed]
        if self._queue.retracted_queue:
            self._begin(resumed)
            return [numbers, False]
        self._queue.found = None
        admitted, failed = self._queue.pop_preallocated()
        self._begin(resumed)
        assert not failed, f"{failed} failed"
        if len(admitted) > 1:
            raise DivergedError
        found = self._queue.found
        if holds and admitted:
            admitted[0].kv_receiver.poll = lambda: KVPoll.Transferring
        self._transfers.extend(admitted)
        ready: list[Any] = []

        def is_done() -> bool:
            self._side.cache.check_hicache_events()
            ready.extend(self._transfers.pop_transferred())
            status = [each.hicache_restore_status for each in self._transfers.queue]
            # without a host tier nothing is restored, and the status never changes
            restores = self._scheduler.enable_decode_hicache
            is_restored = not restores or status[:1] != [HiCacheRestoreResult.PENDING]
            return not status or (holds and is_restored)

        wait_for(is_done, "a restore")
        if self._transfers.queue:
            del admitted[0].kv_receiver.poll
            admitted[0].kv_receiver.abort()
            assert not self._transfers.pop_transferred()
        for req in ready:
            _, tokens = self._requests[int(req.rid)]
            req.output_ids[-1] = int(tokens[len(req.origin_input_ids)])  # not a made-up token
        self._begin(ready)
        self._side._settle()
        assert len(ready) == len(admitted) or holds, "a transfer failed"
        return [
            numbers,
            bool(admitted),
            found.l1_prefix_len,
            found.l2_host_hit_length,
            found.l3_storage_hit_length,
            found.decode_prefix_len,
        ]

    def _begin(self, reqs: list[Any]) -> None:
        # as `get_new_prebuilt_batch` and `process_prebuilt` do
        self._scheduler.waiting_queue = []
        for req in reqs:
            req.init_next_round_input(None)
            req.extend_end = req.kv.kv_committed_len
            checkpoint_kv_cache(req, self._side.cache)
            self._scheduler.running_batch.reqs.append(req)

    def finish(self, number: int) -> None:
        _, tokens = self._requests[number]
        self.decode(number, len(tokens) - 1)
        self._leave(number, FINISH_LENGTH(len(tokens)))

    def decode(self, number: int, kv_len: int) -> None:
        """Decode until the KV of a request has this length."""
        req, tokens = self._requests[number]
        if req not in self._scheduler.running_batch.reqs:
            raise DivergedError
        ids = tokens[len(req.origin_input_ids) : kv_len + 1]
        self._side._decode(req, req.kv.kv_committed_len, kv_len)
        req.output_ids = array("q", ids.astype("int64").tobytes())
        self._side._settle()

    def retract(self) -> list[int]:
        retracted, _, aborted = self._scheduler.running_batch.retract_decode()
        assert not aborted
        self._queue.extend(retracted, is_retracted=True)
        self._side._settle()
        return [int(req.rid) for req in retracted]

    def abort(self, number: int, where: str) -> None:
        """Abort a request as `Scheduler.abort_request` does."""
        req, _ = self._requests[number]
        if where == "running":  # without the step that it would still take part in
            self._leave(number, FINISH_ABORT())
        elif where == "retracted":
            discard_kv_cache_backup(req, self._side.cache, "cpu_tensor")
            self._queue.retracted_queue.remove(req)
        else:
            waiting = [each for each in self._queue.queue if each.req is req]
            for each in waiting:
                each.kv_receiver.abort()
            admitted, failed = self._queue.pop_preallocated() if waiting else ([], [])
            assert not admitted
            assert failed == waiting
        self._side._settle()

    def _leave(self, number: int, reason: Any) -> None:
        req, _ = self._requests.pop(number)
        self._scheduler.running_batch.reqs.remove(req)
        req.finished_reason = reason
        release_kv_cache(req, self._side.cache, checkpoint=True)
        self._side._settle()

    def close(self) -> None:
        self._side.close()


def _nothing(*_: object, **__: object) -> None: ...


def main() -> None:
    """Answer all calls of the standard input."""
    pools, reserved, folder, calls = pickle.load(sys.stdin.buffer)
    server = DecodeServer(pools, reserved, folder)
    answers = []
    for name, *arguments in calls:
        try:
            answers.append(getattr(server, name)(*arguments))
        except DivergedError:
            break
    server.close()
    Path(folder, "answers").write_bytes(pickle.dumps(answers))


if __name__ == "__main__":
    main()

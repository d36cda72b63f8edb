"""SGLang's decode server without a GPU: its queues and its cache, driven by a list of calls.

`DecodePreallocQueue.pop_preallocated`, `DecodeTransferQueue.pop_transferred`, both HiCache mixins,
the fake receiver, tree, pools and prefetch are the package's own code. Stand-ins are the scheduler
that the queues read, the steps that decode, and the bytes of all copies.
"""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.diff.protocol import Pools, Tokens
from experiments.diff.sglang.clock import Clock
from experiments.diff.sglang.side import SglangSide, request_of, wait_for

import torch.distributed  # isort: skip
from sglang.srt.disaggregation.decode import (  # isort: skip
    DecodePreallocQueue,
    DecodeTransferQueue,
)
from sglang.srt.disaggregation.utils import (  # isort: skip
    FAKE_BOOTSTRAP_HOST,
    MetadataBuffers,
    ReqToMetadataIdxAllocator,
    TransferBackend,
)
from sglang.srt.mem_cache.common import checkpoint_kv_cache  # isort: skip
from sglang.srt.runtime_context import get_disagg, get_parallel  # isort: skip
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # isort: skip


class Preallocation(DecodePreallocQueue):  # type: ignore[misc]
    """SGLang's queue, which also notes what it found for the last request that it considered."""

    found: Any = None

    def _match_prefix_and_lock(self, req: Any) -> Any:
        self.found = super()._match_prefix_and_lock(req)
        return self.found


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
            ),
        ]
        for each in self._options:
            each.__enter__()
        self._running: dict[int, tuple[Any, Tokens]] = {}
        self._coming: dict[int, tuple[Any, Tokens]] = {}
        self._scheduler = scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=[]),
            waiting_queue=[],
            last_batch=None,
            enable_hisparse=False,
            enable_lora=False,
            enable_priority_scheduling=False,
            enable_decode_hicache=pools.host_tokens > 0,
            kv_checksum_computer=None,
            random_seed=0,
            server_args=None,
            sliding_window_size=None,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            model_config=SimpleNamespace(num_hidden_layers=1),
            tp_worker=SimpleNamespace(
                is_hybrid_swa=False, model_runner=SimpleNamespace(kv_cache_dtype_str="bfloat16")
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

    def ask(self, number: int, tokens: Tokens, prompt_len: int) -> list[Any]:
        req = request_of(f"{number}", tokens, prompt_len)
        req.vocab_size = 1 << 31
        req.bootstrap_host, req.bootstrap_room = FAKE_BOOTSTRAP_HOST, number
        self._coming[number] = req, tokens
        self._queue.add(req)
        return self.again()

    def again(self) -> list[Any]:
        """Return whether the first request is admitted, what was found of it, and the promise."""
        Clock.now += 1
        self._side._settle()
        self._queue.found = None
        admitted, failed = self._queue.pop_preallocated()
        assert not failed, f"{failed} failed"
        assert len(admitted) < 2, f"{len(admitted)} were admitted at once"
        found = self._queue.found
        self._transfers.extend(admitted)
        ready: list[Any] = []

        def is_done() -> bool:
            self._side.cache.check_hicache_events()
            ready.extend(self._transfers.pop_transferred())
            return not self._transfers.queue

        wait_for(is_done, "a restore")
        for req in ready:
            _, tokens = self._coming[int(req.rid)]
            req.output_ids[-1] = int(tokens[len(req.origin_input_ids)])  # not a made-up token
            req.init_next_round_input(None)  # as `get_new_prebuilt_batch` does
            req.extend_end = req.kv.kv_committed_len
            checkpoint_kv_cache(req, self._side.cache)
            self._running[int(req.rid)] = self._coming.pop(int(req.rid))
            self._scheduler.running_batch.reqs.append(req)
        self._side._settle()
        assert len(ready) == len(admitted), "a transfer failed"
        return [
            bool(admitted),
            found.l1_prefix_len,
            found.l2_host_hit_length,
            found.l3_storage_hit_length,
            found.decode_prefix_len,
        ]

    def finish(self, number: int) -> None:
        req, tokens = self._running.pop(number)
        self._scheduler.running_batch.reqs.remove(req)
        self._side._end(req, tokens)

    def close(self) -> None:
        self._side.close()


def _nothing(*_: object, **__: object) -> None: ...


def main() -> None:
    """Answer all calls of the standard input."""
    pools, reserved, folder, calls = pickle.load(sys.stdin.buffer)
    server = DecodeServer(pools, reserved, folder)
    answers = [getattr(server, name)(*arguments) for name, *arguments in calls]
    server.close()
    Path(folder, "answers").write_bytes(pickle.dumps(answers))


if __name__ == "__main__":
    main()

"""Steps SGLang's own scheduler over its own cache, with several requests in flight.

Each step is one pass of the package's event loop (`event_loop_overlap`, or `event_loop_normal` with
the option `overlap=no`). Its order, admission, chunks, allocation, retraction and results are the
package's own code. Stand-ins are the forward pass and its tokens, messages, metrics, and whatever
belongs to features that are off: grammars, LoRA, beams, speculation, DP attention.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from experiments.diff.protocol import Arrival, SideError, StepRow, Tokens
from experiments.diff.sglang.clock import Clock
from experiments.diff.sglang.side import SglangSide, request_of

from sglang.srt.disaggregation.utils import DisaggregationMode  # isort: skip
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder  # isort: skip
from sglang.srt.managers.scheduler import Scheduler  # isort: skip
from sglang.srt.managers.scheduler_components.batch_result_processor import (  # isort: skip
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.utils import GenerationBatchResult  # isort: skip
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # isort: skip
from sglang.srt.runtime_context import get_schedule  # isort: skip
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # isort: skip


class Off(SimpleNamespace):
    """A stand-in whose attributes are None, unless they are given."""

    def __getattr__(self, name: str) -> Any:
        return None


class Idle(SimpleNamespace):
    """A stand-in whose methods do nothing, unless they are given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Adder(PrefillAdder):  # type: ignore[misc]
    """SGLang's admission, which also reports why a request is not admitted."""

    lacks: str | None = None  # of the last request that was considered
    last: "Adder"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        Adder.lacks, Adder.last = "chunk", self

    def _check_prefill_budget(self, req: Any, *, total_tokens: int, **more: Any) -> Any:
        Adder.lacks = "tokens" if total_tokens >= self.rem_total_tokens else "swa_tokens"
        return super()._check_prefill_budget(req, total_tokens=total_tokens, **more)

    def add_one_req(self, req: Any, *args: Any, **more: Any) -> Any:
        result = super().add_one_req(req, *args, **more)
        if result is not AddReqResult.NO_TOKEN:
            Adder.lacks = "chunk"
        elif req in self.can_run_list:  # it took the last room
            Adder.lacks = "tokens" if self.rem_total_tokens <= 0 else "swa_tokens"
        return result


class SteppedScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler, whose event loop returns after one pass."""

    def __init__(self, steps: "Steps", side: SglangSide, options: Mapping[str, str]) -> None:
        # not the package's: that starts a server with a model
        pools = side.pools
        self._steps, self._results = steps, None
        self.tree_cache = cache = side.cache
        self.req_to_token_pool, self.token_to_kv_pool_allocator = side.rows, side.allocator
        self.page_size, self.device, self.is_generation = pools.page_size, "cpu", True
        self.schedule_policy = get_schedule().schedule_policy
        self.max_prefill_tokens = get_schedule().max_prefill_tokens
        self.max_running_requests = pools.max_running
        self.enable_hierarchical_cache = pools.host_tokens > 0
        self.is_hybrid_swa = pools.window_len > 0
        self.enable_overlap = options.get("scheduling") != "synchronous"
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.disaggregation_mode = DisaggregationMode.NULL
        self.forward_ct = self.processed_tokens_counter = 0
        text = SimpleNamespace(mamba_chunk_size=pools.page_size)
        self.model_config = Off(vocab_size=1 << 31, hf_text_config=text)
        self.tp_worker = self.model_worker = Idle(model_runner=Off())
        self.metrics_reporter = Idle(
            enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0
        )
        self.metrics_collector = self.load_publisher = Idle()
        self.load_inquirer = Idle(_get_num_pending_tokens=lambda **_: 0)
        self.grammar_manager = Idle()
        self.beam_coordinator = Idle(pending_member_rows=lambda _: 0, commit_decode=lambda _: set())
        self.ngram_embedding_manager = Idle(prepare_for_forward=lambda batch, **_: batch)
        self.dp_attn_adapter = Idle(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        self.init_running_status()
        self.chunked_prefill_size = pools.chunk_tokens
        self.is_mixed_chunk = options.get("mixed") == "yes"
        self.prefill_decode_interval = self._prefill_decode_interval_remaining = 0
        self.init_schedule_policy()
        known = vars(SchedulerBatchResultProcessor)["__dataclass_fields__"]
        own = {"logprob_result_processor": Idle(), "output_streamer": Idle()}
        self.batch_result_processor = SchedulerBatchResultProcessor(
            **{name: own.get(name, getattr(self, name)) for name in known}
        )
        assert cache.page_size == pools.page_size

    def __getattr__(self, name: str) -> Any:
        return None  # what only features that are off would set

    @property
    def result_queue(self) -> Any:
        return self._results

    @result_queue.setter
    def result_queue(self, queue: Any) -> None:
        # the event loop makes a queue when it starts; here it finds that of the pass before
        if self._results is None:
            self._results = queue

    def run_pass(self) -> None:
        self.gracefully_exit = False
        (self.event_loop_overlap if self.enable_overlap else self.event_loop_normal)()

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:  # noqa: FBT001, FBT002
        self.gracefully_exit = True  # at the end of this pass
        return []

    def get_num_allocatable_reqs(self, *args: Any, **more: Any) -> int:
        count: int = super().get_num_allocatable_reqs(*args, **more)
        # a pass over the queue asks before it begins, and once for each request
        begun = Adder.last.can_run_list if "num_held_rows" in more else ()
        if count <= len(begun) and (begun or self.chunked_req is None):
            Adder.lacks = "running"
        return count

    def get_prefill_adder_class(self) -> type[PrefillAdder]:
        return Adder

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        self.forward_ct += 1
        batch.forward_iter, batch.input_ids = self.forward_ct, None
        sampled = torch.tensor(self._steps.run(batch))
        return GenerationBatchResult(
            logits_output=None, next_token_ids=sampled, can_run_cuda_graph=False
        )

    def on_idle(self) -> None:
        if not (self.waiting_queue or self.running_batch.reqs):  # else it waits for memory
            self.new_token_ratio_tracker.reset()

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:  # noqa: FBT001, FBT002
        if is_retracted:
            self._steps.row["preempted"].append(int(req.rid))
        super()._add_request_to_queue(req, is_retracted=is_retracted)

    def send_abort_output(self, _: Any, req: Any) -> None:
        raise SideError(f"request {req.rid} is aborted: {req.to_finish.message}")

    def nothing(self, *_: Any, **__: Any) -> None: ...

    _apply_war_barrier = launch_batch_sample_if_needed = publish_load_snapshot = nothing
    _record_step_counters = nothing


class Steps:
    """Runs passes of SGLang's scheduler one at a time, and reports each of them."""

    def __init__(self, side: SglangSide, options: Mapping[str, str]) -> None:
        self._side = side
        self._scheduler = SteppedScheduler(self, side, options)
        self._open: dict[int, tuple[Any, Tokens]] = {}
        self._started: set[str] = set()
        self.row: StepRow = {}
        self._num_steps = 0

    def step(self, arrivals: list[Arrival]) -> StepRow:
        scheduler = self._scheduler
        self._num_steps += 1
        Clock.now = self._num_steps
        self.row = {"step": self._num_steps, "extend": [], "decode": [], "loading": []}
        self.row |= {"preempted": [], "hit": {}}
        for number, tokens, prompt_len in arrivals:
            req = request_of(f"{number}", tokens, prompt_len)
            self._open[number] = req, tokens
            scheduler._add_request_to_queue(req)
        if not scheduler.running_batch.batch_is_full:  # else what it lacked stands
            Adder.lacks = None
        scheduler.run_pass()
        ended = sorted(number for number, (req, _) in self._open.items() if req.finished())
        for number in ended:
            del self._open[number]
        return self.row | {"deferred": self._deferred(), "finished": ended}

    def run(self, batch: Any) -> list[int]:
        """Note what a step computes, and return the token that each of its requests samples."""
        tail = batch.decoding_reqs if batch.forward_mode is ForwardMode.MIXED else []
        decoding = batch.reqs if batch.forward_mode is ForwardMode.DECODE else tail or []
        self.row["decode"] = sorted(int(req.rid) for req in decoding)
        ends = batch.seq_lens_cpu.tolist()
        for req, end, start in zip(batch.reqs, ends, batch.prefix_lens or ends, strict=False):
            if req in decoding:
                continue
            self.row["extend"].append([int(req.rid), start, end])
            if req.rid not in self._started:
                self._started.add(req.rid)
                tiers = [req.cached_tokens_device, req.cached_tokens_host]
                self.row["hit"][int(req.rid)] = tiers
        # a step too many (overlapped) has no token of the answer left
        answers = (self._open.get(int(req.rid), (None, ()))[1] for req in batch.reqs)
        return [
            int(tokens[end]) if end < len(tokens) else 0
            for tokens, end in zip(answers, ends, strict=True)
        ]

    def _deferred(self) -> list[list[object]]:
        waiting = self._scheduler.waiting_queue
        return [[int(waiting[0].rid), Adder.lacks]] if waiting and Adder.lacks else []

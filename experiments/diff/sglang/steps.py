"""Steps SGLang's own scheduler, with many requests in flight, over its own cache.

Each step is one pass of the package's event loop. What a step would need of a GPU, of other
processes or of a server is a stand-in here: the forward pass and its sampled tokens, the future
map, messages, metrics, and features that are off (grammars, LoRA, beams, DP attention).
"""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from experiments.diff.protocol import Pools, Tokens
from experiments.diff.sglang.clock import Clock
from experiments.diff.sglang.side import SglangSide, request_of

from sglang.srt.disaggregation.utils import DisaggregationMode  # isort: skip
from sglang.srt.managers.schedule_batch import ScheduleBatch  # isort: skip
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder  # isort: skip
from sglang.srt.managers.scheduler import Scheduler  # isort: skip
from sglang.srt.managers.scheduler_components.batch_result_processor import (  # isort: skip
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.utils import GenerationBatchResult  # isort: skip
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # isort: skip
from sglang.srt.runtime_context import get_schedule  # isort: skip
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # isort: skip


class Nothing:
    """A stand-in for a part of a server that decides nothing: its methods do nothing."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Config(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        return None


class Adder(PrefillAdder):  # type: ignore[misc]
    """Notes why a waiting request is not admitted."""

    notes: list[tuple[int, str]] = []

    def _check_prefill_budget(self, req: Any, *, total_tokens: int, **more: Any) -> Any:
        self.lacks = "tokens" if total_tokens >= self.rem_total_tokens else "swa_tokens"
        return super()._check_prefill_budget(req, total_tokens=total_tokens, **more)

    def add_one_req(self, req: Any, *args: Any, **more: Any) -> Any:
        self.lacks = "slots"
        result = super().add_one_req(req, *args, **more)
        if result is AddReqResult.NO_TOKEN and req not in self.can_run_list:
            self.notes.append((int(req.rid), self.lacks))
        return result


class Stepped(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler, whose event loop makes one pass for each call."""

    def __init__(self, side: "SglangFlight", *, is_mixed: bool, has_overlap: bool) -> None:
        cache, pools = side.cache, side.pools
        self.side = side
        self._results: Any = None
        self.tree_cache = cache
        self.req_to_token_pool = side.rows
        self.token_to_kv_pool_allocator = side.allocator
        self.page_size = pools.page_size
        self.schedule_policy = get_schedule().schedule_policy
        self.enable_hierarchical_cache = pools.host_tokens > 0
        self.is_hybrid_swa = pools.window_len > 0
        self.enable_overlap = has_overlap
        self.max_running_requests = get_schedule().max_running_requests
        self.max_prefill_tokens = get_schedule().max_prefill_tokens
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.disaggregation_mode = DisaggregationMode.NULL
        self.model_config = Config(
            is_encoder_decoder=False,
            vocab_size=1 << 31,
            is_multimodal=False,
            hf_text_config=SimpleNamespace(mamba_chunk_size=pools.page_size),
            hf_config=SimpleNamespace(architectures=[]),
        )
        self.forward_ct = self.processed_tokens_counter = 0
        self.priority_scheduling_preemption_threshold = 0
        self.is_generation = True
        self.device = "cpu"
        runner = SimpleNamespace(attn_backend=None, prefill_aware_swa=False)
        self.tp_worker = self.model_worker = Nothing(model_runner=runner)
        self.metrics_reporter = Nothing(num_generated_tokens=0, forward_ct_decode=0)
        self.metrics_collector = self.load_publisher = Nothing()
        self.load_inquirer = Nothing(_get_num_pending_tokens=lambda **_: 0)
        self.grammar_manager = Nothing(has_waiting_grammars=lambda: False)
        self.beam_coordinator = Nothing(
            pending_member_rows=lambda _: 0, commit_decode=lambda _: set()
        )
        self.dp_attn_adapter = Nothing(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        self.ngram_embedding_manager = Nothing(prepare_for_forward=lambda batch, **_: batch)
        self.init_running_status()
        self.chunked_prefill_size, self.is_mixed_chunk = pools.chunk_tokens, is_mixed
        self.chunked_req = self._pending_chunked_abort_req = None
        self.prefill_decode_interval = self._prefill_decode_interval_remaining = 0
        self.init_schedule_policy()
        self.batch_result_processor = SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_overlap=has_overlap,
            enable_overlap_mlx=False,
            model_config=self.model_config,
            token_to_kv_pool_allocator=side.allocator,
            tree_cache=cache,
            hisparse_coordinator=None,
            req_to_token_pool=side.rows,
            decode_offload_manager=None,
            metrics_collector=self.metrics_collector,
            metrics_reporter=self.metrics_reporter,
            draft_worker=None,
            model_worker=self.model_worker,
            logprob_result_processor=Nothing(),
            output_streamer=Nothing(),
            beam_coordinator=self.beam_coordinator,
            abort_request=self.abort_request,
        )

    def __getattr__(self, name: str) -> None:
        # what only features that are off would read
        return None

    # the event loop of each call finds the results of the pass before
    @property
    def result_queue(self) -> Any:
        return self._results

    @result_queue.setter
    def result_queue(self, queue: Any) -> None:
        if self._results is None:
            self._results = queue

    def step(self) -> None:
        self.gracefully_exit = False
        (self.event_loop_overlap if self.enable_overlap else self.event_loop_normal)()

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        self.gracefully_exit = True  # after this pass
        return []

    def get_prefill_adder_class(self) -> type[PrefillAdder]:
        return Adder

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        self.forward_ct += 1
        batch.forward_iter = self.forward_ct
        batch.input_ids = None
        self.side.ran(batch)
        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=torch.tensor(self.side.sampled(batch)),
            can_run_cuda_graph=False,
        )

    def on_idle(self) -> None:
        self.new_token_ratio_tracker.reset()

    def _apply_war_barrier(self) -> None: ...

    def launch_batch_sample_if_needed(self, *_: Any) -> None: ...

    def publish_load_snapshot(self, force: bool = False) -> None: ...

    def _record_step_counters(self, *_: Any) -> None: ...

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        if is_retracted:
            self.side.retracted(req)
        super()._add_request_to_queue(req, is_retracted=is_retracted)


class SglangFlight(SglangSide):
    def __init__(self, pools: Pools, options: Mapping[str, str]) -> None:
        super().__init__(pools, options)
        self.pools, self.rows, self.allocator = pools, self._rows, self._allocator
        self.scheduler = Stepped(
            self, is_mixed=options.get("mixed") == "yes", has_overlap=options.get("overlap") != "no"
        )
        self._tokens: dict[str, Tokens] = {}
        self._alive: dict[str, Any] = {}
        self._started: set[str] = set()
        self._row: dict[str, Any] = {}
        self._step = 0

    def step(self, arrivals: Iterable[tuple[int, Tokens, int]]) -> dict[str, Any]:
        self._step += 1
        Clock.now = self._step
        row = self._row = {
            "step": self._step,
            "extend": [],
            "decode": [],
            "loading": [],
            "preempted": [],
            "hit": {},
        }
        for number, tokens, prompt_len in arrivals:
            req = request_of(f"{number}", tokens[:prompt_len])
            req.sampling_params.max_new_tokens = len(tokens) - prompt_len
            req.sampling_params.normalize(None)
            self._tokens[req.rid], self._alive[req.rid] = tokens, req
            self.scheduler._add_request_to_queue(req)
        Adder.notes.clear()
        self.scheduler.step()
        row["deferred"] = list(Adder.notes)
        row["finished"] = sorted(int(name) for name, req in self._alive.items() if req.finished())
        for number in row["finished"]:
            del self._alive[f"{number}"]
        state = self._state()
        row["free"] = {name: amount for name, amount in state.items() if name.startswith("free/")}
        row["evictable"] = int(self.cache.full_evictable_size())
        row["held"] = self._held()
        row["ratio"] = self.scheduler.new_token_ratio_tracker.current
        row["moved"] = dict(self._tally._counts)
        row["waiting"] = [int(req.rid) for req in self.scheduler.waiting_queue]
        return row

    def ran(self, batch: Any) -> None:
        decoding = set()
        if batch.forward_mode is ForwardMode.DECODE:
            decoding = set(batch.reqs)
        elif batch.forward_mode is ForwardMode.MIXED:
            decoding = set(batch.decoding_reqs)
        self._row["decode"] = [int(req.rid) for req in batch.reqs if req in decoding]
        for place, req in enumerate(batch.reqs):
            if req in decoding:
                continue
            start = batch.prefix_lens[place]
            self._row["extend"].append([int(req.rid), start, start + batch.extend_lens[place]])
            if req.rid not in self._started:
                self._started.add(req.rid)
                hit = [req.cached_tokens_device, req.cached_tokens_host]
                self._row["hit"][int(req.rid)] = hit

    def sampled(self, batch: Any) -> list[int]:
        ends = batch.seq_lens_cpu.tolist()
        answers = (self._tokens[req.rid] for req in batch.reqs)
        return [
            int(tokens[end]) if end < len(tokens) else 0
            for tokens, end in zip(answers, ends, strict=True)
        ]

    def retracted(self, req: Any) -> None:
        self._row["preempted"].append(int(req.rid))


open_side = SglangFlight

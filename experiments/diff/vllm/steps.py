"""Steps vLLM's own scheduler with several requests in flight; the results of steps are made up."""

from typing import Any

from experiments.diff.protocol import Pools, StepRow, Tokens

from vllm.v1.outputs import ModelRunnerOutput  # isort: skip
from vllm.v1.request import RequestStatus  # isort: skip


class InOrder(dict[str, None]):
    """Ids of requests in the order of their end, for vLLM's set, whose order is that of hashes.

    In that order the offloading connector makes their blocks the most recent ones on the CPU
    (`offloading/scheduler.py`, line 2177).
    """

    def add(self, name: str) -> None:
        self[name] = None


class VllmSteps:
    """Calls `schedule` and `update_from_output` in turn.

    A step samples the next token of the request's answer. With asynchronous scheduling, the result
    of a step is reported after the next one was scheduled.
    """

    def __init__(self, scheduler: Any, pools: Pools, *, is_late: bool) -> None:
        self._scheduler, self._pools, self._is_late = scheduler, pools, is_late
        self._tokens: dict[str, Tokens] = {}
        self._open: dict[str, Any] = {}  # requests that have not ended
        self._unseen: set[str] = set()  # that have not started
        self._waiting_results: list[tuple[Any, Any, dict[str, int]]] = []
        self._num_steps = 0

    def add(self, request: Any, tokens: Tokens) -> None:
        self._tokens[request.request_id] = tokens
        self._open[request.request_id] = request
        self._unseen.add(request.request_id)
        self._scheduler.add_request(request)

    def step(self, copy: Any) -> StepRow:
        """Run one step; `copy` carries out what the connector asks for."""
        self._num_steps += 1
        scheduler, open_ = self._scheduler, self._open
        loading = self._loading()
        output = scheduler.schedule()
        scheduler.finished_req_ids = InOrder()  # of the next step
        connected = copy(output.kv_connector_metadata)
        scheduled = output.num_scheduled_tokens
        ends = {name: open_[name].num_computed_tokens for name in scheduled}
        # one with an answer that computes its last token alone decodes, unless it just resumed
        resumed = set(output.scheduled_cached_reqs.resumed_req_ids)
        resumed.update(each.req_id for each in output.scheduled_new_reqs)
        decodes = [
            name
            for name, count in scheduled.items()
            if count == 1 and name not in resumed and ends[name] > open_[name].num_prompt_tokens
        ]
        row: StepRow = {
            "step": self._num_steps,
            "budget": scheduler.max_num_scheduled_tokens - len(decodes),
            "extend": [
                [int(name), ends[name] - count, ends[name]]
                for name, count in scheduled.items()
                if name not in decodes
            ],
            "decode": sorted(map(int, decodes)),
            "loading": sorted(int(name) for name in self._loading() - loading),
            "preempted": sorted(map(int, output.preempted_req_ids or ())),
            "deferred": self._deferred(output),
        }
        row["hit"] = self._hits({*scheduled, *map(str, row["loading"])})
        self._report(output, connected, ends)
        done = [name for name, request in open_.items() if request.is_finished()]
        for name in done:
            del open_[name], self._tokens[name]
        row["finished"] = sorted(map(int, done))
        row["free"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return row

    def _loading(self) -> set[str]:
        status = RequestStatus.WAITING_FOR_REMOTE_KVS
        return {name for name, request in self._open.items() if request.status == status}

    def _hits(self, started: set[str]) -> dict[int, list[int]]:
        hits = {}
        for name in sorted(self._unseen & started, key=int):
            found = self._open[name].prefill_stats
            hits[int(name)] = [found.num_local_cached_tokens, found.num_external_cached_tokens]
        self._unseen -= started
        return hits

    def _deferred(self, output: Any) -> list[list[object]]:
        # why the first waiting request does not start; the scheduler does not say
        scheduler = self._scheduler
        if not scheduler.waiting:
            return []
        reason = "tokens"
        if output.total_num_scheduled_tokens >= scheduler.max_num_scheduled_tokens:
            reason = "chunk"
        elif len(scheduler.running) >= scheduler.max_num_running_reqs:
            reason = "running"
        return [[int(scheduler.waiting.peek_request().request_id), reason]]

    def _report(self, output: Any, connected: Any, ends: dict[str, int]) -> None:
        # hand the sampled tokens to the scheduler: at once, or after the next step was scheduled
        results = self._waiting_results
        results.append((output, connected, ends))
        num_kept = int(self._is_late and bool(ends))  # an empty step does not run
        while len(results) > num_kept:
            output, connected, ends = results.pop(0)
            names = list(ends)
            self._scheduler.update_from_output(
                output,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: place for place, name in enumerate(names)},
                    sampled_token_ids=[self._sampled(name, ends[name]) for name in names],
                    kv_connector_output=connected,
                ),
            )

    def _sampled(self, name: str, end: int) -> list[int]:
        # the next token, if all known tokens are computed and the answer goes on
        request = self._open.get(name)
        if request is None or not request.num_tokens <= end < len(self._tokens[name]):
            return []
        return [int(self._tokens[name][end])]

"""SGLang's own arithmetic of admission on a decode engine, for states that hicache has recorded.

Reads a state a line as JSON, and prints the tokens that a request needs and that may be allocated.
The functions are those of `disaggregation/decode.py`; the objects that they read are stand-ins.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

from experiments.diff.sglang import device as _device  # noqa: F401 - the stand-ins come first

from sglang.srt.disaggregation.decode import DecodePreallocQueue  # isort: skip
from sglang.srt.disaggregation import decode as theirs  # isort: skip


class Queue(DecodePreallocQueue):  # type: ignore[misc]
    """SGLang's queue without a constructor: only what its arithmetic reads."""

    def __init__(self, state: dict[str, Any]) -> None:
        reqs = [_req(*each) for each in state["running"]]
        self.num_reserved_decode_tokens = state["reserved"]
        self.token_to_kv_pool_allocator = SimpleNamespace(
            page_size=state["page"], available_size=lambda: state["available"]
        )
        self.tree_cache = SimpleNamespace(evictable_size=lambda: state["evictable"])
        self.scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=reqs),
            waiting_queue=[],
            last_batch=None,
            enable_hisparse=False,
            tp_worker=SimpleNamespace(is_hybrid_swa=False),
        )
        transfer = SimpleNamespace(host_staged=False)
        self.transfer_queue = SimpleNamespace(queue=[transfer] * state["num_transfers"])
        self.retracted_queue: list[Any] = []

    def _uses_swa_tail_prealloc(self) -> bool:
        return False

    def _uses_swa_reservation(self) -> bool:
        return False


def _req(prompt_len: int, num_output: int, max_new: int) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=range(prompt_len),
        output_ids=range(num_output),
        sampling_params=SimpleNamespace(max_new_tokens=max_new),
    )


def main() -> None:
    """Answer each line of the standard input."""
    theirs.get_disagg = lambda: SimpleNamespace(disaggregation_decode_enable_radix_cache=True)
    for line in sys.stdin:
        state = json.loads(line)
        queue, req = Queue(state), _req(state["prompt_len"], 0, state["max_new"])
        running = queue.scheduler.running_batch.reqs
        retractable = sum(len(r.origin_input_ids) + len(r.output_ids) for r in running)
        allocated = queue._required_alloc_tokens(
            fill_len=queue._pre_alloc_fill_len(req), prefix_len=state["held_len"]
        )
        needed = queue._required_admission_tokens(req, allocated, state["held_len"], retractable)
        room = queue._allocatable_token_budgets(
            retractable_tokens=retractable,
            count_retracted=True,
            hicache_reserved_tokens=state["pending"],
        )
        print(json.dumps([needed, room]))


if __name__ == "__main__":
    main()

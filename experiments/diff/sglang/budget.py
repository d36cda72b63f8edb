"""SGLang's admission on random states; `experiments.diff.admission` runs it."""

import json
import sys
from random import Random
from types import SimpleNamespace

from experiments.diff.sglang import device  # noqa: F401  # before anything of the package
from experiments.diff.states import CASES, State, drawn

from sglang.srt.mem_cache.prefill_budget import (  # isort: skip
    SWAPrefillBudget,
    estimate_swa_kv_tokens,
)


def main() -> None:
    random = Random(0)
    states = [drawn(random) for _ in range(CASES)]
    json.dump([(their_charge(each), *their_decision(each)) for each in states], sys.stdout)


def their_charge(state: State) -> int:
    charge: int = estimate_swa_kv_tokens(
        state.extend,
        state.new,
        sliding_window_size=state.window,
        page_size=state.page,
        allocation_limit=state.chunk,
        host_hit_length=state.swa_host_hit,
    )
    return charge


def their_decision(state: State) -> tuple[bool, int]:
    budget = SWAPrefillBudget(
        SimpleNamespace(
            page_size=state.page,
            size_swa=state.swa_pages * state.page,
            full_available_size=lambda: state.full_room,
            swa_available_size=lambda: state.swa_room,
            _swa_req_ring=False,
        ),
        SimpleNamespace(
            sliding_window_size=state.window,
            full_evictable_size=lambda: 0,
            swa_evictable_size=lambda: 0,
        ),
    )
    budget.total_offset, budget.swa_offset = state.reserved, state.reserved_swa
    may, chunk = budget.check_prefill(
        extend_input_len=state.extend,
        total_tokens=state.host_prefix + state.extend + state.new + state.page,
        max_new_tokens=state.new,
        input_tokens=state.extend,
        swa_host_hit_length=state.swa_host_hit,
        chunk_limit=state.chunk,
    )
    return may, chunk

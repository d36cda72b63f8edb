"""Compare SGLang's admission with ours, over random states.

The comparison covers the tokens that a request is charged in the window pool, and the decision with
the size of its chunk. SGLang runs in the environment of the release
(`experiments.diff.sglang.budget`).

python -m experiments.diff.admission --release 0.5.23
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from functools import cache
from random import Random
from types import SimpleNamespace

from experiments.diff.engines import ENGINES, ROOT, environment_of, prepare
from experiments.diff.protocol import SideError
from experiments.diff.states import CASES, State, drawn
from hicache.cache.kinds import FULL, SWA
from hicache.cache.pages import PageAllocator
from hicache.cache.tree.node import DEVICE
from hicache.cli.schema import config_of
from hicache.engine.loop import Engine
from hicache.experiment import build
from hicache.scheduler.admission import Admission
from hicache.scheduler.budget import StepBudget, swa_budget_for_req
from hicache.scheduler.decision import Admit, Defer

PRESET = "sglang_0_5_23"

PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from experiments.diff.sglang.budget import main; main()"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--release", default="0.5.23", help="SGLang release (0.5.21 or later) or checkout"
    )
    options = parser.parse_args()
    try:
        launch = prepare(ENGINES["sglang"], options.release)
    except SideError as error:
        sys.exit(f"experiments.diff.admission: {error}")
    command = [launch.interpreter, "-P", "-c", PROGRAM, str(ROOT)]
    told = subprocess.run(command, env=environment_of(launch), stdout=subprocess.PIPE, check=False)
    if told.returncode:
        sys.exit(told.returncode)
    sys.exit(any(differing(json.loads(told.stdout)).values()))


def differing(theirs: list[tuple[int, bool, int]]) -> Counter[str]:
    random = Random(0)
    counts: Counter[str] = Counter(charge=0, decision=0, chunk=0)
    admitted = 0
    for charge, may, chunk in theirs:
        state = drawn(random)
        ours = our_decision(state)
        admitted += bool(may)
        counts["charge"] += charge != our_charge(state)
        counts["decision"] += may != isinstance(ours, Admit)
        counts["chunk"] += may and isinstance(ours, Admit) and chunk != ours.chunk_tokens
    print(f"{CASES:,} states, {admitted:,} admitted; that differ: {dict(counts)}")
    return counts


def our_charge(state: State) -> int:
    return swa_budget_for_req(
        PRESET,
        extend=state.extend,
        chunk=state.chunk,
        window=state.window,
        page=state.page,
        swa_host_hit_length=state.swa_host_hit,
        max_new=state.new,
    )


@cache
def engine_of(page: int, window: int) -> tuple[Engine, Admission]:
    config = config_of(
        "model=gemma3_27b",
        f"compat={PRESET}",
        "storage=none",
        f"cache.page_size={page}",
        f"model.window_len={window}",
        "cache.device_gib=null",
    )
    engine, _ = build(config)
    return engine, Admission(engine.cache, config.scheduler)


def our_decision(state: State) -> Admit | Defer:
    page = state.page
    engine, admission = engine_of(page, state.window)
    pools = engine.cache.pools[DEVICE]
    pools[FULL], pools[SWA] = PageAllocator(state.full_room // page), PageAllocator(state.swa_pages)
    pools[SWA].allocate(state.swa_pages - state.swa_room // page)
    usable = state.device_prefix + state.host_prefix
    return admission.decide(
        SimpleNamespace(target_len=usable + state.extend, remaining_output=state.new),
        engine.cache.tree.match(b"", 0)._replace(
            device_prefix_len=state.device_prefix,
            usable_len=usable,
            host_hits=(state.host_prefix, state.swa_host_hit, 0),
        ),
        StepBudget(
            chunk_tokens=state.chunk,
            reserved_tokens=state.reserved,
            reserved_windows={SWA: state.reserved_swa},
        ),
    )


if __name__ == "__main__":
    main()

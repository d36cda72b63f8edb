"""Replays a trace through SGLang's cache and ours side by side, and compares every request's hits.

python -m experiments.peer --workload mooncake_conversation --requests 2000

Run it with the interpreter of an environment that has the public package sglang 0.5.23
(docs/validity.md says how to make one), with the data directory in HICACHE_DATA.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.peer_ours import OurSide
from experiments.peer_sides import Hits, Pools, Side
from hicache.config import DeadlineFrom, PrefetchConfig, StageAt, WorkloadConfig
from hicache.request import Request
from hicache.workload.build import load_workload

# what compat=sglang_0_5_23 sets, with the one stop policy whose outcome hangs on no clock
PREFETCH = PrefetchConfig(
    evict_whole=True,
    stop="wait_complete",
    stage_at=StageAt.hit,
    deadline_from=DeadlineFrom.first_poll,
)


def main() -> None:
    """Compare, and write what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="mooncake_conversation")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--device-tokens", type=int, default=524_288)
    parser.add_argument("--host-tokens", type=int, default=1_572_864, help="0: no HiCache")
    parser.add_argument("--storage", action="store_true")
    parser.add_argument("--window", type=int, default=0, help="of sliding attention; 0: none")
    parser.add_argument("--swa-tokens", type=int, default=262_144, help="of window KV, device")
    parser.add_argument("--states", type=int, default=0, help="Mamba states, device; 0: none")
    parser.add_argument("--running", type=int, default=4, help="requests at once")
    parser.add_argument("--max-len", type=int, default=131_072, help="longer ones are left out")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="the peer evicts for what it takes, without a spare page",
    )
    parser.add_argument("--core", choices=("python", "rust"), default="python")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pools = Pools(
        page_size=options.page,
        device_tokens=options.device_tokens,
        host_tokens=options.host_tokens,
        has_storage=options.storage,
        num_running=options.running,
        max_len=options.max_len,
        spare_page=not options.exact,
        window_len=options.window,
        swa_tokens=options.swa_tokens if options.window else 0,
        num_states=options.states,
    )
    requests = chosen(options.workload, options.requests, options.max_len)
    from experiments.peer_sglang import SglangSide  # seconds, and only here

    theirs, ours = SglangSide(pools, core=options.core), OurSide(pools, PREFETCH)
    result = compare(requests, theirs, ours, options.running)
    theirs.close()
    text = json.dumps(vars(options) | result, indent=1, default=str)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)
    sys.stdout.flush()
    os._exit(0)  # the package leaves threads behind that wait for ever


def chosen(kind: str, count: int, max_len: int) -> list[Request]:
    """The first `count` requests of a workload that are not too long, in order of arrival."""
    workload = load_workload(
        WorkloadConfig(kind=kind), data_dir=os.environ.get("HICACHE_DATA"), seed=0
    )
    fitting = (each for each in workload.requests if each.prompt_len + each.output_len <= max_len)
    return [request for request, _ in zip(fitting, range(count), strict=False)]


def compare(
    requests: list[Request], theirs: Side, ours: Side, num_running: int
) -> dict[str, object]:
    """Both sides' hits of every request; `num_running` of them hold their pages at any time."""
    differing: list[dict[str, object]] = []
    totals: Counter[str] = Counter()
    for number, request in enumerate(requests):
        if number >= num_running:
            theirs.finish(number - num_running)
            ours.finish(number - num_running)
        tokens = token_ids(request)
        their_hits = theirs.admit(number, tokens, request.prompt_len)
        our_hits = ours.admit(number, tokens, request.prompt_len)
        count(totals, "their", their_hits)
        count(totals, "our", our_hits)
        totals["prompt"] += request.prompt_len
        same_size = theirs.residency() == ours.residency()
        totals["same_residency_count"] += same_size
        if their_hits != our_hits:
            differing.append(
                {
                    "number": number,
                    "prompt": request.prompt_len,
                    "theirs": list(their_hits),
                    "ours": list(our_hits),
                }
            )
    equal = len(requests) - len(differing)
    return {
        "compared_requests": len(requests),
        "equal_requests": equal,
        "equal_share": equal / max(len(requests), 1),
        "tokens": dict(totals),
        "differing": differing[:50],
    }


def count(totals: Counter[str], whose: str, hits: Hits) -> None:
    """Add one request's hits up."""
    for tier, tokens in zip(Hits._fields, hits, strict=True):
        totals[f"{whose}_{tier}"] += tokens


def token_ids(request: Request) -> NDArray[np.int32]:
    """[prompt_len + output_len] ids."""
    return np.frombuffer(request.prompt.to_bytes() + request.output.to_bytes(), "<i4")


if __name__ == "__main__":
    main()

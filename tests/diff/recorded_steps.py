"""Steps of SGLang 0.5.23's and vLLM 0.33.0's own schedulers, for `test_recorded_steps.py`.

`python -m tests.diff.recorded_steps [NAME ...]` records them again, in the environment of
`experiments.diff`. The requests are those of the `odd` workload, in small pools: both tiers evict,
and the host lacks room for copies.
"""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

from experiments.diff.compare import token_ids
from experiments.diff.engines import ENGINES, prepare
from experiments.diff.in_flight import Arrivals
from experiments.diff.odd import odd
from experiments.diff.process import SideProcess
from experiments.diff.protocol import Arrival, Pools, StepRow
from hicache.request import Request

FOLDER = Path(__file__).parent / "recorded"
POOLS = Pools(
    device_tokens=20_480,
    host_tokens=10_240,
    max_len=8_192,
    chunk_tokens=1_024,
    has_storage=False,
    in_flight=16,
)
WINDOW = {"window_len": 1_024, "swa_tokens": 14_336}
STATES = {"num_states": 48}
VLLM = {"compat": "vllm_0_33", "corrected": "yes"}
# by name: further sizes, seed, and options of both sides
CASES: dict[str, tuple[dict[str, int], int, dict[str, str]]] = {
    "full": ({}, 1, {}),
    "windows": (WINDOW, 2, {}),
    "states": (STATES, 3, {}),
    "both": (WINDOW | STATES, 4, {}),
    "mixed": (WINDOW | STATES, 5, {"mixed": "yes"}),
    "vllm": ({"host_tokens": 61_440}, 6, VLLM),
    "vllm_windows": (
        WINDOW | {"host_tokens": 61_440, "device_tokens": 14_336, "swa_tokens": 4_096},
        11,
        VLLM,
    ),
}
NUM_REQUESTS = 70


def case(name: str) -> tuple[Pools, list[Request], dict[str, str]]:
    sizes, seed, options = CASES[name]
    pools = replace(POOLS, **sizes)  # type: ignore[arg-type]
    both = {"write_policy": "write_through", "scheduling": "asynchronous"}
    requests = odd(NUM_REQUESTS, seed, pools.page_size)
    if "compat" in options:  # in vLLM, the last page of a prompt of whole pages waits for its copy
        requests = [each for each in requests if each.prompt_len % pools.page_size]
    return pools, requests, both | options


def arrival(number: int, request: Request) -> Arrival:
    return number, token_ids(request), request.prompt_len


def read(name: str) -> list[tuple[int, StepRow]]:
    """Return the steps of a case: the number of requests that arrive, and what the engine did."""
    steps = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    for _, row in steps:
        row["hit"] = {int(number): hits for number, hits in row["hit"].items()}
    return [(count, row) for count, row in steps]


def record(name: str) -> None:
    pools, requests, options = case(name)
    arrivals, num_come, num_ended = Arrivals(pools.in_flight, 0), 0, 0
    engine, release = ("vllm", "0.33.0") if "compat" in options else ("sglang", "0.5.23")
    launch = replace(prepare(ENGINES[engine], release), options=options)
    steps: list[tuple[int, StepRow]] = []
    with SideProcess(launch, pools, FOLDER / "log") as side:
        side.about()
        while num_ended < len(requests):
            count = min(arrivals.count(num_come - num_ended), len(requests) - num_come)
            new = range(num_come, num_come + count)
            side.ask([("step", [arrival(each, requests[each]) for each in new])])
            row = side.take_row()
            num_come, num_ended = num_come + count, num_ended + len(row["finished"])
            steps.append((count, row))
    (FOLDER / "log").unlink()
    text = json.dumps(steps, separators=(",", ":")).encode()
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text, mtime=0))
    print(name, len(steps), "steps,", sum(len(row["preempted"]) for _, row in steps), "retractions")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in sys.argv[1:] or CASES:
        record(each)

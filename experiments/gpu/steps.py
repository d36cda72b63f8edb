"""Count what a step of the real executor launches, and how often it waits for the GPU.

python -m experiments.gpu.steps                              64 decodes of 32 attention layers
python -m experiments.gpu.steps --pattern 'F S M D' --tp 2

torch's profiler counts the kernels and the calls of the CUDA runtime in one step, after two that
compile. The model is `tiny_hybrid` with these layers and random weights. Every request has a prompt
of its own, of one to three pages.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.profiler import profile, record_function

from hicache.executor.real.copy_streams import CudaStream
from hicache.executor.real.model_runner import CopyStreams, ModelRunner
from hicache.executor.real.plane import TRITON
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import PoolSpec
from hicache.executor.real.reference_model import ReferenceModel
from hicache.models import ModelConfig
from hicache.request import Request, TokenSpans
from hicache.runs.schema import config_of
from hicache.scheduler.batch import Batch
from hicache.scheduler.request_state import RequestState

PAGE, NUM_PAGES = 16, 3  # tokens of a page, pages of a request
STEP = "one step"
NUM_TIMED = 20
WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"}


class Interval(Protocol):
    start: float
    end: float


class Place(Protocol):
    name: str  # CPU or CUDA


class Event(Protocol):
    """What the profiler recorded of one call or one kernel."""

    name: str
    device_type: Place
    time_range: Interval


class Counts(NamedTuple):
    kernels: Counter[str]  # the project's, by name
    others: int  # kernels of torch and its libraries
    copies: Counter[str]  # by kind
    waits: Counter[str]  # of the host, by call


def shape_of(pattern: str, num_layers: int) -> ModelConfig:
    """Return the small hybrid model with so many layers, which repeat a pattern."""
    pattern_words = pattern.split()
    words = [pattern_words[layer % len(pattern_words)] for layer in range(num_layers)]
    model = config_of("model=tiny_hybrid").model
    return replace(
        model,
        pattern=" ".join(words),
        num_layers=num_layers,
        num_full_layers=words.count("F"),
        num_swa_layers=words.count("S"),
        num_mamba_layers=words.count("M") + words.count("D"),
        window_len=model.window_len if "S" in words else 0,
    )


def runner_of(model: ReferenceModel, num_requests: int, *, tp: int = 1) -> ModelRunner:
    """Return what computes steps of so many requests on a GPU."""
    device, count = torch.device("cuda"), num_requests * NUM_PAGES
    spec = PoolSpec(
        model=model.config,
        page_size=PAGE,
        device_counts=(count, count, num_requests),
        host_counts=(count, count, num_requests),
        device=device,
        tp=tp,
        plane=TRITON,
    )
    streams = CopyStreams(*(CudaStream(device, is_urgent=each) for each in (True, False)))
    return ModelRunner(model, TorchPools(spec), streams)


def decodes(num_requests: int) -> Batch:
    """Return a step in which requests with pages and a slot of their own decode one token each."""
    batch = Batch()
    for number in range(num_requests):
        length = NUM_PAGES * PAGE - 1 - number % (2 * PAGE)
        prompt, output = (
            TokenSpans(np.array([first], np.int32), np.array([count], np.int32))
            for first, count in ((number, length), (number + length, 1))
        )
        request = Request(id=number, session_id=number, arrival_ns=0, prompt=prompt, output=output)
        req = RequestState(request, prompt.to_bytes() + output.to_bytes(), number, 0)
        req.kv_len = length
        first = number * NUM_PAGES
        req.sequence.pages = [list(range(first, first + NUM_PAGES)) for _ in range(2)]
        req.sequence.num_pages = NUM_PAGES
        req.sequence.working_slot = [number]
        batch.decodes.append(req)
    return batch


def counted(events: Iterable[Event]) -> Counts:
    """Count what the profiler recorded between the beginning and the end of the step."""
    events = list(events)
    step = next(each.time_range for each in events if each.name == STEP)
    counts = Counts(Counter(), 0, Counter(), Counter())
    for each in events:
        if each.device_type.name == "CUDA":
            if each.name.startswith(("Memcpy", "Memset")):
                counts.copies[each.name] += 1
            elif each.name.startswith("_"):
                counts.kernels[each.name] += 1
            elif each.name != STEP:
                counts = counts._replace(others=counts.others + 1)
        elif each.name in WAITS and step.start <= each.time_range.start <= step.end:
            counts.waits[each.name] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pattern", default="F", help="letters of the layers, which repeat")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--decodes", type=int, default=64)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    shape = shape_of(options.pattern, options.layers)
    model = ReferenceModel(shape, page_size=PAGE, device="cuda")
    runner = runner_of(model, options.decodes, tp=options.tp)
    batch = decodes(options.decodes)
    for _ in range(2):
        runner.compute(batch)
    with profile() as profiler, record_function(STEP):
        runner.compute(batch)
    counts = counted(profiler.events())
    started = time.perf_counter()
    for _ in range(NUM_TIMED):
        runner.compute(batch)
    step_ms = (time.perf_counter() - started) / NUM_TIMED * 1e3
    ours = counts.kernels.total()
    print(
        f"{options.decodes} decodes, {options.layers} layers ({options.pattern}), tp {options.tp}, "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {step_ms:.2f} ms a step"
    )
    print(f"kernels of the project: {ours}, {ours / options.layers:.2f} a layer")
    for name, count in counts.kernels.most_common():
        print(f"  {name}: {count}")
    print(f"kernels of torch: {counts.others}, {counts.others / options.layers:.2f} a layer")
    print(f"copies and fills: {dict(counts.copies)}")
    print(f"waits of the host: {counts.waits.total()} a step {dict(counts.waits)}")


if __name__ == "__main__":
    main()

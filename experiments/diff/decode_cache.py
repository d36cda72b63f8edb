"""A decode engine's cache and admissions beside SGLang's own queues, request by request.

python -m experiments.diff.decode_cache [RELEASE] [workload=NAME] [requests=N] [name=size ...]

Both sides get the same requests: each is queued, matched, admitted or not, restored, and decodes
beside up to `num_running` others; if it is not admitted, the oldest ends. Hits by tier, promised
lengths and admissions are compared. Prompts are not computed: the KV arrives at once.
"""

import pickle
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from experiments.diff.engines import ENGINES, environment_of, prepare
from experiments.diff.protocol import Pools
from experiments.diff.rooms import chosen, pools_for
from experiments.diff.simulator import INSTANT, config_for
from hicache.cache.tree.digests import Digests
from hicache.clock import NEVER
from hicache.engine.build import build_engine, world_of
from hicache.engine.deployment import deploy, places_of
from hicache.engine.roles import DecodeEngine
from hicache.engine.simulated_runtime import make_runtime
from hicache.executor.simulated.executor import SimulatedIo
from hicache.executor.simulated.links import Links
from hicache.policies.policy import policy_of
from hicache.request import Request
from hicache.scheduler.handover import Handover, Parcel
from hicache.scheduler.request_state import RequestState

# so small that half of the requests are not admitted at first
SIZES = {"device_tokens": 131_072, "host_tokens": 262_144, "max_len": 65_536, "num_running": 24}


class Arrived:
    """A link to prefill engines that have computed each prompt already."""

    is_real = False

    def send(self, parcel: Parcel, now_ns: int) -> None:
        parcel.handover.is_whole = True


class Ours:
    """Our decode engine, which decodes only when it is told to."""

    def __init__(self, pools: Pools) -> None:
        settings = "parallel.prefill=1 parallel.decode=1 compat.rules.clip_new_tokens=4096"
        config = config_for(pools, {"settings": settings})
        runtime = make_runtime(config, deploy(config))
        place = places_of(config, deploy(config))[-1]
        world = world_of(place.config, place.deployment, runtime.clock.now)
        names = Digests(config.cache.page_size, overlap=config.overlap)
        engine = build_engine(world, policy_of(world), place, runtime, names)
        assert isinstance(engine, DecodeEngine)
        assert isinstance(runtime.io, SimulatedIo)
        runtime.io.links = Links(dict.fromkeys(runtime.io.links.capacities, INSTANT))
        self._engine, self._runtime = engine, runtime
        self._decode, self._intake = engine.scheduler.decode, engine.scheduler.prefill
        self._decode.only = ()
        self.reserved = config.compat.rules.decode_reserved_tokens
        engine.link = Arrived()
        engine.connect(0, lambda req: 1)
        self._take, self._intake._take = self._intake._take, self._note  # type: ignore[method-assign]
        self._promise: Handover | None = None

    def _note(self, req: RequestState, match: Any) -> Handover | None:
        self._promise = self._take(req, match)
        return self._promise

    def ask(self, request: Request) -> list[Any]:
        self._engine.submit(request, self._runtime.clock.now())
        return self.again()

    def again(self) -> list[Any]:
        names = [f"decode/{tier}_reused_tokens" for tier in ("device", "host", "storage")]
        before = [self._engine.cache.counters[name] for name in names]
        self._promise = None
        self._run()
        if self._promise is None:
            assert self._engine.scheduler.waiting, "the request was rejected"
            return [False]
        after = [self._engine.cache.counters[name] for name in names]
        hits = [late - early for early, late in zip(before, after, strict=True)]
        return [True, *hits, self._promise.promised_len]

    def finish(self, number: int) -> None:
        self._decode.only = {number}
        self._run(is_asking=False)
        self._decode.only = ()

    def _run(self, *, is_asking: bool = True) -> None:
        engine, io, clock = self._engine, self._runtime.io, self._runtime.clock
        self._intake.is_closed = not is_asking
        while True:
            engine.wake(clock.now())
            until = min(io.pass_by(NEVER, clock), engine.next_wake_ns(clock.now()))
            if until == NEVER:
                return
            clock.wait_until(max(until, clock.now()))
            for _, done in io.advance(clock.now()):
                engine.deliver(done, clock.now())


def recorded(ours: Ours, requests: list[Request], num_running: int) -> tuple[list[Any], list[Any]]:
    """Run all requests on our side; return the calls, and our answer to each."""
    calls: list[Any] = []
    answers: list[Any] = []
    running: deque[int] = deque()

    def end_oldest() -> None:
        number = running.popleft()
        ours.finish(number)
        calls.append(("finish", number))
        answers.append(None)

    for request in requests:
        if len(running) == num_running:
            end_oldest()
        tokens = np.frombuffer(request.tokens(), np.int32)
        calls.append(("ask", request.id, tokens, request.prompt_len))
        answers.append(ours.ask(request))
        while not answers[-1][0]:
            end_oldest()
            calls.append(("again",))
            answers.append(ours.again())
        running.append(request.id)
    return calls, answers


def theirs_of(release: str, pools: Pools, reserved: int, calls: list[Any]) -> list[Any]:
    launch = prepare(ENGINES["sglang"], release)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [launch.interpreter, "-m", "experiments.diff.sglang.decoding"],
            input=pickle.dumps((pools, reserved, Path(folder), calls)),
            env=environment_of(launch),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        answers: list[Any] = pickle.loads(Path(folder, "answers").read_bytes())
    return answers


def main() -> int:
    """Print how many answers agree; 1 if any does not."""
    words = sys.argv[1:]
    release = words.pop(0) if words and "=" not in words[0] else "0.5.23"
    values = {name: str(size) for name, size in SIZES.items()}
    values |= dict(word.split("=", 1) for word in words)
    kind, count = values.pop("workload", "mooncake_conversation"), int(values.pop("requests", 1000))
    changes = ",".join(f"{name}={value}" for name, value in values.items())
    pools = pools_for(kind, "full", changes, "instant")
    requests = [each for each in chosen(kind, 2 * count, pools) if each.output_len > 1][:count]
    ours = Ours(pools)
    calls, answers = recorded(ours, requests, pools.num_running)
    theirs = theirs_of(release, pools, ours.reserved, calls)
    pairs = [
        (call, mine, other)
        for call, mine, other in zip(calls, answers, theirs, strict=True)
        if mine is not None
    ]
    asked = [pair for pair in pairs if pair[1][0] or pair[2][0]]
    wrong = [pair for pair in pairs if pair[1][: len(pair[2])] != pair[2][: len(pair[1])]]
    sums = [sum(mine[place] for _, mine, _ in asked) for place in range(1, 5)]
    print(
        f"{len(requests)} requests of {kind}, {len(pairs)} decisions, {len(asked)} admissions: "
        f"{len(pairs) - len(wrong)} equal to SGLang {release}; tokens held on device, on the host, "
        f"in storage, and promised: {sums}"
    )
    for call, mine, other in wrong[:5]:
        print(f"{call[:2]}: hicache {mine}, SGLang {other}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

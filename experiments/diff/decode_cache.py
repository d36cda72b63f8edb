"""A decode engine's cache and admissions beside SGLang's own queues, request by request.

python -m experiments.diff.decode_cache [RELEASE] [workload=NAME] [requests=N] [events=SEED]
    [components=full+mamba] [name=size ...]

Both sides get the same requests: each is queued, matched, admitted or not, restored, and decodes
beside up to `num_running` others; if it is not admitted, the oldest ends. Hits by tier, promised
lengths and admissions are compared. Prompts are not computed: the KV arrives at once.

With `events`, requests also decode parts of their answers, are retracted to the host, and are
aborted: in the queue, when their KV is restored, while they decode, and when they are retracted.
Then victims, and which requests resume and when, are compared too.
"""

import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np

from experiments.diff.engines import ENGINES, environment_of, prepare
from experiments.diff.protocol import Pools
from experiments.diff.rooms import chosen, pools_for
from experiments.diff.simulator import INSTANT, config_for
from hicache.cache.tiers.transfer import Work
from hicache.cache.tree.digests import Digests
from hicache.clock import NEVER
from hicache.engine.build import build_engine, world_of
from hicache.engine.deployment import deploy, places_of
from hicache.engine.ports import Executor
from hicache.engine.roles import DecodeEngine
from hicache.engine.simulated_runtime import make_runtime
from hicache.executor.simulated.executor import SimulatedIo
from hicache.executor.simulated.links import Links
from hicache.policies.policy import policy_of
from hicache.request import Request
from hicache.scheduler.handover import Handover, Parcel
from hicache.scheduler.request_state import RequestState

# so small that half of the requests are not admitted at first
MOST_STEPS = 40  # that a request decodes between two arrivals
SIZES = {"device_tokens": 131_072, "host_tokens": 262_144, "max_len": 65_536, "num_running": 24}


class Arrived:
    """An executor whose prefill engines have computed each prompt already, unless it `holds` it."""

    holds = False

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, work: Work | Parcel, now_ns: int) -> None:
        if isinstance(work, Parcel):
            work.handover.is_whole = not self.holds
        else:
            self._inner.submit(work, now_ns)


class Until:
    """Tells which request decodes: one, up to a length of its KV."""

    def __init__(self, req: RequestState, kv_len: int) -> None:
        self._req, self._kv_len = req, kv_len

    def __contains__(self, number: object) -> bool:
        return number == self._req.request.id and self._req.kv_len < self._kv_len


class Ours:
    """Our decode engine, which decodes only when it is told to."""

    def __init__(self, pools: Pools) -> None:
        settings = "parallel.prefill=1 parallel.decode=1 compat.rules.clip_new_tokens=4096"
        settings += "" if pools.num_states else " parallel.retraction=host_pool"
        settings += "" if pools.host_tokens else " parallel.decode_cache=device"
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
        self._link = Arrived(engine.executor)
        engine.executor = cast(Executor, self._link)
        self._intake.connect(0, lambda request: 1)
        self._take, self._intake._take = self._intake._take, self._note  # type: ignore[method-assign]
        self._promise: Handover | None = None

    def _note(self, req: RequestState, match: Any) -> Handover | None:
        self._promise = self._take(req, match)
        return self._promise

    def ask(self, request: Request, *, holds: bool = False) -> list[Any]:
        self._link.holds = holds
        self._engine.submit(request, self._runtime.clock.now())
        answer = self.again()
        if holds and answer[1]:
            self.abort(request.id)
        self._link.holds = False
        return answer

    def again(self) -> list[Any]:
        """Return the requests that resumed, whether one is admitted, its hits and the promise."""
        names = [f"decode/{tier}_reused_tokens" for tier in ("device", "host", "storage")]
        before = [self._engine.cache.counters[name] for name in names]
        retracted = list(self._decode.saved)
        self._promise = None
        self._run()
        self._run(is_asking=False)  # it decodes from its next step on
        resumed = [req.request.id for req in self._decode.running if req.request.id in retracted]
        if self._promise is None:
            assert self._engine.scheduler.waiting, "the request was rejected"
            return [resumed, False]
        after = [self._engine.cache.counters[name] for name in names]
        hits = [late - early for early, late in zip(before, after, strict=True)]
        return [resumed, True, *hits, self._promise.promised_len]

    def finish(self, number: int) -> None:
        self._decode.only = {number}
        self._run(is_asking=False)
        self._decode.only = ()

    def decode(self, number: int, most: int) -> int:
        """Decode up to `most` tokens, but not the last one; return the length of the KV then."""
        req = next(each for each in self._decode.running if each.request.id == number)
        end = req.kv_len + min(most, req.remaining_output - 1)
        self._decode.only, most_steps = Until(req, end), self._decode._max_jump
        self._decode._max_jump = 1
        self._run(is_asking=False)
        self._decode.only, self._decode._max_jump = (), most_steps
        assert req.kv_len == end, f"request {number} ran out of memory"
        return end

    def retract(self) -> int:
        req = self._decode.retract()
        self._intake.queue(req)
        self._run(is_asking=False)
        return req.request.id

    def abort(self, number: int) -> None:
        self._engine.abort(number, self._runtime.clock.now())
        self._run(is_asking=False)

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


class Events:
    """Draws what happens to requests beside their arrivals and ends, and does it on our side."""

    def __init__(self, ours: Ours, seed: int | None) -> None:
        self.calls: list[Any] = []
        self.answers: list[Any] = []
        self.running: list[int] = []
        self.retracted: list[int] = []
        self._ours, self._draw = ours, np.random.default_rng(seed)
        self._has_events = seed is not None

    def happens(self, share: float) -> bool:
        return self._has_events and self._draw.random() < share

    def note(self, answer: Any, *call: Any) -> None:
        self.calls.append(call)
        self.answers.append(answer)

    def considered(self, answer: list[Any], *call: Any) -> bool:
        """Note that requests were considered; return whether that at hand was admitted."""
        self.note(answer, *call)
        self.running += answer[0]
        self.retracted = [each for each in self.retracted if each not in answer[0]]
        return bool(answer[1])

    def end_oldest(self) -> None:
        number = self.running.pop(0)
        self._ours.finish(number)
        self.note(None, "finish", number)

    def abort(self, number: int, where: str) -> None:
        self._ours.abort(number)
        self.note(None, "abort", number, where)

    def between(self) -> None:
        """Decode parts of answers, retract requests and abort some."""
        for number in self.running:
            if self.happens(0.2):
                self.note(None, "decode", number, self._ours.decode(number, MOST_STEPS))
        while len(self.running) > 2 and self.happens(0.3):
            victim = self._ours.retract()
            self.running.remove(victim)
            self.retracted.append(victim)
            self.note([victim], "retract")
        for where in ("running", "retracted"):
            numbers = getattr(self, where)
            if len(numbers) > 1 and self.happens(0.1):
                self.abort(numbers.pop(int(self._draw.integers(len(numbers)))), where)


def recorded(
    ours: Ours, requests: list[Request], num_running: int, seed: int | None
) -> tuple[list[Any], list[Any]]:
    """Run all requests on our side; return the calls, and our answer to each."""
    events = Events(ours, seed)
    for request in requests:
        events.between()
        if len(events.running) == num_running:
            events.end_oldest()
        tokens = np.frombuffer(request.tokens(), np.int32)
        holds = events.happens(0.1)
        answer = ours.ask(request, holds=holds)
        call = "ask", request.id, tokens, request.prompt_len, "restored" if holds else ""
        is_in = events.considered(answer, *call)
        while not is_in and not (holds or events.happens(0.1)):
            events.end_oldest()
            is_in = events.considered(ours.again(), "again")
        if not is_in:
            events.abort(request.id, "queued")
        elif not holds:
            events.running.append(request.id)
    return events.calls, events.answers


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


def event_of(call: Any, answer: Any) -> str | None:
    """Return what a call has retracted or aborted, in words."""
    match call:
        case ("abort", _, where):
            return f"abort {where}"
        case ("ask", _, _, _, "restored") if answer[1]:
            return "abort restored"
        case ("retract",):
            return "retract"
    return None


def main() -> int:
    """Print how many answers agree; 1 if any does not."""
    words = sys.argv[1:]
    release = words.pop(0) if words and "=" not in words[0] else "0.5.23"
    values = {name: str(size) for name, size in SIZES.items()}
    values |= dict(word.split("=", 1) for word in words)
    kind, count = values.pop("workload", "mooncake_conversation"), int(values.pop("requests", 1000))
    components = values.pop("components", "full")
    seed = int(values.pop("events")) if "events" in values else None
    changes = ",".join(f"{name}={value}" for name, value in values.items())
    pools = pools_for(kind, components, changes, "instant")
    requests = [each for each in chosen(kind, 2 * count, pools) if each.output_len > 1][:count]
    ours = Ours(pools)
    calls, answers = recorded(ours, requests, pools.num_running, seed)
    theirs = theirs_of(release, pools, ours.reserved, calls)
    pairs = [
        (call, mine, other)
        for call, mine, other in zip(calls, answers, theirs, strict=False)
        if mine is not None
    ]
    if len(theirs) < len(calls):
        print(f"the sides part before call {len(theirs)} of {len(calls)}, {calls[len(theirs)][:2]}")
    asked = [mine for call, mine, _ in pairs if call[0] != "retract" and mine[1]]
    wrong = [pair for pair in pairs if pair[1][: len(pair[2])] != pair[2][: len(pair[1])]]
    sums = [sum(mine[place] for mine in asked) for place in range(2, 6)]
    events = Counter(filter(None, map(event_of, calls, answers)))
    print(
        f"{len(requests)} requests of {kind}, {len(pairs)} decisions, {len(asked)} admissions: "
        f"{len(pairs) - len(wrong)} equal to SGLang {release}; tokens held on device, on the host, "
        f"in storage, and promised: {sums}"
    )
    if seed is not None:
        resumed = sum(len(mine[0]) for call, mine, _ in pairs if call[0] != "retract")
        print(f"retracted and aborted: {dict(events)}; resumed: {resumed}")
    for call, mine, other in wrong[:5]:
        print(f"{call[:2]}: hicache {mine}, SGLang {other}")
    return int(bool(wrong) or len(theirs) < len(calls))


if __name__ == "__main__":
    sys.exit(main())

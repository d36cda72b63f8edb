"""Policies for agents, compared with Continuum's released code and with the papers' rules."""

import json
from bisect import bisect_right
from math import log
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hicache.clock import SECOND_NS
from hicache.policies.agents import CacheTtl, Continuum, GapOracle, Mori, Session, best_ttl_s
from hicache.runs.schema import config_of

CONFIG = config_of("model=llama3_8b", "parallel.tp=1")
PAGE = 64


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def made(policy, requests=(), *, device_pages=100, host_pages=100, **args):
    """A policy and the clock that it reads; in its world a token takes 1 ms to compute."""
    clock = Clock()
    world = SimpleNamespace(
        config=CONFIG,
        now_ns=clock,
        requests=requests,
        page_size=PAGE,
        capacity={"device": {"full": device_pages}, "host": {"full": host_pages}},
        unit_bytes={"host": {"full": PAGE * 128 * 1024}},
        seconds=lambda start, end: (end - start) * 1e-3,
    )
    return policy(world, **args), clock


def turn(number: int, session: int, tool: str = "", *, length: int = 100, think_s: float = 0):
    return SimpleNamespace(
        id=number, session_id=session, tool=tool, stop_reason="", prompt_len=length,
        output_len=0, think_ns=round(think_s * SECOND_NS), arrival_ns=0,
    )  # fmt: skip


def entry(session: int, used: int):
    return SimpleNamespace(state=SimpleNamespace(session_id=session), used=used, end=PAGE)


def serve(policy, clock, request, arrive_s, admit_s, finish_s) -> None:
    for time_s, event in ((arrive_s, "arrive"), (admit_s, "admit"), (finish_s, "finish")):
        clock.now = round(time_s * SECOND_NS)
        step(policy, event, request)


def step(policy, event: str, request) -> None:
    if event == "arrive":
        policy.on_arrive(request)
    elif event == "admit":
        policy.on_miss((), request)
    else:
        policy.on_finish(request, "finished")


def test_continuum_pins_sessions_and_orders_the_queue_as_its_released_code() -> None:
    # continuum.json: what the estimator and the scheduler of vllm-continuum (fd5500a) decided for a
    # log of 12 jobs: [ns, event, job, turn, tool, seconds of the pin, pinned jobs, is the last,
    # waiting jobs in the order in which its queue (`ContinuumRequestQueue.peek_request`, as two
    # other public copies have it) serves them]
    events = json.loads(Path(__file__).with_name("continuum.json").read_text())
    turns = {(e[2], e[3]): turn(100 * e[2] + e[3], e[2], e[4]) for e in events}
    for event in events:
        if event[1] == "finish":
            turns[event[2], event[3]].tool = event[4]
    policy, clock = made(Continuum, list(turns.values()))
    running, kinds, waiting, num_moved = set(), set(), {}, 0
    for now_ns, event, job, number, tool, pin_s, pinned, is_last, order in events:
        clock.now = now_ns
        if event == "finish" and tool and not is_last:
            assert policy.ttl_s(tool, 0) == pin_s
            kinds.add(pin_s)
        step(policy, event, turns[job, number])
        running = running | {job} if event == "admit" else running - {job}
        found = {each for each, session in policy.sessions.items() if policy.is_pinned(session)}
        # the released code holds a pin until the next turn ends, and here the turn's own lock does
        assert found == set(pinned) - running
        if event == "arrive":
            waiting[job] = SimpleNamespace(request=turns[job, number])
        else:
            waiting.pop(job, None)
        assert sorted(waiting, key=lambda each: policy.sort_key(waiting[each], None)) == order
        num_moved += list(waiting) != order
    assert kinds == {0, 2.0}
    assert num_moved > 20  # the queue differs from the order of arrivals


def test_continuum_runs_pinned_sessions_first_and_evicts_their_data_last_newest_first() -> None:
    turns = [turn(0, 1, "ls"), turn(1, 2, "ls"), turn(2, 3), turn(3, 1), turn(4, 2), turn(5, 3)]
    policy, clock = made(Continuum, turns)
    for place in range(3):
        serve(policy, clock, turns[place], place / 10, place / 10, 0.5 + place / 10)
    policy._tier = "device"
    clock.now = SECOND_NS
    order = sorted((1, 2, 3), key=lambda each: policy._score(entry(each, used=each)))
    assert order == [3, 2, 1]
    policy.on_arrive(turns[5])
    policy.on_arrive(turns[4])
    keys = [policy.sort_key(SimpleNamespace(request=turns[each]), None) for each in (4, 5)]
    assert keys[0] < keys[1]
    clock.now = 4 * SECOND_NS  # the pin of session 1 is over, and session 2 waits
    order = sorted((1, 2, 3), key=lambda each: policy._score(entry(each, used=9 - each)))
    assert order == [3, 1, 2]


@pytest.mark.parametrize("kind", [Continuum, CacheTtl])
def test_a_pin_ends_when_the_sessions_next_request_is_admitted(kind) -> None:
    turns = [turn(0, 1, "ls"), turn(1, 1, "ls")]
    policy, clock = made(kind, turns, **({"history": 0} if kind is CacheTtl else {}))
    serve(policy, clock, turns[0], 0, 20, 21)  # a long queue makes a pin worth its time
    clock.now = round(21.01 * SECOND_NS)
    policy.on_arrive(turns[1])
    assert policy.is_pinned(policy.sessions[1])
    step(policy, "admit", turns[1])
    assert not policy.is_pinned(policy.sessions[1])


def test_the_best_time_to_live_has_the_highest_net_benefit_of_all_times() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        calls = sorted(rng.lognormal(0, 1.5, rng.integers(1, 40)).round(1).tolist())
        benefit = float(rng.uniform(0, 20))
        times = [0.0, *calls]
        worth = [bisect_right(calls, t) / len(calls) * benefit - t for t in times]
        assert best_ttl_s(calls, benefit) == times[int(np.argmax(worth))]


def test_cache_ttl_gives_the_times_to_live_of_a_public_implementation() -> None:
    # cache_ttl.json: what the class ContinuumPolicy of burninglhw/vllm-continuum (346be6b, a fork
    # by others) decided for a log of 30 jobs, with 20 calls in place of 100 until it trusts them:
    # [job, turn, tool, ns of the tool before, ns in the queue, seconds of the pin, benefit in s]
    rows = json.loads(Path(__file__).with_name("cache_ttl.json").read_text())
    turns = {(job, k): turn(100 * job + k, job, tool) for job, k, tool, *_ in rows}
    policy, clock = made(CacheTtl, list(turns.values()), history=20, queue_window=5, host_pages=0)
    own, given, wanted = [], [], []
    for job, k, tool, gap_ns, queue_ns, ttl_s, benefit_s in rows:
        for ns, event in ((gap_ns, "arrive"), (queue_ns, "admit"), (SECOND_NS, "finish")):
            clock.now += ns
            step(policy, event, turns[job, k])
        if ttl_s is not None:  # not the last turn
            wanted.append(pytest.approx(ttl_s, abs=1e-6))
            own.append(policy.ttl_s(tool, 100))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(policy, "benefit_s", lambda _, benefit_s=benefit_s: benefit_s)
                given.append(policy.ttl_s(tool, 100))
    assert given == wanted
    # the benefits differ: that code's eta leaves out the last turn of each session, by its own
    # choice, and is 1 until there are enough calls, for which it cites section 4.2
    assert [ours == theirs for ours, theirs in zip(own, wanted, strict=True)].count(True) == 102
    assert len(own) == 127


def test_cache_ttl_gives_the_times_to_live_of_the_papers_rules() -> None:
    rng = np.random.default_rng(4)
    lengths = rng.integers(2, 9, 30).tolist()
    ids = {(job, k): 100 * job + k for job, length in enumerate(lengths) for k in range(length)}
    turns = {key: turn(number, key[0], "ab"[number % 2]) for key, number in ids.items()}
    policy, clock = made(CacheTtl, list(turns.values()), history=20, queue_window=5, host_pages=0)
    spent: dict[str, list[float]] = {"a": [], "b": []}
    queues, over, seen, now_s = [], [], set(), 0.0
    for job, length in enumerate(lengths):
        pinned_until = 0.0
        for k in range(length):
            gap, queue = float(rng.lognormal(-1, 1)), float(rng.exponential(2))
            if k:
                spent[turns[job, k - 1].tool].append(gap)
            arrive = now_s + gap
            clock.now = round(arrive * SECOND_NS)
            step(policy, "arrive", turns[job, k])
            clock.now = round((arrive + queue) * SECOND_NS)
            step(policy, "admit", turns[job, k])
            if arrive >= pinned_until:
                queues.append(queue)
            now_s, last = arrive + queue + 1, k + 1 == length
            clock.now = round(now_s * SECOND_NS)
            step(policy, "finish", turns[job, k])
            if last:
                over.append(length)
                continue
            # minus the correlation of turns done and turns left, over ended sessions
            pairs = [(i, n - i) for n in over for i in range(1, n + 1)]
            eta = -float(np.corrcoef(np.array(pairs).T)[0, 1]) if over else 1.0
            benefit = float(np.mean(queues[-5:])) * eta + 0.1  # 100 tokens of 1 ms
            every, own = spent["a"] + spent["b"], spent[turns[job, k].tool]
            kind = "own" if len(own) > 20 else "all" if len(every) > 20 else "cold"
            calls = sorted(own if kind == "own" else every)
            worth = {t: bisect_right(calls, t) / len(calls) * benefit - t for t in calls}
            ttl = max(worth, key=worth.__getitem__, default=0.0)
            if kind == "cold":
                ttl = max(log(benefit), 0.0)
            elif worth[ttl] <= 0:
                ttl = 0.0
            seen.add(kind)
            assert policy.ttl_s(turns[job, k].tool, 100) == pytest.approx(ttl, abs=1e-6)
            pinned_until = now_s + ttl
    assert seen == {"cold", "all", "own"}


def test_mori_ranks_sessions_by_the_share_of_tool_time_in_the_last_turns_without_queueing() -> None:
    turns = [turn(number, 1, "ls") for number in range(9)]
    policy, clock = made(Mori, [*turns, turn(99, 1)])
    gaps, now = [1, 2, 3, 4, 5, 6, 7, 8, 9], 0.0
    for number, gap in enumerate(gaps):
        serve(policy, clock, turns[number], now, now + 50, now + 52)  # 50 s of queue
        now += 52 + gap
    session = policy.sessions[1]
    clock.now += 4 * SECOND_NS  # the tool call that runs counts
    assert policy.idleness(session) == pytest.approx((5 + 6 + 7 + 8 + 4) / (5 + 6 + 7 + 8 + 4 + 10))


def test_mori_demotes_the_idlest_sessions_and_a_tier_evicts_other_tiers_sessions_first() -> None:
    # 6,400 tokens fit on each tier; five sessions of 3,000
    turns = [turn(number, number, "ls", length=3000) for number in range(5)]
    policy, clock = made(Mori, [*turns, *(turn(9 + number, number) for number in range(5))])
    for number in range(5):
        serve(policy, clock, turns[number], number, number, 10 * (number + 1))
    clock.now = 60 * SECOND_NS
    policy.expired(clock.now)
    places = {number: policy._place[policy.sessions[number]] for number in range(5)}
    # session 0 acts for 50 of 60 s, and session 4 for 10 of 56 s
    assert places == {0: "host", 1: "host", 2: "out", 3: "device", 4: "device"}
    for tier, order in (("device", [2, 0, 1, 3, 4]), ("host", [2, 3, 4, 0, 1])):
        policy._tier = tier
        assert sorted(range(5), key=lambda each: policy._score(entry(each, used=each))) == order
    for number in (2, 3, 0):
        policy.on_arrive(turn(20 + number, number))
    policy.on_arrive(turn(30, 7))
    waiting = [SimpleNamespace(request=turn(0, session)) for session in (7, 2, 0, 3)]
    waiting.sort(key=lambda req: policy.sort_key(req, None))
    assert [req.request.session_id for req in waiting] == [3, 0, 2, 7]
    policy.expired(clock.now)  # sessions keep their places while they fit
    assert places == {number: policy._place[policy.sessions[number]] for number in range(5)}


def test_mori_lets_a_session_start_where_it_fits_beside_those_on_the_device() -> None:
    # 6,400 tokens fit on each tier; turns of sessions a (3,000 tokens), b (3,000, then 3,500),
    # c (2,900, then 3,100) and d (400, its only one)
    lengths = {"a": [3000, 3000], "b": [3000, 3500, 3500], "c": [2900, 3100, 3100], "d": [400]}
    turns = {
        (name, k): turn(10 * number + k, number, "ls", length=length)
        for number, (name, each) in enumerate(lengths.items())
        for k, length in enumerate(each)
    }
    policy, clock = made(Mori, list(turns.values()))

    def at(seconds: float, *events: tuple[str, str, int]) -> str:
        clock.now = round(seconds * SECOND_NS)
        for event, name, k in events:
            step(policy, event, turns[name, k])
        places = [policy._place.get(policy.sessions.get(n), "-") for n in range(4)]
        return " ".join(places)

    def starts(name: str, k: int) -> bool:
        answer = policy.starts(turns[name, k])
        if answer:
            step(policy, "admit", turns[name, k])
        return answer

    at(0, *(("arrive", name, 0) for name in "abcd"))
    # 3,000 and 6,000 tokens; not 8,900; the 400 of d fill the device
    assert [starts(name, 0) for name in "abcd"] == [True, True, False, True]
    assert at(1, ("finish", "d", 0)) == "device device - -"
    at(2, ("finish", "a", 0), ("finish", "b", 0), ("arrive", "b", 1))
    assert starts("b", 1)  # it is on the device, which now has 6,500 tokens
    assert not starts("c", 0)
    # the tick at 5 s: b runs, so a, which is in a tool call, moves to the host; 3,500 + 2,900 fit
    assert at(6) == "device device - -"
    assert starts("c", 0)
    assert at(6) == "host device device -"
    at(7, ("arrive", "a", 1))
    assert not starts("a", 1)  # 6,400 + 3,000
    at(8, ("finish", "c", 0), ("finish", "b", 1), ("arrive", "c", 1))
    assert starts("c", 1)  # 6,600 tokens
    # the tick at 11 s: b moves, and 3,000 + 3,500 do not fit on the host; then a fits beside c
    at(12)
    assert starts("a", 1)
    assert at(12, ("arrive", "b", 2)) == "device out device -"
    assert not starts("b", 2)
    policy._is_gated = False
    assert starts("b", 2)


def test_the_gap_oracle_evicts_sessions_that_never_return_first_then_the_last_to_return() -> None:
    turns = [turn(0, 0), turn(1, 1), turn(2, 2), turn(3, 0, think_s=5), turn(4, 1, think_s=2)]
    policy, clock = made(GapOracle, turns)
    policy._gap_ns = {0: 5 * SECOND_NS, 1: 2 * SECOND_NS}
    for each in turns[:3]:
        serve(policy, clock, each, 0, 0, 1)
    policy._tier = "device"
    assert sorted(range(3), key=lambda each: policy._score(entry(each, used=0))) == [2, 0, 1]


def test_the_context_of_a_session_includes_the_answer_of_its_last_request() -> None:
    request = turn(0, 1, "ls", length=100)
    request.output_len = 30
    policy, clock = made(Mori, [request, turn(1, 1)])
    serve(policy, clock, request, 0, 1, 2)
    assert policy.sessions[1].context_len == 130


def test_policies_that_read_the_clock_refuse_several_ranks() -> None:
    world = SimpleNamespace(config=config_of("model=llama3_8b", "parallel.ranks=2"))
    with pytest.raises(ValueError, match="ranks=1"):
        Mori(world)


def test_a_session_without_events_has_an_idleness_of_zero() -> None:
    policy, _ = made(Mori)
    assert policy.idleness(Session(begun_ns=0)) == 0

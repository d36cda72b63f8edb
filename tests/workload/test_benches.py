"""Workloads of public benches, and the feeders that release them in rounds and stages."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hicache import experiment
from hicache.clock import SECOND_NS, to_ns
from hicache.config import Arrivals, GeneratedConfig, PrefixesConfig, RoundsConfig, WorkloadConfig
from hicache.request import Request
from hicache.runs.schema import config_of
from hicache.workload.feeder import Feeder
from hicache.workload.rounds import RoundFeeder, StageFeeder, make_feeder, stages_of
from hicache.workload.workload import load_workload
from tests.workload.traces import ids, session_starts, shared_len, whole

CLIENTS, ROUNDS = 5, 4
TALK = RoundsConfig(
    kind="multi_turn", num_sessions=CLIENTS, rounds=ROUNDS, turn_tokens=30, answer_tokens=7
)
PREFIXES = PrefixesConfig(
    kind="shared_prefix",
    groups=6,
    group_prompts=3,
    prefix_tokens=100,
    own_tokens=20,
    answer_tokens=5,
    stage_rates=(2.0, 8.0),
    stage_s=30.0,
)
STAGES = replace(
    PREFIXES, groups=2, group_prompts=2, stage_rates=(2.0, 4.0), stage_s=10.0, drain=True
)


def requests_of(config: WorkloadConfig = TALK, seed: int = 0, **changes: Any) -> list[Request]:
    loaded = load_workload(replace(config, **changes), data_dir=None, seed=seed)
    return list(loaded.requests)


def test_each_round_repeats_the_whole_conversation_before_it():
    requests = requests_of()
    assert Counter(session_starts(requests)) == dict.fromkeys(range(CLIENTS), ROUNDS)
    for request in requests:
        number = request.id // CLIENTS
        assert request.prompt_len == 30 * (number + 1) + 7 * number
        if request.parent_id is not None:
            parent = requests[request.parent_id]
            assert shared_len(whole(parent), ids(request.prompt)) == len(whole(parent))
    assert len({int(ids(r.prompt)[0]) for r in requests[:CLIENTS]}) == CLIENTS


def test_the_first_round_may_be_longer():
    requests = requests_of(num_sessions=2, rounds=3, turn_tokens=2000, first_tokens=12000)
    assert [r.prompt_len for r in requests[::2]] == [12000, 14007, 16014]


def served(
    requests: list[Request], seconds: Callable[[Request], float], seed: int = 0, **settings: Any
) -> list[tuple[int, int, Request]]:
    """Return (sent ns, answered ns, request) by sending time; answers take `seconds(request)`."""
    config = RoundsConfig(**{"request_rate": 10.0} | settings)
    feeder = RoundFeeder(requests, config, seed=seed)
    events: list[tuple[int, int, Request]] = []
    waiting = feeder.initial()
    done: list[tuple[int, int, Request]] = []
    while waiting or events:
        events += [(sent + int(seconds(r) * SECOND_NS), sent, r) for sent, r in waiting]
        events.sort(key=lambda event: (event[0], event[2].id))
        end, sent, request = events.pop(0)
        done.append((sent, end, request))
        waiting = feeder.on_answered(request.id, end)
    return sorted(done, key=lambda each: (each[0], each[2].id))


@pytest.mark.parametrize("most_in_flight", [1, 3, None])
@pytest.mark.parametrize("barrier", [False, True])
def test_rounds_keep_the_in_flight_limit_and_a_barrier_waits_for_all(most_in_flight, barrier):
    log = served(
        requests_of(), lambda r: 0.1 + r.session_id, in_flight=most_in_flight, barrier=barrier
    )
    assert len(log) == CLIENTS * ROUNDS
    most = max(sum(s <= sent < end for s, end, _ in log) for sent, _, _ in log)
    assert most <= (most_in_flight or CLIENTS)
    assert most_in_flight is None or most == most_in_flight
    rounds = [request.id // CLIENTS for _, _, request in log]
    assert (rounds == sorted(rounds)) == barrier
    answered = {request.id: end for _, end, request in log}
    for sent, _, request in log:
        assert request.parent_id is None or sent >= answered[request.parent_id]
        if barrier:
            before = [n for n in answered if n // CLIENTS < request.id // CLIENTS]
            assert sent >= max((answered[n] for n in before), default=0)


def test_rounds_are_sent_at_the_request_rate():
    requests = requests_of(num_sessions=400, rounds=2, turn_tokens=2)
    log = served(requests, lambda _: 0.0, request_rate=8.0)
    assert log[-1][0] / SECOND_NS == pytest.approx(800 / 8, rel=0.1)


def test_the_next_client_is_drawn_from_the_seed():
    def order(seed: int) -> tuple[int, ...]:
        log = served(requests_of(), lambda _: 0.1, seed, barrier=True, in_flight=1)
        return tuple(request.id for _, _, request in log)

    orders = [order(seed) for seed in range(5)]
    assert len(set(orders)) == 5
    assert [order(seed) for seed in range(5)] == orders


def test_a_dropped_client_sends_no_more_requests_and_delays_no_other():
    config = RoundsConfig(request_rate=10.0, barrier=True, in_flight=1)
    feeder = RoundFeeder(requests_of(), config, seed=0)
    ((_, first),) = feeder.initial()
    gone = feeder.on_dropped(first.id, 5)
    assert [r.id for r in gone.requests] == [first.id + n * CLIENTS for n in range(1, ROUNDS)]
    ((_, second),) = gone.released
    assert second.id in {*range(CLIENTS)} - {first.id}
    assert len(feeder._unsettled) == (CLIENTS - 1) * ROUNDS
    with pytest.raises(ValueError, match="was already answered or dropped"):
        feeder.on_answered(gone.requests[0].id, 9)


def test_rounds_and_rates_are_stages_unless_rates_change_at_fixed_times():
    assert stages_of(requests_of(), TALK) == {n: n // CLIENTS for n in range(CLIENTS * ROUNDS)}
    closed = replace(PREFIXES, arrivals=Arrivals.closed)
    requests = requests_of(closed)
    found = stages_of(requests, closed)
    assert found == {each.id: int(each.arrival_ns >= 30 * SECOND_NS) for each in requests}
    assert 0 < sum(found.values()) < len(found)
    assert stages_of(requests, PREFIXES) == {}
    assert stages_of(requests, replace(closed, slice="0/2")) == {}
    assert stages_of(requests, GeneratedConfig(kind="chat", arrivals=Arrivals.closed)) == {}


def test_prompts_of_a_group_share_a_prefix_and_repeat_after_all_others():
    requests = requests_of(PREFIXES)
    assert {(r.prompt_len, r.output_len) for r in requests} == {(120, 5)}
    prompts = [r.prompt.to_bytes() for r in requests]
    assert len(set(prompts[:18])) == 18
    assert Counter(prompt[:400] for prompt in prompts[:18]).most_common()[-1][1] == 3
    assert prompts[18:36] == prompts[:18]
    assert prompts[:18] != [r.prompt.to_bytes() for r in requests_of(PREFIXES, seed=1)[:18]]
    arrivals = [r.arrival_ns / SECOND_NS for r in requests]
    assert arrivals == sorted(arrivals)
    slow = sum(arrival < 30 for arrival in arrivals)
    assert slow == pytest.approx(60, abs=25)
    assert len(arrivals) - slow == pytest.approx(240, abs=50)


def test_invalid_rates_of_stages_are_refused():
    with pytest.raises(ValueError, match="give no request"):
        requests_of(PREFIXES, stage_rates=(1e-6,))
    with pytest.raises(ValueError, match=r"workload\.stage_rates must be above 0, got -1"):
        replace(PREFIXES, stage_rates=(1.0, -1.0))


def test_a_draining_stage_starts_when_the_last_request_of_the_stage_before_ended():
    requests = requests_of(STAGES)
    first = [r for r in requests if r.arrival_ns < 10 * SECOND_NS]
    feeder = StageFeeder(requests, STAGES)
    assert feeder.initial() == [(r.arrival_ns, r) for r in first]
    for request in first[:-1]:
        assert feeder.on_answered(request.id, 13 * SECOND_NS) == []
    dropped = feeder.on_dropped(first[-1].id, 13 * SECOND_NS)
    assert [r for _, r in dropped.released] == requests[len(first) :]
    assert {due - r.arrival_ns for due, r in dropped.released} == {3 * SECOND_NS}


def test_a_draining_stage_that_ends_in_time_delays_nothing():
    requests = requests_of(STAGES)
    # a jitter may move the last request beyond the end of the last stage
    last = replace(requests[-1], arrival_ns=to_ns(STAGES.stage_ends_s[-1]))
    feeder = StageFeeder([*requests[:-1], last], STAGES)
    first = feeder.initial()
    second = [each for _, r in first for each in feeder.on_answered(r.id, SECOND_NS)]
    assert [each for _, each in first + second] == [*requests[:-1], last]
    assert all(due == request.arrival_ns for due, request in second)


SMALL = ("model=tiny_hybrid", "cache.device_gib=1", "cache.host_gib=1", "storage=none")
ONE_ROUND = ("workload=multi_turn", "workload.rounds=1", "model=llama3_8b", "storage=none")


def records_of(*overrides: str) -> list[Any]:
    return list(experiment.run(config_of(*overrides)).records)


def test_records_name_the_stage_and_the_round():
    load = ("workload=shared_prefix", "workload.stage_rates=[1,2]", "workload.stage_s=5")
    for drain in ("true", "false"):
        drained = (*load, "workload.prefix_tokens=64", f"workload.drain={drain}")
        requests = requests_of(config_of(*drained).workload)
        stages = [1 + (r.arrival_ns >= 5e9) for r in requests]
        assert [each.stage for each in records_of(*drained, *SMALL)] == stages
    talk = ("workload=multi_turn", "workload.num_sessions=3", "workload.rounds=4")
    records = records_of(*talk, "workload.turn_tokens=32", *SMALL)
    assert [(each.round, each.stage) for each in records] == [(each.id // 3, 0) for each in records]
    # of the last round, all but the last page of the round before is in the cache
    assert [each.computed_len for each in records if each.round == 3] == [35 + 32] * 3


def test_server_s_delays_each_request_and_begin_s_occupies_the_engine():
    load = (*ONE_ROUND, "workload.num_sessions=4", "workload.request_rate=0.5")
    plain, delayed = (records_of(*load, f"scheduler.server_s={seconds}") for seconds in (0, 0.25))
    for before, after in zip(plain, delayed, strict=True):
        assert after.arrival_ns == before.arrival_ns
        assert after.ttft_ns == before.ttft_ns + SECOND_NS // 4
    at_once = (*ONE_ROUND, "workload.num_sessions=4", "workload.turn_tokens=64")
    ends = [
        max(each.finish_ns for each in records_of(*at_once, f"scheduler.begin_s={seconds}"))
        for seconds in (0, 0.5)
    ]
    assert ends[1] - ends[0] == pytest.approx(4 * SECOND_NS / 2, abs=SECOND_NS / 4)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (TALK, RoundFeeder),
        (STAGES, StageFeeder),
        (replace(STAGES, drain=False), Feeder),
        (GeneratedConfig(kind="chat"), Feeder),
    ],
)
def test_rounds_and_draining_stages_have_feeders_of_their_own(config, wanted):
    assert type(make_feeder(requests_of(), config, seed=0)) is wanted

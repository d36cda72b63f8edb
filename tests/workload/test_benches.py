"""Workloads of public benches, and who may ask when."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hicache import experiment
from hicache.clock import SECOND_NS, to_ns
from hicache.config import Arrivals, ExperimentConfig, WorkloadConfig
from hicache.request import Request
from hicache.runs.schema import config_of
from hicache.workload.feeder import Feeder, Releases
from hicache.workload.rounds import RoundFeeder, StageFeeder, make_feeder, stages_of
from hicache.workload.workload import load_workload
from tests.workload.traces import ids, session_starts, shared_len, whole

CLIENTS, ROUNDS = 5, 4
TALK = WorkloadConfig(
    kind="multi_turn", num_sessions=CLIENTS, rounds=ROUNDS, turn_tokens=30, answer_tokens=7
)


def requests_of(config: WorkloadConfig, seed: int = 0) -> list[Request]:
    return list(load_workload(config, data_dir=None, seed=seed).requests)


def test_each_round_adds_to_the_whole_conversation() -> None:
    requests = requests_of(TALK)
    assert len(requests) == CLIENTS * ROUNDS
    for request in requests:
        number = request.id // CLIENTS
        assert request.prompt_len == 30 * (number + 1) + 7 * number
        if request.parent_id is not None:
            parent = requests[request.parent_id]
            assert shared_len(whole(parent), ids(request.prompt)) == len(whole(parent))
    assert Counter(session_starts(requests)) == dict.fromkeys(range(CLIENTS), ROUNDS)


def test_clients_share_nothing() -> None:
    first = [int(ids(r.prompt)[0]) for r in requests_of(TALK)[:CLIENTS]]
    assert len(set(first)) == CLIENTS


def test_the_first_round_may_be_longer() -> None:
    config = WorkloadConfig(
        kind="multi_turn", num_sessions=2, rounds=3, turn_tokens=2000, first_tokens=12000
    )
    assert [r.prompt_len for r in requests_of(config)[::2]] == [12000, 14001, 16002]


def served(
    feeder: RoundFeeder, seconds: Callable[[Request], float]
) -> list[tuple[int, int, Request]]:
    """(sent, answered, request) of each, with answers that take so long, in order of sending."""
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


def feeder_of(
    requests: list[Request], rate: float = 10.0, seed: int = 0, **settings: Any
) -> RoundFeeder:
    return RoundFeeder(requests, WorkloadConfig(request_rate=rate, **settings), seed=seed)


@pytest.mark.parametrize("parallel", [1, 3, None])
@pytest.mark.parametrize("barrier", [False, True])
def test_no_more_are_asked_at_once_than_may_be(parallel: int | None, *, barrier: bool) -> None:
    feeder = feeder_of(requests_of(TALK), parallel=parallel, barrier=barrier)
    log = served(feeder, lambda r: 0.1 + r.session_id)
    assert len(log) == CLIENTS * ROUNDS
    most = max(sum(s <= sent < end for s, end, _ in log) for sent, _, _ in log)
    assert most <= (parallel or CLIENTS)
    assert parallel is None or most == parallel
    rounds = [request.id // CLIENTS for _, _, request in log]
    assert (rounds == sorted(rounds)) == barrier
    answered = {request.id: end for _, end, request in log}
    for sent, _, request in log:
        assert request.parent_id is None or sent >= answered[request.parent_id]


def test_a_barrier_waits_for_the_last() -> None:
    feeder = feeder_of(requests_of(TALK), barrier=True)
    log = served(feeder, lambda r: 0.1 + r.session_id)
    for number in range(1, ROUNDS):
        ended = max(end for _, end, r in log if r.id // CLIENTS == number - 1)
        assert min(sent for sent, _, r in log if r.id // CLIENTS == number) >= ended


def test_the_rate_is_kept() -> None:
    config = WorkloadConfig(kind="multi_turn", num_sessions=400, rounds=2, turn_tokens=2)
    log = served(feeder_of(requests_of(config), rate=8.0), lambda _: 0.0)
    assert log[-1][0] / SECOND_NS == pytest.approx(800 / 8, rel=0.1)


def test_who_is_dropped_asks_no_more_and_holds_nobody_up() -> None:
    requests = requests_of(TALK)
    feeder = feeder_of(requests, barrier=True, parallel=1)
    ((_, first),) = feeder.initial()
    gone = feeder.on_dropped(first.id, 5)
    assert [r.id for r in gone.requests] == [first.id + n * CLIENTS for n in range(1, ROUNDS)]
    ((_, second),) = gone.released
    assert second.id in {*range(CLIENTS)} - {first.id}
    assert len(feeder._unsettled) == (CLIENTS - 1) * ROUNDS
    with pytest.raises(ValueError, match="was already answered or dropped"):
        feeder.on_answered(gone.requests[0].id, 9)


def test_a_round_is_a_stage_of_a_closed_loop() -> None:
    requests = requests_of(TALK)
    assert stages_of(requests, TALK) == {each.id: each.id // CLIENTS for each in requests}


def test_the_stage_of_a_request_is_that_of_its_rate_unless_stages_end_in_time() -> None:
    closed = replace(PREFIXES, arrivals=Arrivals.closed)
    requests = requests_of(closed)
    end_ns = round(PREFIXES.stage_s * SECOND_NS)
    found = stages_of(requests, closed)
    assert found == {each.id: int(each.arrival_ns >= end_ns) for each in requests}
    assert 0 < sum(found.values()) < len(found)
    assert stages_of(requests, PREFIXES) == {}
    assert stages_of(requests, replace(closed, windows=2)) == {}
    assert stages_of(requests, WorkloadConfig(kind="chat", arrivals=Arrivals.closed)) == {}


def test_a_run_of_rounds_hits_what_it_asked_before() -> None:
    config = config_of(
        "workload=multi_turn", "workload.rounds=3", "workload.num_sessions=4", "storage=none"
    )
    records = experiment.run(config).records
    assert len(records) == 12
    last = [record for record in records if record.prompt_len == 3 * 4096 + 2]
    # all but the last page of what was asked before, and the new turn
    assert [record.computed_len for record in last] == [4096 + 2] * 4


PREFIXES = WorkloadConfig(
    kind="shared_prefix",
    groups=6,
    group_prompts=3,
    prefix_tokens=100,
    own_tokens=20,
    answer_tokens=5,
    stage_rates=(2.0, 8.0),
    stage_s=30.0,
)


def test_prompts_of_a_group_begin_alike() -> None:
    requests = requests_of(PREFIXES)[:18]
    whole_prompts = {r.prompt.to_bytes() for r in requests}
    assert len(whole_prompts) == 18
    assert Counter(r.prompt.to_bytes()[:400] for r in requests).most_common()[-1][1] == 3
    assert {(r.prompt_len, r.output_len) for r in requests} == {(120, 5)}


def test_all_prompts_come_before_any_comes_again() -> None:
    prompts = [r.prompt.to_bytes() for r in requests_of(PREFIXES)]
    assert prompts[18:36] == prompts[:18]
    assert prompts[:18] != [r.prompt.to_bytes() for r in requests_of(PREFIXES, seed=1)[:18]]


def test_stages_have_their_rates() -> None:
    arrivals = [r.arrival_ns / SECOND_NS for r in requests_of(PREFIXES)]
    assert arrivals == sorted(arrivals)
    slow = sum(arrival < 30 for arrival in arrivals)
    assert slow == pytest.approx(60, abs=25)
    assert len(arrivals) - slow == pytest.approx(240, abs=50)


def test_stages_without_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="give no request"):
        requests_of(WorkloadConfig(kind="shared_prefix", stage_rates=(1e-6,)))


def test_a_rate_of_a_stage_has_limits() -> None:
    with pytest.raises(ValueError, match=r"workload\.stage_rates must be above 0, got -1"):
        WorkloadConfig(kind="shared_prefix", stage_rates=(1.0, -1.0))


def test_who_is_next_is_drawn() -> None:
    orders = set()
    for seed in range(5):
        log = served(
            feeder_of(requests_of(TALK), barrier=True, parallel=1, seed=seed), lambda _: 0.1
        )
        orders.add(tuple(request.session_id for _, _, request in log))
        again = served(
            feeder_of(requests_of(TALK), barrier=True, parallel=1, seed=seed), lambda _: 0.1
        )
        assert [r.id for _, _, r in again] == [r.id for _, _, r in log]
    assert len(orders) == 5


STAGES = WorkloadConfig(
    kind="shared_prefix",
    groups=2,
    group_prompts=2,
    prefix_tokens=64,
    own_tokens=16,
    stage_rates=(2.0, 4.0),
    stage_s=10.0,
    drain=True,
)


def test_a_stage_that_drains_starts_when_the_last_request_before_it_has_ended() -> None:
    requests = requests_of(STAGES)
    first = [r for r in requests if r.arrival_ns < 10 * SECOND_NS]
    feeder = StageFeeder(requests, STAGES)
    assert feeder.initial() == [(r.arrival_ns, r) for r in first]
    late_ns = 13 * SECOND_NS
    for request in first[:-1]:
        assert feeder.on_answered(request.id, late_ns) == []
    dropped = feeder.on_dropped(first[-1].id, late_ns)
    delays = {due - r.arrival_ns for due, r in dropped.released}
    assert [r for _, r in dropped.released] == requests[len(first) :]
    assert delays == {3 * SECOND_NS}


def test_a_stage_whose_requests_have_ended_in_time_does_not_delay_the_next() -> None:
    requests = requests_of(STAGES)
    feeder = StageFeeder(requests, STAGES)
    for _, request in feeder.initial():
        released = feeder.on_answered(request.id, SECOND_NS)
    assert all(due == request.arrival_ns for due, request in released)


def test_a_request_that_a_jitter_moves_beyond_the_end_is_in_the_last_stage() -> None:
    requests = requests_of(STAGES)
    last = replace(requests[-1], arrival_ns=to_ns(STAGES.stage_ends_s[-1]))
    feeder = StageFeeder([*requests[:-1], last], STAGES)
    released = feeder.initial()
    while released and released[-1][1] is not last:
        ended = [feeder.on_answered(request.id, 0) for _, request in released]
        released = ended[-1]
    assert released[-1][1] is last


@pytest.mark.parametrize("drain", [True, False])
def test_records_name_the_stage_and_the_round(*, drain: bool) -> None:
    small = ("model=tiny_hybrid", "cache.device_gib=1", "cache.host_gib=1", "storage=none")
    load = ("workload.stage_rates=[1,2]", "workload.stage_s=5", "workload.prefix_tokens=64")
    config = config_of("workload=shared_prefix", *load, f"workload.drain={drain}", *small)
    requests = requests_of(config.workload)
    records = experiment.run(config).records
    assert [each.stage for each in records] == [1 + (r.arrival_ns >= 5e9) for r in requests]
    talk = ("workload=multi_turn", "workload.num_sessions=3", "workload.rounds=4")
    records = experiment.run(config_of(*talk, "workload.turn_tokens=32", *small)).records
    assert [each.round for each in records] == [each.id // 3 for each in records]
    assert {each.stage for each in records} == {0}


def test_the_server_delays_a_request_and_does_not_occupy_the_engine() -> None:
    told = ("model=llama3_8b", "storage=none", "workload=multi_turn", "workload.rounds=1")
    config = config_of(*told, "workload.num_sessions=6", "workload.request_rate=0.5")
    times = [experiment.run(config).records, experiment.run(late(config, 0.25)).records]
    for plain, delayed in zip(*times, strict=True):
        assert delayed.arrival_ns == plain.arrival_ns
        assert delayed.ttft_ns == plain.ttft_ns + SECOND_NS // 4


def test_the_engine_begins_one_request_after_the_other() -> None:
    told = ("model=llama3_8b", "storage=none", "workload=multi_turn", "workload.rounds=1")
    config = config_of(*told, "workload.num_sessions=4", "workload.turn_tokens=64")
    slow = replace(config, scheduler=replace(config.scheduler, begin_s=0.5))
    spans = [
        max(each.finish_ns for each in experiment.run(each_config).records)
        for each_config in (config, slow)
    ]
    assert spans[1] - spans[0] == pytest.approx(4 * SECOND_NS / 2, abs=SECOND_NS / 4)


def late(config: ExperimentConfig, server_s: float) -> ExperimentConfig:
    return replace(config, scheduler=replace(config.scheduler, server_s=server_s))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (TALK, RoundFeeder),
        (STAGES, StageFeeder),
        (replace(STAGES, drain=False), Feeder),
        (WorkloadConfig(kind="chat"), Feeder),
    ],
)
def test_rounds_and_stages_that_wait_for_their_end_have_feeders_of_their_own(
    config: WorkloadConfig, wanted: type[Releases]
) -> None:
    assert type(make_feeder(requests_of(TALK), config, seed=0)) is wanted

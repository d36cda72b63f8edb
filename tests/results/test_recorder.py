"""The recorder: a record of every request, a row of every interval, totals after the warm-up."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hicache import config
from hicache.cache.kinds import FULL
from hicache.cache.pages import PageAllocator
from hicache.cache.tiers.transfer import PrefetchFates
from hicache.clock import SECOND_NS
from hicache.observe.explainer import Case
from hicache.observe.reasons import Span
from hicache.request import Request, TokenSpans
from hicache.results.metrics import Status
from hicache.results.recorder import Recorder
from tests.cache.small import named_kinds

TIERS = ("device_hit", "host_hit", "storage_hit", "computed")


def spans(count):
    return TokenSpans(np.zeros(1, np.int32), np.array([count], np.int32))


def request(number, parent=None):
    lengths = {"prompt": spans(100), "output": spans(5)}
    return Request(id=number, session_id=7, arrival_ns=0, parent_id=parent, **lengths)


def engine(*, waiting=0, running=0, used=0):
    """Return a fake engine with so many requests and used pages; `caught_up` holds times in ns."""
    pools = [[PageAllocator(10), PageAllocator(0), PageAllocator(0)] for _ in range(2)]
    pools[0][FULL].allocate(used)
    counters, caught_up = Counter(), []
    tree = SimpleNamespace(kinds=named_kinds(64, window_len=64))
    fates = PrefetchFates(counters)
    return SimpleNamespace(
        cache=SimpleNamespace(counters=counters, fates=fates, tree=tree, pools=pools),
        scheduler=SimpleNamespace(waiting=[None] * waiting, running=[None] * running),
        role="both",
        backlog_ns=lambda now_ns: now_ns // 10,
        catch_up=caught_up.append,
        caught_up=caught_up,
    )


class Score:
    """A recorder that observes fake engines, and the progress that it has reported."""

    def __init__(self, *engines, warm_up_s=0.0, arrivals="closed", **extra):
        self.engines = engines or (engine(),)
        self.told = []
        self.requests = [request(number) for number in range(250)]
        self.requests += [request(250, parent=0), request(251, parent=250)]
        workload = config.WorkloadConfig(warm_up_s=warm_up_s, arrivals=config.Arrivals(arrivals))
        tracker = config.TrackerConfig(interval_s=2.0)
        self.recorder = Recorder(
            self.engines,
            config.ExperimentConfig(tracker=tracker, workload=workload),
            num_requests=252,
            progress=self.told.append,
            cases={3: Case(spans=([Span(90, 99, "first_seen"), Span(99, 100, "last_token")], []))},
            **extra,
        )

    @property
    def rows(self):
        return [each.row for each in self.told if each.row is not None]

    def records(self, *fields):
        return [tuple(getattr(each, field) for field in fields) for each in self.recorder.records]

    def stages(self):
        return [stage[:3] for stage in self.recorder.stages()]

    def finish(self, number, *, at_ns=5000, **changes):
        self.recorder.finished(self.req(number, **changes), 1, at_ns)

    def abort(self, number, *, followers=(), at_ns=9000, **changes):
        self.recorder.aborted(self.req(number, **changes), followers, 1, at_ns)

    def req(self, number, submitted_ns=1000, **changes):
        lengths = {"device_len": 40, "host_len": 30, "storage_len": 15, "peer_len": 5}
        values = lengths | {
            "computed_len": 10,
            "request": self.requests[number],
            "submitted_ns": submitted_ns,
            "admitted_ns": submitted_ns + 600,
            "first_token_ns": submitted_ns + 1600,
            "storage_wait_ns": 200,
            "load_back_ns": 50,
            "queue_ns": {"step": 150, "chunk": 250, "tokens": 0},
            "own_ns": 200,
            "shared_ns": 50,
            "fence_ns": 0,
            "recomputed_len": 3,
            "dropped_len": 0,
            "draft_cold_len": 0,
            "num_decodes": 5,
            "retractions": 2,
            **dict.fromkeys(("transfer_ns", "restore_ns", "reused_len"), 0),
            "num_parts": 1,
            "decoded": 5,
            "token_runs": [],
        }
        return SimpleNamespace(**(values | changes))


PARTS = ("queue_ns", "storage_wait_ns", "load_back_ns", "prefill_ns")


def test_a_record_splits_the_ttft_into_parts_and_each_part_by_cause():
    score = Score()
    score.finish(3)
    assert score.records(*PARTS) == [(400, 200, 50, 950)]
    (record,) = score.recorder.records
    assert record.ttft_ns == 1600 == 400 + 200 + 50 + 950
    assert record.queue_for_ns == {"step": 150, "chunk": 250}
    assert record.prefill_for_ns == {"own": 200, "shared": 50, "stalled": 700}
    assert record.computed_for == {"first_seen": 9, "last_token": 1}
    assert record.recomputed_for == {}
    assert (record.id, record.session_id, record.engine) == (3, 7, 1)
    assert (record.arrival_ns, record.finish_ns) == (1000, 5000)
    assert (record.status, record.output_len, record.prompt_len) == (Status.finished, 5, 100)
    assert (record.recomputed_len, record.retractions, record.num_steps) == (3, 2, 6)
    tiers = (*TIERS, "peer_hit")
    assert [getattr(record, f"{tier}_len") for tier in tiers] == [40, 30, 15, 10, 5]


def test_a_load_back_counts_only_until_the_first_token():
    score = Score()
    score.finish(3, load_back_ns=4000, own_ns=0, shared_ns=0)
    assert score.records("load_back_ns", "prefill_ns") == [(1000, 0)]


def test_the_wait_parts_of_an_aborted_request_end_at_its_abort():
    score = Score()
    never = {"queue_ns": {"step": 800}, "own_ns": 0, "shared_ns": 0, "admitted_ns": None}
    score.abort(3, at_ns=2000, first_token_ns=None, decoded=0)
    score.abort(4, at_ns=2000, first_token_ns=None, decoded=0, **never)
    score.abort(5, decoded=2)
    assert score.records(*PARTS, "output_len", "status") == [
        (400, 200, 50, 350, 0, Status.aborted),
        (800, 200, 0, 0, 0, Status.aborted),
        (400, 200, 50, 950, 2, Status.aborted),
    ]


def test_requests_that_follow_a_rejected_or_aborted_request_share_its_fate():
    rejecting, aborting, timed = Score(), Score(), Score(arrivals="open")
    followers = rejecting.requests[250:]
    rejecting.recorder.rejected(rejecting.req(0), "too long", followers, 0, 9000)
    assert rejecting.records("id", "status", "reason", "arrival_ns", "output_len") == [
        (0, Status.rejected, "too long", 1000, 0),
        (250, Status.rejected, "follows rejected request 0", 9000, 0),
        (251, Status.rejected, "follows rejected request 0", 9000, 0),
    ]
    assert rejecting.records(*PARTS) == [(0, 0, 0, 0)] * 3
    aborting.abort(0, followers=followers, decoded=2)
    assert aborting.records("id", "reason", "arrival_ns", "finish_ns") == [
        (0, "gave up", 1000, 9000),
        (250, "follows aborted request 0", 9000, 9000),
        (251, "follows aborted request 0", 9000, 9000),
    ]
    late_ns = 3125 * SECOND_NS  # a follower with a later arrival of its own
    timed.abort(0, followers=[followers[0], replace(followers[1], arrival_ns=late_ns)])
    times = [(1000, 9000), (9000, 9000), (late_ns, late_ns)]
    assert timed.records("arrival_ns", "finish_ns") == times


def test_a_stage_of_a_closed_loop_ends_with_its_last_request():
    served = engine()
    stage_of = {number: number // 2 for number in range(4)} | {250: 3, 251: 3}
    score = Score(served, stage_of=stage_of)
    for number, at_ns in ((0, 5000), (2, 6000), (3, 7000), (1, 8000)):
        served.cache.counters["pages"] += number
        score.finish(number, at_ns=at_ns)
    # the third stage has no request, and the second was over before the first
    assert score.stages() == [(1, 0, 8000)]
    assert score.recorder.stages()[0].counters["pages"] == 0 + 2 + 3 + 1
    served.cache.counters["pages"] += 10
    score.abort(250, followers=[score.requests[251]], at_ns=9000)
    assert score.stages() == [(1, 0, 8000), (4, 8000, 9000)]
    assert score.recorder.stages()[1].counters == {"pages": 10, "engine/backlog_ns": 100}
    rejecting = Score(stage_of={0: 1, 1: 1})
    rejecting.finish(0, at_ns=5000)
    assert rejecting.stages() == []
    rejecting.recorder.rejected(rejecting.req(1), "too long", [], 0, 6000)
    assert rejecting.stages() == [(2, 0, 6000)]


def test_requests_of_the_warm_up_have_no_record():
    score = Score(warm_up_s=1.0)
    for number, submitted_ns in ((1, SECOND_NS - 1), (2, SECOND_NS)):
        score.finish(number, at_ns=submitted_ns + 5000, submitted_ns=submitted_ns)
    assert score.records("arrival_ns") == [(SECOND_NS,)]
    timed = Score(warm_up_s=1.0, arrivals="open")
    timed.finish(1, at_ns=3 * SECOND_NS, submitted_ns=2 * SECOND_NS)  # it arrived at 0
    assert timed.recorder.records == []


@pytest.mark.parametrize(("warm_up_s", "counts"), [(3.0, (1, 4)), (0.0, (13, 6))])
def test_counting_begins_when_the_warm_up_ends(warm_up_s, counts):
    others = Counter()
    score = Score(engine(), engine(), warm_up_s=warm_up_s, counters=[others])
    one, other = (each.cache.counters for each in score.engines)
    one["steps"], other["steps"], others["reads"] = 5, 7, 2
    score.recorder.at(3 * SECOND_NS)
    one["steps"] += 1
    others["reads"] += 4
    score.recorder.at(8 * SECOND_NS)
    totals = score.recorder.totals()
    assert (totals["steps"], totals["reads"]) == counts


def test_pages_read_in_the_warm_up_count_if_their_fate_is_decided_after_it():
    score = Score(engine(), engine(), warm_up_s=3.0)
    one, other = (each.cache.fates for each in score.engines)
    one.publish({1, 2, 3})
    other.publish({1, 2})
    one.close([1], "used")
    other.count(9, "late")
    score.recorder.at(3 * SECOND_NS)
    one.close([2], "used")
    other.close([1], "evicted_unused")
    other.publish({3, 4, 5, 6})
    score.recorder.at(8 * SECOND_NS)
    fates = {"read": 8, "used": 1, "evicted_unused": 1, "unused_at_end": 6}
    totals = {key: count for key, count in score.recorder.totals().items() if count}
    assert totals == {f"prefetch/{fate}_pages": count for fate, count in fates.items()}


def test_a_row_has_the_counts_of_its_interval_and_queues_and_pool_use_at_its_end():
    score = Score(engine(waiting=2, running=1, used=5), engine(waiting=1, running=3, used=8))
    one, other = (each.cache.counters for each in score.engines)
    for place, tier in enumerate(TIERS):
        one[f"cache/{tier}_tokens"] = 10 * place + 1
        other[f"cache/{tier}_tokens"] = 100
    score.finish(1)
    score.recorder.at(2 * SECOND_NS - 1)
    assert score.rows == []
    score.recorder.at(2 * SECOND_NS)
    one["cache/computed_tokens"] += 9
    one["engine/busy_ns"] += SECOND_NS
    score.recorder.at(7 * SECOND_NS)
    first, second, *_ = score.rows
    assert second["interval/busy_share"] == 1 / (2 * 2)  # of two engines in two seconds
    assert [first[f"interval/{tier}_tokens"] for tier in TIERS] == [101, 111, 121, 131]
    assert [second[f"interval/{tier}_tokens"] for tier in TIERS] == [0, 0, 0, 9]
    assert [row["interval/finished_count"] for row in score.rows] == [1, 0, 0]
    assert (first["queue/waiting_count"], first["queue/running_count"]) == (3, 4)
    shares = {key: share for key, share in first.items() if key.startswith("pool/")}
    used = {"pool/full_device_used_share": 0.65, "pool/full_host_used_share": 0.0}
    assert shares == pytest.approx(used)
    assert score.engines[0].caught_up == [2 * SECOND_NS, 4 * SECOND_NS, 6 * SECOND_NS]
    score.recorder.close()
    assert [row["time_s"] for row in score.rows] == [2.0, 4.0, 6.0, 7.0]


def test_progress_is_reported_every_hundred_requests():
    score = Score()
    for number in range(200):
        score.finish(number)
        assert len(score.told) == (number + 1) // 100
    assert [(each.done_count, each.total_count) for each in score.told] == [(100, 252), (200, 252)]

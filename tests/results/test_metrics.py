import json
from random import Random

import pytest

from hicache.cache.tiers.transfer import FATES
from hicache.results.metrics import REQUIRED_MEASURES, TTFT_PARTS, Status, percentile, summarize

TTFT_KEYS = [
    f"request/{name}_s_{kind}"
    for name in ("ttft", "queue", "storage_wait", "load_back", "prefill")
    for kind in ("mean", "p50", "p95", "p99")
]
REQUIRED_KEYS = [
    *TTFT_KEYS,
    "request/count",
    "request/rejected_count",
    "request/tpot_s_mean",
    "cache/token_hit_rate",
    *(f"cache/{tier}_hit_tokens" for tier in ("device", "host", "storage")),
    *(f"cache/{kind}_tokens" for kind in ("computed", "recomputed", "rejected", "aborted")),
    *(f"prefetch/{fate}_pages" for fate in ("staged", "read", "discarded", *FATES)),
    "prefetch/useful_share",
    "prefetch/cut_tokens",
    "prefetch/abandoned_count",
    *(f"scheduler/{what}_count" for what in ("prefill_oom", "deferred", "retracted")),
    *(f"transfer/{what}_bytes" for what in ("load_back", "back_up")),
    *(f"transfer/storage_{what}_bytes" for what in ("read", "write")),
    *(f"load/rho_{what}" for what in ("gpu", "read", "write")),
    "gpu/seconds_per_request",
]


@pytest.fixture
def rejected(make_record):
    return make_record(
        7,
        status=Status.rejected,
        reason="longer than the model",
        first_token_ns=None,
        finish_ns=None,
        output_len=0,
        device_hit_len=0,
        host_hit_len=0,
        storage_hit_len=0,
        computed_len=0,
    )


@pytest.mark.parametrize("key", REQUIRED_KEYS)
def test_every_required_key_is_there(make_record, measures, key):
    assert key in summarize([make_record(0)], measures)


def test_an_empty_run_has_every_key(measures):
    assert set(REQUIRED_KEYS) <= set(summarize([], measures))


def test_every_prompt_token_is_counted_once(make_record, rejected, measures):
    aborted = make_record(8, status=Status.aborted, first_token_ns=None, finish_ns=None)
    summary = summarize([make_record(0), make_record(1), rejected, aborted], measures)
    names = ("device_hit", "host_hit", "storage_hit", "computed", "rejected", "aborted")
    counts = [summary[f"cache/{name}_tokens"] for name in names]
    assert counts == [800, 400, 200, 600, 1000, 1000]
    assert sum(counts) == summary["request/prompt_tokens"]


def test_the_hit_rate_is_that_of_finished_requests(make_record, rejected, measures):
    assert summarize([make_record(0), rejected], measures)["cache/token_hit_rate"] == 0.7


def test_times_are_means_and_nearest_ranks_in_seconds(make_record, measures):
    records = [make_record(i, first_token_ns=i * 10**9 + 523, queue_ns=100) for i in range(3)]
    late = make_record(3, first_token_ns=3 * 10**9 + 1523, finish_ns=4 * 10**9, queue_ns=1100)
    summary = summarize([*records, late], measures)
    assert summary["request/queue_s_mean"] == pytest.approx(350e-9)
    assert summary["request/queue_s_p50"] == 100e-9
    assert summary["request/queue_s_p95"] == 1100e-9


def test_tpot_leaves_the_first_token_out(make_record, measures):
    assert summarize([make_record(0)], measures)["request/tpot_s_mean"] == 50e-9


def test_tpot_leaves_out_answers_of_one_token(make_record, measures):
    short = make_record(1, output_len=1, finish_ns=10**9 + 523)
    assert summarize([make_record(0), short], measures)["request/tpot_s_mean"] == 50e-9


def test_gpu_seconds_are_shared_by_finished_requests(make_record, rejected, measures):
    records = [make_record(0), make_record(1), rejected]
    summary = summarize(records, {**measures, "gpu/busy_s": 3.0})
    assert summary["gpu/seconds_per_request"] == 1.5


def test_extra_measures_come_through(make_record, measures):
    summary = summarize([make_record(0)], {**measures, "more/token_hit_rate": 0.39})
    assert summary["more/token_hit_rate"] == 0.39


def test_the_order_of_requests_does_not_change_a_byte(make_record, measures):
    records = [make_record(i, finish_ns=i * 10**9 + 523 + i * 7) for i in range(100)]
    shuffled = Random(0).sample(records, len(records))
    assert json.dumps(summarize(records, measures)) == json.dumps(summarize(shuffled, measures))


@pytest.mark.parametrize("key", REQUIRED_MEASURES)
def test_a_measure_left_out_is_named(make_record, measures, key):
    del measures[key]
    with pytest.raises(AssertionError, match=key):
        summarize([make_record(0)], measures)


def test_a_token_counted_twice_is_refused(make_record, measures):
    with pytest.raises(AssertionError, match=r"prompt of 1000 tokens.* = 1001"):
        summarize([make_record(0, device_hit_len=401)], measures)


def test_a_hit_of_a_rejected_request_is_refused(make_record, measures):
    with pytest.raises(AssertionError, match="rejected"):
        summarize([make_record(0, status=Status.rejected)], measures)


def test_a_gap_in_a_ttft_is_refused(make_record, measures):
    with pytest.raises(AssertionError, match=r"waited 523 ns .* = 522"):
        summarize([make_record(0, queue_ns=99)], measures)


def test_pages_read_that_have_no_fate_are_refused(make_record, measures):
    measures["prefetch/late_pages"] -= 1
    with pytest.raises(AssertionError, match="pages were read from storage, and these are the"):
        summarize([make_record(0)], measures)


@pytest.mark.parametrize("part", TTFT_PARTS)
def test_a_negative_part_of_a_ttft_is_refused(make_record, measures, part):
    parts = {f"{each}_ns": 0 for each in TTFT_PARTS}
    other = "queue" if part == "prefill" else "prefill"
    parts |= {f"{part}_ns": -1, f"{other}_ns": 524}  # which add up
    with pytest.raises(AssertionError, match=f"-1 ns in {part}"):
        summarize([make_record(0, **parts)], measures)


def test_a_gap_in_the_wait_of_one_who_gave_up_is_refused(make_record, measures):
    gave_up = {"status": Status.aborted, "first_token_ns": None, "finish_ns": 523, "arrival_ns": 0}
    parts = dict.fromkeys((f"{part}_ns" for part in TTFT_PARTS), 0)
    summarize([make_record(0, **gave_up, **parts | {"queue_ns": 523})], measures)
    with pytest.raises(AssertionError, match=r"waited 523 ns .* = 522"):
        summarize([make_record(0, **gave_up, **parts | {"queue_ns": 522})], measures)


def test_a_finished_request_has_a_first_token(make_record, measures):
    with pytest.raises(AssertionError, match="finished with no token"):
        summarize([make_record(0, first_token_ns=None)], measures)


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (95, 10), (90, 9), (1, 1), (99, 10)])
def test_a_percentile_is_a_value_that_was_there(percent, value):
    assert percentile(list(range(10, 0, -1)), percent) == value


def test_the_percentile_of_nothing_is_zero():
    assert percentile([], 50) == 0


def test_the_first_minute_begins_with_the_first_arrival(make_record, measures):
    summary = summarize([make_record(number) for number in (1000, 1059, 1061)], measures)
    assert summary["request/start_up_share"] == pytest.approx(2 / 3)

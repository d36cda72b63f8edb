import json
from random import Random

import pytest

from hicache.results.metrics import REQUIRED_MEASURES, TTFT_PARTS, Status, percentile, summarize

NO_TOKEN = {"first_token_ns": None, "finish_ns": None}
NO_PARTS = dict.fromkeys((f"{part}_ns" for part in TTFT_PARTS), 0)
GAVE_UP = {"status": Status.aborted, "first_token_ns": None, "finish_ns": 523, "arrival_ns": 0}


@pytest.fixture
def rejected(make_record):
    hits = ("device_hit_len", "host_hit_len", "storage_hit_len", "computed_len", "output_len")
    changes = {**dict.fromkeys(hits, 0), **NO_TOKEN, "reason": "longer than the model"}
    return make_record(7, status=Status.rejected, **changes)


def test_every_summary_has_the_same_keys_and_extra_measures(make_record, measures):
    measures["more/token_hit_rate"] = 0.39
    empty, full = (summarize(records, measures) for records in ([], [make_record(0)]))
    assert empty.keys() == full.keys()
    assert full["more/token_hit_rate"] == 0.39


def test_every_prompt_token_is_counted_once(make_record, rejected, measures):
    aborted = make_record(8, status=Status.aborted, **NO_TOKEN)
    summary = summarize([make_record(0), make_record(1), rejected, aborted], measures)
    names = ("device_hit", "host_hit", "storage_hit", "computed", "rejected", "aborted")
    counts = [summary[f"cache/{name}_tokens"] for name in names]
    assert counts == [800, 400, 200, 600, 1000, 1000]
    assert sum(counts) == summary["request/prompt_tokens"]


def test_rates_and_shares_count_finished_requests_only(make_record, rejected, measures):
    one_token = make_record(1, output_len=1, finish_ns=10**9 + 523)
    records = [make_record(0), one_token, rejected]
    summary = summarize(records, {**measures, "gpu/busy_s": 3.0})
    assert summary["cache/token_hit_rate"] == 0.7
    assert summary["gpu/seconds_per_request"] == 1.5
    assert summary["request/tpot_s_mean"] == 50e-9  # without first tokens and answers of one token


def test_times_are_means_and_nearest_rank_percentiles_in_seconds(make_record, measures):
    records = [make_record(i, first_token_ns=i * 10**9 + 523, queue_ns=100) for i in range(3)]
    late = make_record(3, first_token_ns=3 * 10**9 + 1523, finish_ns=4 * 10**9, queue_ns=1100)
    summary = summarize([*records, late], measures)
    assert summary["request/queue_s_mean"] == pytest.approx(350e-9)
    assert summary["request/queue_s_p50"] == 100e-9
    assert summary["request/queue_s_p95"] == 1100e-9


def test_the_order_of_requests_changes_no_byte_of_the_summary(make_record, measures):
    records = [make_record(i, finish_ns=i * 10**9 + 523 + i * 7) for i in range(100)]
    shuffled = Random(0).sample(records, len(records))
    assert json.dumps(summarize(records, measures)) == json.dumps(summarize(shuffled, measures))


@pytest.mark.parametrize("key", REQUIRED_MEASURES)
def test_a_missing_measure_is_named(make_record, measures, key):
    del measures[key]
    with pytest.raises(AssertionError, match=key):
        summarize([make_record(0)], measures)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_hit_len": 401}, r"prompt of 1000 tokens.* = 1001"),
        ({"status": Status.rejected}, "rejected"),
        ({"queue_ns": 99}, r"waited 523 ns .* = 522"),
        ({"first_token_ns": None}, "finished with no token"),
        ({**GAVE_UP, **NO_PARTS, "queue_ns": 522}, r"waited 523 ns .* = 522"),
        *(  # the other part makes them add up
            ({**NO_PARTS, f"{part}_ns": -1, f"{other}_ns": 524}, f"-1 ns in {part}")
            for part, other in zip(TTFT_PARTS, (*TTFT_PARTS[1:], TTFT_PARTS[0]), strict=True)
        ),
    ],
)
def test_a_record_whose_parts_do_not_add_up_is_refused(make_record, measures, changes, message):
    with pytest.raises(AssertionError, match=message):
        summarize([make_record(0, **changes)], measures)


def test_an_aborted_request_whose_wait_adds_up_is_accepted(make_record, measures):
    summarize([make_record(0, **GAVE_UP, **NO_PARTS | {"queue_ns": 523})], measures)


def test_pages_read_from_storage_without_a_recorded_fate_are_refused(make_record, measures):
    measures["prefetch/late_pages"] -= 1
    with pytest.raises(AssertionError, match="pages were read from storage, and these are the"):
        summarize([make_record(0)], measures)


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (95, 10), (90, 9), (1, 1), (99, 10)])
def test_a_percentile_is_one_of_the_values_by_nearest_rank(percent, value):
    assert percentile(list(range(10, 0, -1)), percent) == value
    assert percentile([], percent) == 0


def test_the_first_minute_begins_with_the_first_arrival(make_record, measures):
    summary = summarize([make_record(number) for number in (1000, 1059, 1061)], measures)
    assert summary["request/start_up_share"] == pytest.approx(2 / 3)

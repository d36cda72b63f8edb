"""Predictions of single programs, and what a bench says of them."""

import json

import pytest

from experiments import predictions

ENTRIES = [
    {"kernel": "ours", "shape": "rows", "gb_per_s": {"device": 50.0, "link": 40.0}},
]


def record(direction, rate, shape="rows"):
    parameters = {"direction": direction, "kernel": "ours", "shape": shape}
    return {"op": "program", "gb_per_s": rate, "parameters": parameters}


def test_what_is_stored_covers_eight_variants_of_ours_and_the_peers():
    stored = json.loads(predictions.STORED.read_text())["predictions"]
    variants = {(entry["kernel"], entry["shape"]) for entry in stored}
    assert len(variants) >= 8
    assert {entry["kernel"] for entry in stored} == predictions.KERNELS.keys()
    for entry in stored:
        rates = entry["gb_per_s"]
        assert rates["device"] > rates["link"] > rates["slow link"] > 0


def test_a_load_back_is_held_against_the_link_and_a_back_up_against_the_device():
    bench = {"records": [record("to_device", 36.0), record("to_host", 45.0)]}
    lines = predictions.compared(ENTRIES, bench)
    assert lines[2:] == [
        "| to_device | ours | rows | 40.0 | 36.0 | 0.90 |",
        "| to_host | ours | rows | 50.0 | 45.0 | 0.90 |",
    ]


def test_what_was_not_predicted_or_not_timed_is_left_out():
    records = [record("device", None), record("device", 9.0, "other"), record("device", 25.0)]
    assert len(predictions.compared(ENTRIES, {"records": records})) == 3


def test_a_bench_without_single_programs_is_refused():
    with pytest.raises(ValueError, match="got one of a laptop"):
        predictions.compared(ENTRIES, {"machine": "a laptop", "records": []})

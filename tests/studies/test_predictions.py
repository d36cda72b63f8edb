"""Predictions of single programs, and what a bench says of them."""

import pytest

from experiments.gpu import predictions

ENTRIES = [
    {"kernel": "ours", "shape": "rows", "gb_per_s": {"device": 50.0, "link": 40.0}},
]


def record(direction, rate, shape="rows"):
    parameters = {"direction": direction, "kernel": "ours", "shape": shape}
    return {"op": "program", "gb_per_s": rate, "parameters": parameters}


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_stored_predictions_cover_our_kernels_and_the_peers(version):
    stored = predictions.stored_for({"machine": f"NVIDIA H200 (torch 2.11.0, triton {version})"})
    assert len({(entry["kernel"], entry["shape"]) for entry in stored}) >= 8
    assert {entry["kernel"] for entry in stored} == predictions.KERNELS.keys()
    for entry in stored:
        rates = entry["gb_per_s"]
        assert rates["device"] >= rates["link"] >= rates["slow link"] > 0
    with pytest.raises(ValueError, match=r"predictions_triton_3_8_0\.json"):
        predictions.stored_for({"machine": "NVIDIA H200 (torch 2.13.0, triton 3.8.0)"})


def test_a_load_back_is_compared_with_the_link_and_a_back_up_with_the_device():
    bench = [record("to_device", 36.0), record("to_host", 45.0)]
    bench += [record("device", None), record("device", 9.0, "other")]  # not timed, not predicted
    table = predictions.compared(ENTRIES, {"records": bench})
    assert [tuple(row) for row in table.to_numpy()] == [
        ("to_device", "ours", "rows", 40.0, 36.0, 0.9),
        ("to_host", "ours", "rows", 50.0, 45.0, 0.9),
    ]
    with pytest.raises(ValueError, match="got one on a laptop"):
        predictions.compared(ENTRIES, {"machine": "a laptop", "records": []})


def test_the_order_of_variants_is_correlated_by_direction_and_over_all():
    rates = {"a": (10, 5), "b": (20, 9), "c": (30, 8), "d": (40, 30)}
    entries = [
        {"kernel": "ours", "shape": shape, "gb_per_s": {"device": rate, "link": rate}}
        for shape, (rate, _) in rates.items()
    ]
    records = [record("device", got, shape) for shape, (_, got) in rates.items()]
    records += [record("to_device", 40 - rate, shape) for shape, (rate, _) in rates.items()]
    told = predictions.rank_correlations(predictions.compared(entries, {"records": records}))
    assert list(told["direction"]) == ["device", "to_device", "all"]
    assert list(told["variants"]) == [4, 4, 8]
    # by hand: ranks 1 2 3 4 and 1 3 2 4 differ by squares of 2 in all: 1 - 6 * 2 / (4 * 15)
    assert list(told["rank correlation"][:2]) == pytest.approx([0.8, -1.0])

"""`hicache size`: its search against every cell, and its table."""

import json
from dataclasses import replace

import pytest

from hicache.cache.kinds import MAMBA, SWA
from hicache.cli.size import Cell, knee_of, main, search, shared_kind, show
from hicache.runs.schema import config_of

SMALL = (
    "workload=chat",
    "workload.num_sessions=30",
    "cache.device_gib=4",
    "--workers=1",
)


def cells_of(hits: dict[float, list[float]], measured: list | None = None):
    """Return a measure function that looks its results up in `hits`: by size, a list by share."""

    def measure(places):
        if measured is not None:
            measured.extend(places)
        return [
            Cell(host_gib=size, share=share, hit_rate=hits[size][int(share * 10)], ttft_s=1.0)
            for size, share in places
        ]

    return measure


SHARES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
HILLS = {
    1.0: [0.0, 0.1, 0.15, 0.2, 0.1, 0.0, 0.0],
    2.0: [0.1, 0.2, 0.3, 0.2, 0.1, 0.0, 0.0],
    4.0: [0.0, 0.1, 0.2, 0.3, 0.48, 0.2, 0.0],
    8.0: [0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0],
    16.0: [0.4, 0.45, 0.5, 0.4, 0.3, 0.0, 0.0],
}


def test_the_sizes_that_decide_on_the_knee_get_their_best_share():
    measured: list[tuple[float, float]] = []
    sizes = list(HILLS)
    found = search(sizes, SHARES, cells_of(HILLS, measured))
    best = search(sizes, SHARES, cells_of(HILLS), every_share=True)
    assert knee_of(found) == knee_of(best)
    assert [(cell.share, cell.hit_rate) for cell in best[1:]] == [
        (0.2, 0.3),
        (0.4, 0.48),
        (0.0, 0.5),
        (0.2, 0.5),
    ]
    assert found[1:] == best[1:]
    # the best is 0.3, but this size decides nothing: it tries 0.2 and the best share of the knee
    assert found[0].share == 0.2
    assert {share for size, share in measured if size == sizes[0]} == {0.0, 0.2}
    assert len(measured) == len(set(measured)) < len(HILLS) * len(SHARES)


def test_all_shares_of_all_sizes_on_request():
    measured: list[tuple[float, float]] = []
    best = search(list(HILLS), SHARES, cells_of(HILLS, measured), every_share=True)
    assert [cell.hit_rate for cell in best] == [max(hill) for hill in HILLS.values()]
    assert len(measured) == len(HILLS) * len(SHARES)


@pytest.mark.parametrize("every_share", [False, True])
def test_an_empty_host_is_simulated_once(every_share):
    measured: list[tuple[float, float | None]] = []

    def measure(places):
        measured.extend(places)
        return [
            Cell(host_gib=size, share=share, hit_rate=size / 10, ttft_s=1.0)
            for size, share in places
        ]

    cells = search([0.0, 1.0], [0.1, 0.2, 0.4], measure, every_share=every_share)
    assert measured.count((0.0, None)) == 1
    assert cells[0].share is None
    assert cells[1].share == (0.1 if every_share else 0.4)  # all hit alike


@pytest.mark.parametrize(
    ("rates", "knee"), [([0.1, 0.5, 0.59, 0.6], 4.0), ([0.1, 0.2, 0.3, 0.4], 8.0), ([0.3] * 4, 1.0)]
)
def test_the_knee_has_95_percent_of_the_gain(rates, knee):
    sizes = [1.0, 2.0, 4.0, 8.0]
    cells = [
        Cell(host_gib=size, share=None, hit_rate=rate, ttft_s=None)
        for size, rate in zip(sizes, rates, strict=True)
    ]
    assert knee_of(cells).host_gib == knee


def test_a_model_with_states_gets_the_best_share_of_each_size(capsys):
    main([*SMALL, "model=qwen3_next_80b", "--gib=0,16,64", "--shares=.1,.4", "--all", "--json"])
    cells = json.loads(capsys.readouterr().out)
    assert [cell["host_gib"] for cell in cells] == [0, 16, 64]
    assert cells[0]["share"] is None
    assert cells[1]["share"] in (0.1, 0.4)
    assert cells[0]["hit_rate"] < cells[-1]["hit_rate"]


@pytest.mark.parametrize(
    ("model", "pools", "kind"),
    [
        ("llama3_8b", "split", None),
        ("gemma3_27b", "split", SWA),
        ("qwen3_next_80b", "split", MAMBA),
        ("qwen3_next_80b", "shared", None),
    ],
)
def test_a_share_is_searched_where_the_host_is_divided(model, pools, kind):
    assert shared_kind(config_of(f"model={model}", f"cache.pools={pools}")) == kind


def test_the_table_marks_the_knee_and_prices_the_memory(capsys):
    main([*SMALL, "model=llama3_8b", "--gib=0,64,128", "--dollars-per-gib=4"])
    told = capsys.readouterr().out
    assert told.count("← knee") == 1
    assert "512" in told  # dollars for 128 GiB
    assert "for states" not in told


def test_no_knee_is_marked_while_hits_rise_and_no_host_is_the_first_row(capsys):
    main([*SMALL, "model=llama3_8b", "--gib=16"])
    told = capsys.readouterr().out
    assert "← knee" not in told
    assert "no knee: hits still rise at 16 GiB" in told
    assert "`hicache run cache.unlimited=true`" in told
    assert [line.split()[0] for line in told.splitlines()[3:5]] == ["0", "16"]


def test_an_overload_at_every_size_says_what_to_change(capsys):
    cells = [Cell(host_gib=size, share=None, hit_rate=size, ttft_s=None) for size in (0, 1)]
    show(config_of("model=llama3_8b"), cells, None)
    assert "at every size: set workload.load below 1" in capsys.readouterr().out
    show(config_of("model=llama3_8b"), [cells[0], replace(cells[1], ttft_s=1.0)], None)
    assert "overloaded at this size" in capsys.readouterr().out

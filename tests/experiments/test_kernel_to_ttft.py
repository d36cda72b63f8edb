"""The study of copy paths: its runs, and the conclusions it draws from them."""

from dataclasses import replace

import pytest

from experiments.studies import copy_paths
from experiments.studies import kernel_to_ttft as study
from hicache.cli.schema import config_of

SHARED = ["model=llama3_8b", "storage=none", "workload.num_sessions=3", "workload.limit=8"]
AGENTS = study.REGIMES[4]


def row(regime, path, seed, ttft_s, **fields):
    known = {
        "status": "modelled", "piece_bytes": 1024, "rate_gbps": 40.0, "ttft_p95_s": 2 * ttft_s,
        "load_back_s": 0.1, "tpot_s": 0.01, "gpu_s": 1.0, "rho": 0.1,
        "host_hit_tokens": 5, "load_back_bytes": 9,
        "verdict": "" if seed else "idle",
        "goodput_per_s": None if seed else 1.0, "goodput_share": None if seed else 0.5,
    }  # fmt: skip
    return copy_paths.Row(regime=regime, path=path, seed=seed, ttft_s=ttft_s, **(known | fields))


def rows_of(regime, ttft_s, no_host_s):
    paths = dict.fromkeys(copy_paths.PATHS, ttft_s) | {copy_paths.NO_HOST: no_host_s}
    if isinstance(ttft_s, dict):
        paths = ttft_s | {copy_paths.NO_HOST: no_host_s}
    return [
        row(regime, path, seed, mean * (1 + 0.01 * seed))
        for path, mean in paths.items()
        for seed in range(study.NUM_SEEDS)
    ]


def test_every_path_is_an_arm_with_sources():
    for path in copy_paths.PATHS:
        config = config_of(f"arm={path}", "workload=agents")
        for table in (config.hardware.kernel_to_device, config.hardware.kernel_to_host):
            assert table.status in ("measured", "modelled")
            assert len(table.source) > 10


def test_a_run_is_served_by_the_path_of_its_arm():
    slow = study.measure(SHARED, AGENTS, "copy_memcpy", 0, seeks_goodput=False)
    fast = study.measure(SHARED, AGENTS, "copy_ours", 0, seeks_goodput=False)
    assert (slow.piece_bytes, fast.piece_bytes) == (16384, 16384)
    assert (slow.rate_gbps, fast.rate_gbps) == (6.3, 47.8)
    assert (slow.status, fast.status) == ("measured", "modelled")


def test_without_a_host_tier_nothing_is_loaded_back():
    alone = study.measure(SHARED, AGENTS, copy_paths.NO_HOST, 0, seeks_goodput=False)
    assert alone.host_hit_tokens == alone.load_back_bytes == 0


def test_goodput_is_a_rate_of_the_crowd_and_is_told_as_a_bound_where_all_of_it_is_served():
    easy = AGENTS._replace(objective=replace(AGENTS.objective, ttft_s=99, tpot_s=9))
    hard = AGENTS._replace(objective=replace(AGENTS.objective, ttft_s=1e-9, tpot_s=1e-9))
    few, many, none = (
        study.measure(SHARED, each, "copy_ours", 0, seeks_goodput=True)
        for each in (easy._replace(crowd=1), easy, hard)
    )
    assert (few.goodput_share, many.goodput_share) == (1.0, 1.0)
    assert 0 < few.goodput_per_s < many.goodput_per_s
    assert (none.goodput_per_s, none.goodput_share) == (0.0, 0.0)
    paths = [many._replace(path=path) for path in (*copy_paths.PATHS, copy_paths.NO_HOST)]
    assert "| ≥ " in copy_paths.table(paths).splitlines()[2]


def test_what_a_regime_says_wins_over_what_a_path_says():
    disturbed = next(each for each in study.REGIMES if study.DISTURBED in each.overrides)
    config = config_of("arm=copy_ours", *disturbed.overrides)
    assert config.hardware.copy_slowdown.value == 2.8


def test_paths_that_agree_make_one_conclusion():
    (told,) = copy_paths.conclusions(rows_of("quiet", 0.1, 0.2))
    assert told == "quiet: a host tier pays, whatever the path"


def test_a_path_that_turns_a_conclusion_is_named():
    means = dict.fromkeys(copy_paths.PATHS, 0.1) | {"copy_memcpy": 0.5}
    (told,) = copy_paths.conclusions(rows_of("small", means, 0.2))
    assert "costs more than it brings with batched memcpy" in told
    assert told.endswith("THE PATH DECIDES")


def test_a_gain_within_the_seeds_is_no_gain():
    (told,) = copy_paths.conclusions(rows_of("even", 0.1, 0.103))
    assert "makes no clear difference, whatever the path" in told


def test_the_best_page_size_is_asked_of_each_path():
    pages, small, tokens = copy_paths.PAGE_SIZES
    rows = rows_of(pages, 0.1, 0.3) + rows_of(small, 0.1, 0.3)
    rows += rows_of(tokens, dict.fromkeys(copy_paths.PATHS, 0.08) | {"copy_memcpy": 0.6}, 0.3)
    told = copy_paths.conclusions(rows)[-1]
    assert "have their lowest TTFT with token pages with Triton" in told
    assert "have their lowest TTFT with pages of 64 or pages of 16 with batched memcpy" in told


@pytest.fixture
def some_rows():
    return rows_of("one", 0.1, 0.2) + rows_of("two", 0.3, 0.2)


def test_the_figure_tells_what_speaks_against_how_many_runs(some_rows):
    share = f"{len(some_rows) // study.NUM_SEEDS} of {len(some_rows)} runs"
    title = copy_paths.draw(some_rows).get_suptitle()
    assert title.splitlines()[-1] == f"verdict: idle ({share})"


def test_the_table_has_a_row_a_path_with_its_spread(some_rows):
    lines = copy_paths.table(some_rows).splitlines()
    assert len(lines) == 2 + 2 * (len(copy_paths.PATHS) + 1)
    assert "101 (100–102)" in lines[2]
    assert "| modelled |" in lines[2]


def test_the_figure_hatches_what_is_modelled(some_rows):
    for place, each in enumerate(some_rows):
        if each.path == "copy_memcpy":
            some_rows[place] = each._replace(status="measured")
    figure = copy_paths.draw(some_rows)
    hatches = {bar.get_label(): bar[0].get_hatch() for bar in figure.axes[0].containers
               if hasattr(bar, "patches")}  # fmt: skip
    assert hatches["batched memcpy (measured)"] is None
    assert hatches["ours (modelled)"] == "//"


def test_the_command_leaves_rows_table_summary_and_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "REGIMES", (AGENTS,))
    monkeypatch.setattr(study, "NUM_SEEDS", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # another process takes as long
    config = config_of("experiment=kernel_to_ttft", *SHARED)
    study.carry_out(config, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kernel_to_ttft.png", "rows.csv", "summary.json", "table.md"
    ]  # fmt: skip
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(copy_paths.PATHS) + 1
    assert "a host tier" in capsys.readouterr().out

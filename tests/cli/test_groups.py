"""Tables over stored runs: how runs are grouped, compared, printed and summed up."""

import csv
import json
from itertools import product

import pytest
from omegaconf import OmegaConf

from hicache.cli import compare
from hicache.cli.sweep import sum_up
from hicache.cli.tables.comparison import SPREAD_PARTS, number, over_runs, table_of
from hicache.cli.tables.groups import (
    Spread,
    StoredRun,
    answer_sets,
    compared_groups,
    differing_keys,
    find_runs,
    group_runs,
    load_runs,
    question_key,
)
from hicache.results.tracking import write_json

STOPS = ("best_effort", "timeout")
RATES = (0.5, 8.0)
SEEDS = (0, 1, 2)
TTFT = "request/ttft_s_mean"


def write_run(
    path, *, stop="timeout", rate=1.0, seed=0, ttft=1.0, rho=0.5, window=0, threshold=256, **counts
):
    path.mkdir(parents=True)
    config = {
        "name": "stops",
        "seed": seed,
        "workload": {"slice": f"{window}/10"},
        "prefetch": {"stop": stop, "threshold": threshold},
        "storage": {"read_gbps": rate, "root": None},
    }
    OmegaConf.save(OmegaConf.create(config), path / "config.yaml")
    summary = {
        "cache/token_hit_rate": 0.4,
        TTFT: ttft,
        "request/ttft_s_p95": 2 * ttft,
        "gpu/prefill_seconds_per_request": 0.1,
        "load/rho_gpu": rho,
        **{f"request/{name}": count for name, count in counts.items()},
    }
    write_json(path / "summary.json", summary)


def write_runs(path, *runs):
    for job, knobs in enumerate(runs):
        write_run(path / str(job), **knobs)


@pytest.fixture
def sweep(tmp_path):
    """Twelve runs: timeout has twice the TTFT of best_effort, and rate 8 half of that of 0.5."""
    for job, (stop, rate, seed) in enumerate(product(STOPS, RATES, SEEDS)):
        ttft = (1 + seed) * (2 if stop == "timeout" else 1) * (0.5 if rate == 8.0 else 1)
        write_run(tmp_path / str(job), stop=stop, rate=rate, seed=seed, ttft=ttft)
    return tmp_path


@pytest.fixture
def printed(capsys):
    """Return a function that runs `hicache compare` with its arguments and returns the output."""

    def call(*arguments):
        compare.main([*map(str, arguments)])
        return capsys.readouterr().out

    return call


def groups_of(path):
    runs = load_runs([path])
    return group_runs(runs, differing_keys(runs))


def settings_of(groups):
    return [group.settings for group in groups]


def test_runs_of_a_sweep_are_grouped_by_their_settings_over_all_seeds(sweep):
    runs = load_runs([sweep])
    assert [run.path.name for run in runs] == [str(job) for job in range(12)]
    assert differing_keys(runs) == ["prefetch.stop", "storage.read_gbps"]
    groups = groups_of(sweep)
    assert [len(group.runs) for group in groups] == [3, 3, 3, 3]
    assert settings_of(groups) == [
        {"prefetch.stop": stop, "storage.read_gbps": rate} for stop, rate in product(STOPS, RATES)
    ]


def test_groups_that_differ_only_in_the_compared_setting_are_paired_by_seed(sweep):
    groups = groups_of(sweep)
    assert question_key(groups) == "prefetch.stop"  # a choice, and no number
    assert answer_sets(groups) == [[groups[0], groups[2]], [groups[1], groups[3]]]
    assert groups[3].ratios(groups[1], TTFT) == [2.0, 2.0, 2.0]


def typed(path, *overrides):
    (path / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create(list(overrides)), path / ".hydra" / "overrides.yaml")


def test_groups_are_named_by_typed_overrides_if_these_explain_all_differences(tmp_path):
    for job, stop in enumerate(STOPS):
        write_run(tmp_path / str(job), stop=stop, rate=8.0 + job)
        typed(tmp_path / str(job), f"arm={stop}_and_rate", "seed=0", "experiment=stops")
    assert settings_of(groups_of(tmp_path)) == [{"arm": f"{stop}_and_rate"} for stop in STOPS]


def test_groups_are_named_by_the_config_if_typed_overrides_miss_a_difference(tmp_path):
    for job, rate in enumerate(RATES):
        write_run(tmp_path / str(job), rate=rate)
        typed(tmp_path / str(job), "arm=the_same")
    assert differing_keys(load_runs([tmp_path])) == ["storage.read_gbps"]


def test_a_choice_typed_in_one_sweep_equals_that_composed_by_another(tmp_path):
    for place, told in (("mine", "model=llama3_8b"), ("theirs", "experiment=sizes")):
        for job, stop in enumerate(STOPS):
            path = tmp_path / place / str(job)
            write_run(path, stop=stop)
            typed(path, told, f"prefetch.stop={stop}")
            chosen = {"model": "llama3_8b", "experiment": "sizes" if place == "theirs" else None}
            hydra = OmegaConf.create({"hydra": {"runtime": {"choices": chosen}}})
            OmegaConf.save(hydra, path / ".hydra" / "hydra.yaml")
    runs = load_runs([tmp_path / "mine", tmp_path / "theirs"])
    assert [run.setting("model") for run in runs] == ["llama3_8b"] * 4
    assert differing_keys(runs) == ["prefetch.stop", "experiment"]


def test_two_models_are_told_apart_by_their_names_alone(tmp_path):
    runs = [
        StoredRun(path=tmp_path, config=config, summary={})
        for config in (
            {"model.name": "a", "model.num_layers": 1, "cache.host_gib": 8.0},
            {"model.name": "b", "model.num_layers": 2, "cache.host_gib": 32.0},
        )
    ]
    assert differing_keys(runs) == ["model.name", "cache.host_gib"]


def test_a_count_missing_from_the_summary_of_one_run_is_zero(tmp_path):
    write_runs(tmp_path, {}, {"seed": 1, "cut_count": 7})
    assert [run.summary["request/cut_count"] for run in load_runs([tmp_path])] == [0, 7]


def code(letter):
    return {"hicache": {"sha256": letter * 64}}


def policy(letter):
    return code("a") | {"policies": {"prefetch.stop": {"sha256": letter * 64}}}


OF_SEEDS, OF_STOPS = ([{name: value} for value in (0, 1)] for name in ("seed", "stop"))
RULES = {"rules": "01"}


@pytest.mark.parametrize(
    ("runs", "made_of", "names", "values"),
    [
        (OF_SEEDS, [policy("a"), policy("b")], ["prefetch.stop source"], ["a" * 8, "b" * 8]),
        (OF_SEEDS, [policy("b"), policy("b")], [], []),
        (OF_SEEDS, [code("a"), code("b")], ["hicache source"], ["a" * 8, "b" * 8]),
        (OF_STOPS, [code("a"), code("b")], ["prefetch.stop"], [0, 1]),
        ([{}, {}], [code("a"), RULES], ["rules"], ["older", "01"]),
        (OF_STOPS, [code("a"), RULES], ["prefetch.stop", "rules"], ["older", "01"]),
    ],
)
def test_runs_made_by_different_code_are_grouped_apart(tmp_path, runs, made_of, names, values):
    write_runs(tmp_path, *runs)
    for job, made in enumerate(made_of):
        write_json(tmp_path / str(job) / "provenance.json", made)
    settings = settings_of(groups_of(tmp_path))
    assert all(list(each) == names for each in settings)
    assert [each[names[-1]] for each in settings if names] == values


def test_two_runs_of_one_seed_with_different_results_are_grouped_apart(tmp_path):
    write_runs(tmp_path, {"ttft": 1.0}, {"ttft": 2.0})
    paths = [str(tmp_path / name) for name in "01"]
    assert settings_of(groups_of(tmp_path)) == [{"run": path} for path in paths]


def test_windows_of_a_trace_are_one_group_and_are_compared_window_by_window(tmp_path):
    for job, (stop, window) in enumerate(product(STOPS, range(3))):
        ttft = (1 + window) * (2 if stop == "timeout" else 1)
        write_run(tmp_path / str(job), stop=stop, window=window, ttft=ttft)
    base, other = groups_of(tmp_path)
    assert list(base.settings) == ["prefetch.stop"]
    assert other.ratios(base, TTFT) == [2] * 3
    assert over_runs([base, other]) == "median (lowest–highest) over 3 windows"


def test_a_table_shows_the_metrics_of_the_experiment(sweep, printed):
    for path in sweep.iterdir():
        config = OmegaConf.load(path / "config.yaml")
        config.metrics = ["load/rho_gpu"]
        OmegaConf.save(config, path / "config.yaml")
    heading = printed(sweep)
    assert "load/rho_gpu" in heading
    assert "token hit rate" not in heading


def test_a_table_can_be_printed_as_markdown_csv_or_json(sweep, printed, capsys):
    lines = [" ".join(line.split()) for line in printed(sweep, "--markdown").splitlines()]
    assert lines[0].startswith("| storage.read_gbps | prefetch.stop | runs | token hit rate |")
    assert lines[2].startswith("| 0.5 | best_effort | 3 |")
    assert lines[3].endswith("| 2.00 |")
    rows = list(csv.DictReader(printed(sweep, "--csv").splitlines()))
    assert [float(row[f"{TTFT} median"]) for row in rows] == [2, 4, 1, 2]
    assert rows[1][f"{TTFT} ratio highest"] == "2"
    assert (rows[0]["runs"], rows[0]["overloaded"]) == ("3", "False")
    rows = json.loads(printed(sweep, "--json", "--metric", TTFT))
    assert [row[f"{TTFT} median"] for row in rows] == [2, 4, 1, 2]
    assert [row[f"{TTFT} ratio highest"] for row in rows] == [None, 2, None, 2]
    with pytest.raises(SystemExit):
        printed(sweep, "--json", "--csv")
    assert "not allowed with" in capsys.readouterr().err


def test_groups_that_differ_in_several_settings_are_compared_with_the_first(sweep):
    groups = groups_of(sweep)
    far = [groups[1], groups[2]]  # of another rate and another stop policy
    assert answer_sets(far) == [far]
    assert answer_sets([*groups[:1], *groups[2:]]) == [[groups[0], groups[2], groups[3]]]
    (base, other) = table_of(far, [TTFT]).sections[0]
    name = f"{TTFT} ratio median"
    assert [base.values[name], other.values[name]] == [None, 4]


def test_each_row_is_compared_with_the_baseline_that_shares_its_other_settings(sweep, printed):
    baselines = compared_groups([sweep], baseline=["prefetch.stop=timeout"])
    assert [settings_of(answers) for answers in answer_sets(baselines)] == [
        [{"prefetch.stop": stop, "storage.read_gbps": rate} for stop in reversed(STOPS)]
        for rate in RATES
    ]
    rows = json.loads(printed(sweep, "--baseline", "storage.read_gbps=8", "--json"))
    assert [row[f"{TTFT} ratio median"] for row in rows] == [None, 2, None, 2]
    assert [row["storage.read_gbps"] for row in rows] == [8, 0.5] * 2


def test_a_sweep_can_be_the_baseline_of_another_sweep(sweep, tmp_path, printed):
    other = tmp_path.with_name("other")
    new = {"stop": "new", "window": 7, "threshold": 512}
    write_runs(other, *({**new, "rate": rate, "ttft": 3.0 / rate} for rate in RATES))
    paths = [sweep / "0", sweep / "3"]
    for given in ([*paths, other], paths):  # the baseline need not be named twice
        rows = list(csv.DictReader(printed(*given, "--baseline", other, "--csv").splitlines()))
        names = ("storage.read_gbps", "prefetch.stop", "runs")
        assert [tuple(row[name] for name in names) for row in rows] == [
            (rate, stop, "1") for rate in ("0.5", "8.0") for stop in ("new", "best_effort")
        ]


@pytest.mark.parametrize(
    ("where", "count"), [(["prefetch.stop=timeout,best_effort", "seed=0,1"], 8), (["seed=2"], 4)]
)
def test_only_runs_that_meet_every_condition_are_compared(sweep, where, count):
    assert sum(len(group.runs) for group in compared_groups([sweep], where=where)) == count


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([".", "--where", "prefetch.stop=never"], "prefetch.stop is best_effort or timeout"),
        ([".", "--where", "prefetch.stp=timeout"], "no setting prefetch.stp (did you mean pre"),
        ([".", "--baseline", "seed=0"], "every row is a baseline: seed=0 holds for all"),
        ([".", "--where", "seed=0", "--baseline", "seed=1"], "no run has seed=1: seed is 0"),
        (["nowhere"], "nowhere"),
        ([".", "--metric", "ttft_s_mean"], f"ttft_s_mean (did you mean {TTFT}?)"),
    ],
)
def test_a_comparison_without_matching_runs_or_metrics_is_refused(
    sweep, printed, monkeypatch, capsys, arguments, told
):
    monkeypatch.chdir(sweep)
    with pytest.raises(SystemExit) as caught:
        printed(*arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_failed_runs_are_left_out_and_folders_without_a_run_are_refused(sweep, tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"no summary\.json"):
        load_runs([tmp_path.with_name("empty")])
    failed = tmp_path / "failed"
    failed.mkdir()
    (failed / "error.txt").write_text("it failed")
    groups = compared_groups([sweep, failed])
    assert f"{failed} is left out: its run failed" in capsys.readouterr().err
    assert settings_of(groups) == settings_of(compared_groups([sweep]))


def test_a_spread_is_printed_as_a_median_and_a_range_unless_it_is_one_value():
    assert Spread.of([1.0, 2.0, 9.0]).text(number) == "2.00 (1.00–9.00)"
    assert Spread.of([2.0]).text(number) == "2.00"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.12345, "0.123"), (12.0, "12.0"), (123456.7, "123,457")]
)
def test_numbers_have_at_least_three_significant_digits(value, text):
    assert number(value) == text


def summed_up(path):
    sum_up(path, find_runs(path), title="stops")
    with (path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((path / "sweep.json").read_text())


def test_a_sweep_prints_a_table_and_writes_csv_json_and_reproducible_figures(sweep, capsys):
    lines, described = summed_up(sweep)
    assert len(lines) == 12
    names = [*lines[0]][[*lines[0]].index("verdict") + 1 :]
    assert names == sorted(names)
    assert (lines[11]["prefetch.stop"], lines[11][TTFT]) == ("timeout", "3.0")
    assert [described[0][f"{TTFT} {part}"] for part in SPREAD_PARTS] == [2, 1, 3]
    assert described[0]["load/rho_gpu median"] == 0.5
    printed = capsys.readouterr().out
    assert "2.00 (1.00–3.00)" in printed
    assert "stops: median (lowest–highest) over 3 seeds\n" in printed
    names = ("sweep.png", "sweep.pdf")
    first = [(sweep / name).read_bytes() for name in names]
    assert first[0].startswith(b"\x89PNG")
    assert first[1].startswith(b"%PDF")
    summed_up(sweep)
    assert [(sweep / name).read_bytes() for name in names] == first


@pytest.mark.parametrize("busy", STOPS)
def test_no_latency_of_an_overloaded_run_is_compared(tmp_path, printed, busy):
    for job, stop in enumerate(STOPS):
        rho = 0.95 if stop == busy else 0.5
        write_run(tmp_path / str(job), stop=stop, ttft=1.0 + job, rho=rho)
    *_, first, other, note = printed(tmp_path).splitlines()
    rows = {line.split()[0]: line.split() for line in (first, other)}
    assert [stop for stop in STOPS if rows[stop][2] == "a"] == [busy]
    assert note.startswith("a: GPU overloaded, ρ 0.95 in 1 of 2 runs: queues grow until")
    assert rows["timeout"][-1] == "–"
    assert "2.00" in rows["timeout"]  # the latency itself stays
    row = json.loads(printed(tmp_path, "--json", "--metric", TTFT))[1]
    assert (row[f"{TTFT} median"], row[f"{TTFT} ratio median"]) == (2.0, None)
    hits = printed(tmp_path, "--metric", "cache/token_hit_rate")
    assert "1.00" in hits  # which is no latency


@pytest.mark.parametrize("rejected", [(0, 168), (7, 7)])
def test_rows_that_rejected_different_numbers_of_requests_are_reported(tmp_path, printed, rejected):
    counts = {"count": 600, "aborted_count": 3}
    runs = zip(STOPS, rejected, strict=True)
    write_runs(tmp_path, *({**counts, "stop": stop, "rejected_count": n} for stop, n in runs))
    text = printed(tmp_path)
    told = "requests rejected: 0 to 168 of 600; the rows cover different requests\n"
    assert (told in text) == (rejected == (0, 168)) == ("requests" in text)
    assert "aborted" not in text


@pytest.mark.parametrize(
    ("ttfts", "told"),
    [
        ((1, 2, 1, 2, 3, 4), "a = b (at 0.5, 8)"),
        ((1, 2, 1, 2, 1, 2), "a = b = c (at 0.5, 8)"),
        ((1, 2, 1, 5, 3, 4), "a = b (at 0.5)"),
        ((1, 2, 1, 5, 3, 2), "a = b (at 0.5); a = c (at 8)"),
        ((1, 1, 2, 3, 4, 5), "0.5 = 8 (at a)"),
        ((1, 2, 3, 4, 5, 6), None),
    ],
)
def test_settings_without_effect_are_reported(tmp_path, printed, ttfts, told):
    for job, (stop, rate) in enumerate(product("abc", RATES)):
        write_run(tmp_path / str(job), stop=stop, rate=rate, ttft=ttfts[job])
    notes = [line for line in printed(tmp_path).splitlines() if "identical runs" in line]
    note = f"{told}: identical runs, so these settings had no effect here"
    assert notes == ([note] if told else [])


def test_seeds_without_effect_are_reported(tmp_path, sweep, printed):
    assert "All seeds" not in printed(sweep)
    write_runs(tmp_path / "alike", *({"seed": seed} for seed in SEEDS))
    assert "All seeds gave the same run" in printed(tmp_path / "alike")

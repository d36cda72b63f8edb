import csv
import json
import shutil
from itertools import product

import pytest
from omegaconf import OmegaConf

from hicache.cli import compare
from hicache.cli.sweep import sum_up
from hicache.cli.tables.comparison import SPREAD_PARTS, number, over_runs, table_of
from hicache.cli.tables.groups import (
    Spread,
    answer_sets,
    compared_groups,
    differing_keys,
    find_runs,
    group_runs,
    load_runs,
    question_key,
)
from hicache.results.tracking import write_json

OTHER_CODE = "b" * 64
STOPS = ("best_effort", "timeout")
RATES = (0.5, 8.0)
SEEDS = (0, 1, 2)


def write_run(path, *, stop, rate, seed, ttft, rho=0.5, window=0, **counts):
    path.mkdir(parents=True)
    config = {
        "name": "stops",
        "seed": seed,
        "workload": {"window": window},
        "prefetch": {"stop": stop, "threshold": 256},
        "storage": {"read_gbps": rate, "root": None},
    }
    (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    summary = {
        "cache/token_hit_rate": 0.4,
        "request/ttft_s_mean": ttft,
        "request/ttft_s_p95": 2 * ttft,
        "gpu/prefill_seconds_per_request": 0.1,
        "load/rho_gpu": rho,
        **{f"request/{name}": count for name, count in counts.items()},
    }
    write_json(path / "summary.json", summary)


@pytest.fixture
def sweep(tmp_path):
    """Twelve runs; timeout takes twice as long as best_effort, and rate 8 half as long as 0.5."""
    job = 0
    for stop in STOPS:
        for rate in RATES:
            for seed in SEEDS:
                ttft = (1 + seed) * (2 if stop == "timeout" else 1) * (0.5 if rate == 8.0 else 1)
                write_run(tmp_path / str(job), stop=stop, rate=rate, seed=seed, ttft=ttft)
                job += 1
    return tmp_path


def groups_of(path):
    runs = load_runs([path])
    return group_runs(runs, differing_keys(runs))


def test_jobs_come_in_the_order_of_their_numbers(sweep):
    assert [run.path.name for run in load_runs([sweep])] == [str(job) for job in range(12)]


def test_what_was_swept_is_found_without_the_seed(sweep):
    assert differing_keys(load_runs([sweep])) == ["prefetch.stop", "storage.read_gbps"]


def test_a_group_is_one_setting_over_all_seeds(sweep):
    groups = groups_of(sweep)
    assert [len(group.runs) for group in groups] == [3, 3, 3, 3]
    assert groups[3].settings == {"prefetch.stop": "timeout", "storage.read_gbps": 8.0}


def test_a_choice_is_the_question_and_not_a_number(sweep):
    assert question_key(groups_of(sweep)) == "prefetch.stop"


def typed(path, *overrides):
    (path / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create(list(overrides)), path / ".hydra" / "overrides.yaml")


def test_what_was_typed_tells_runs_apart_where_it_explains_all_differences(tmp_path):
    for job, stop in enumerate(STOPS):
        write_run(tmp_path / str(job), stop=stop, rate=8.0 + job, seed=0, ttft=1.0)
        typed(tmp_path / str(job), f"arm={stop}_and_rate", "seed=0", "experiment=stops")
    runs = load_runs([tmp_path])
    assert differing_keys(runs) == ["arm"]
    assert group_runs(runs, ["arm"])[1].settings == {"arm": "timeout_and_rate"}


def test_a_choice_that_one_sweep_typed_and_the_other_composed_is_no_difference(tmp_path):
    for place, told in (("mine", "model=llama3_8b"), ("theirs", "experiment=sizes")):
        for job, stop in enumerate(STOPS):
            path = tmp_path / place / str(job)
            write_run(path, stop=stop, rate=1.0, seed=0, ttft=1.0)
            typed(path, told, f"prefetch.stop={stop}")
            chosen = {"model": "llama3_8b", "experiment": "sizes" if place == "theirs" else None}
            hydra = OmegaConf.create({"hydra": {"runtime": {"choices": chosen}}})
            OmegaConf.save(hydra, path / ".hydra" / "hydra.yaml")
    runs = load_runs([tmp_path / "mine", tmp_path / "theirs"])
    assert [run.setting("model") for run in runs] == ["llama3_8b"] * 4
    assert differing_keys(runs) == ["prefetch.stop", "experiment"]


def test_what_was_typed_gives_way_to_the_config_where_it_explains_too_little(tmp_path):
    for job, rate in enumerate(RATES):
        write_run(tmp_path / str(job), stop="timeout", rate=rate, seed=0, ttft=1.0)
        typed(tmp_path / str(job), "arm=the_same")
    assert differing_keys(load_runs([tmp_path])) == ["storage.read_gbps"]


def test_what_was_counted_in_one_run_only_is_zero_in_the_others(tmp_path):
    for job in (0, 1):
        write_run(tmp_path / str(job), stop="timeout", rate=1.0, seed=job, ttft=1.0)
    summary = json.loads((tmp_path / "1" / "summary.json").read_text())
    write_json(tmp_path / "1" / "summary.json", summary | {"prefetch/cut_count": 7})
    assert [run.summary["prefetch/cut_count"] for run in load_runs([tmp_path])] == [0, 7]


def made_of(path, *, code="a" * 64, **policies):
    """Writes what made a run."""
    digests = {knob: {"class": "mine:Mine", "sha256": sha} for knob, sha in policies.items()}
    write_json(path / "provenance.json", {"hicache": {"sha256": code}, "policies": digests})


def write_seeds(path, ttfts):
    for seed, ttft in enumerate(ttfts):
        write_run(path / str(seed), stop="mine:Mine", rate=1.0, seed=seed, ttft=ttft)


def test_a_policy_before_and_after_an_edit_is_two_settings(tmp_path):
    write_seeds(tmp_path, [1.0, 2.0])
    for seed, sha in enumerate(["a" * 64, OTHER_CODE]):
        made_of(tmp_path / str(seed), **{"prefetch.stop": sha})
    groups = groups_of(tmp_path)
    assert [group.settings for group in groups] == [
        {"prefetch.stop source": "aaaaaaaa"},
        {"prefetch.stop source": "bbbbbbbb"},
    ]


def test_a_policy_that_nobody_edited_is_one_setting(tmp_path):
    write_seeds(tmp_path, [1.0, 2.0])
    for seed in (0, 1):
        made_of(tmp_path / str(seed), **{"prefetch.stop": OTHER_CODE})
    assert [group.settings for group in groups_of(tmp_path)] == [{}]


def test_runs_by_other_code_are_no_further_seeds(tmp_path):
    write_seeds(tmp_path, [1.0, 2.0])
    made_of(tmp_path / "0")
    made_of(tmp_path / "1", code=OTHER_CODE)
    assert differing_keys(load_runs([tmp_path])) == ["hicache source"]


@pytest.mark.parametrize(("stops", "told"), [("aa", []), ("ab", ["prefetch.stop"])])
def test_runs_under_other_rules_are_told_apart(tmp_path, stops, told):
    for job, stop in enumerate(stops):
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=0, ttft=1.0)
    assert differing_keys(load_runs([tmp_path])) == told
    write_json(tmp_path / "1" / "provenance.json", {"rules": "0123abcd"})
    assert differing_keys(load_runs([tmp_path])) == [*told, "rules"]
    assert [group.settings["rules"] for group in groups_of(tmp_path)] == ["older", "0123abcd"]


def test_other_code_is_no_setting_where_the_knobs_tell_the_runs_apart_anyway(tmp_path):
    for job, stop in enumerate(STOPS):
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=0, ttft=1.0)
    made_of(tmp_path / "0")
    made_of(tmp_path / "1", code=OTHER_CODE)
    assert differing_keys(load_runs([tmp_path])) == ["prefetch.stop"]


def test_one_seed_with_two_results_is_not_two_seeds(tmp_path):
    for place, ttft in (("first", 1.0), ("second", 2.0)):
        write_run(tmp_path / place, stop="timeout", rate=1.0, seed=0, ttft=ttft)
    groups = groups_of(tmp_path)
    assert [group.settings for group in groups] == [
        {"run": str(tmp_path / "first")},
        {"run": str(tmp_path / "second")},
    ]


def test_windows_are_one_group_and_compared_with_themselves(tmp_path):
    for job, (stop, window) in enumerate(product(STOPS, range(3))):
        ttft = (1 + window) * (2 if stop == "timeout" else 1)
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=0, window=window, ttft=ttft)
    base, other = groups_of(tmp_path)
    assert list(base.settings) == ["prefetch.stop"]
    ratios = other.ratios(base, "request/ttft_s_mean")
    assert ratios == [0.5 if STOPS[0] == "timeout" else 2] * 3
    assert over_runs([base, other]) == "median (lowest–highest) over 3 windows"


def test_answers_to_the_question_stand_together(sweep):
    groups = groups_of(sweep)
    stops = [
        [group.settings["prefetch.stop"] for group in answers] for answers in answer_sets(groups)
    ]
    assert stops == [list(STOPS), list(STOPS)]


def test_a_table_shows_the_metrics_of_the_experiment(sweep, capsys):
    for path in sweep.iterdir():
        config = OmegaConf.load(path / "config.yaml")
        config.metrics = ["load/rho_gpu"]
        OmegaConf.save(config, path / "config.yaml")
    compare.main([str(sweep)])
    heading = capsys.readouterr().out
    assert "load/rho_gpu" in heading
    assert "token hit rate" not in heading


def test_a_table_can_be_put_into_a_page(sweep, capsys):
    compare.main([str(sweep), "--markdown"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("| storage.read_gbps | prefetch.stop | runs | token hit rate |")
    assert lines[2].startswith("| 0.5 | best_effort | 3 |")
    assert lines[3].endswith("| 2.00 |")


def test_a_table_can_be_read_by_a_program(sweep, capsys):
    compare.main([str(sweep), "--csv"])
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [float(line["request/ttft_s_mean median"]) for line in lines] == [2, 4, 1, 2]
    assert lines[1]["request/ttft_s_mean ratio highest"] == "2"
    assert (lines[0]["runs"], lines[0]["overloaded"]) == ("3", "False")


def test_one_form_of_a_table_at_a_time(sweep, capsys):
    with pytest.raises(SystemExit):
        compare.main([str(sweep), "--json", "--csv"])
    assert "not allowed with" in capsys.readouterr().err


def test_the_baseline_differs_in_the_question_alone(sweep):
    groups = groups_of(sweep)
    (baseline,) = [answers[0] for answers in answer_sets(groups) if groups[3] in answers]
    assert baseline is groups[1]


def test_arms_that_differ_in_several_knobs_are_compared_with_the_first(sweep):
    groups = groups_of(sweep)
    far = [groups[1], groups[2]]  # of another rate and another stop policy
    assert answer_sets(far) == [far]
    assert answer_sets([*groups[:1], *groups[2:]]) == [[groups[0], groups[2], groups[3]]]
    (base, other) = table_of(far, ["request/ttft_s_mean"]).sections[0]
    name = "request/ttft_s_mean ratio median"
    assert [base.values[name], other.values[name]] == [None, 4]


def test_each_row_is_compared_with_the_baseline_that_it_resembles_most(sweep):
    baselines = compared_groups([sweep], baseline=["prefetch.stop=timeout"])
    assert [[group.settings for group in answers] for answers in answer_sets(baselines)] == [
        [{"prefetch.stop": stop, "storage.read_gbps": rate} for stop in reversed(STOPS)]
        for rate in RATES
    ]


def test_a_baseline_may_be_a_number(sweep, capsys):
    compare.main([str(sweep), "--baseline", "storage.read_gbps=8", "--json"])
    rows = json.loads(capsys.readouterr().out)
    ratios = [row["request/ttft_s_mean ratio median"] for row in rows]
    assert ratios == [None, 2, None, 2]
    assert [row["storage.read_gbps"] for row in rows] == [8, 0.5] * 2


def test_two_sweeps_that_differ_in_several_knobs_are_compared_row_by_row(sweep, tmp_path, capsys):
    other = tmp_path.with_name("other")
    for job, rate in enumerate(RATES):
        write_run(other / str(job), stop="new", rate=rate, seed=0, ttft=3.0 / rate, window=7)
        config = OmegaConf.load(other / str(job) / "config.yaml")
        config.prefetch.threshold = 512
        OmegaConf.save(config, other / str(job) / "config.yaml")
    paths = [str(sweep / "0"), str(sweep / "3")]
    for given in ([*paths, str(other)], paths):  # the baseline need not be named twice
        compare.main([*given, "--baseline", str(other), "--csv"])
        rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
        names = ("storage.read_gbps", "prefetch.stop", "runs")
        assert [tuple(row[name] for name in names) for row in rows] == [
            (rate, stop, "1") for rate in ("0.5", "8.0") for stop in ("new", "best_effort")
        ]


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (["prefetch.stop=timeout"], 6),
        (["prefetch.stop=timeout,best_effort", "seed=0,1"], 8),
        (["storage.read_gbps=8", "prefetch.stop=timeout", "seed=2"], 1),
    ],
)
def test_only_runs_that_fulfill_every_condition_are_compared(sweep, where, count):
    assert sum(len(group.runs) for group in compared_groups([sweep], where=where)) == count


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--where", "prefetch.stop=never"], "prefetch.stop is best_effort or timeout"),
        (["--baseline", "seed=0"], "every row is a baseline: seed=0 holds for all"),
        (["--where", "seed=0", "--baseline", "seed=1"], "no run has seed=1: seed is 0"),
    ],
)
def test_a_condition_that_selects_nothing_is_refused(sweep, capsys, arguments, told):
    with pytest.raises(SystemExit):
        compare.main([str(sweep), *arguments])
    assert told in capsys.readouterr().err


def test_ratios_pair_seeds(sweep):
    groups = groups_of(sweep)
    assert groups[3].ratios(groups[1], "request/ttft_s_mean") == [2.0, 2.0, 2.0]


def test_a_spread_is_a_middle_and_a_range():
    spread = Spread.of([1.0, 2.0, 9.0])
    assert spread.text(number) == "2.00 (1.00–9.00)"


def test_a_lone_value_has_no_range():
    assert Spread.of([2.0]).text(number) == "2.00"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.12345, "0.123"), (12.0, "12.0"), (123456.7, "123,457")]
)
def test_numbers_have_three_figures(value, text):
    assert number(value) == text


def test_a_directory_without_runs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no summary\.json"):
        load_runs([tmp_path])


def test_a_sweep_leaves_a_table_a_figure_and_two_files(sweep, capsys):
    sum_up(sweep, find_runs(sweep), title="stops")
    with (sweep / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 12
    assert lines[11]["prefetch.stop"] == "timeout"
    assert lines[11]["request/ttft_s_mean"] == "3.0"
    described = json.loads((sweep / "sweep.json").read_text())
    parts = [described[0][f"request/ttft_s_mean {part}"] for part in SPREAD_PARTS]
    assert parts == [2, 1, 3]
    assert described[0]["load/rho_gpu median"] == 0.5
    assert (sweep / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (sweep / "sweep.pdf").read_bytes().startswith(b"%PDF")
    printed = capsys.readouterr().out
    assert "2.00 (1.00–3.00)" in printed
    assert "stops: median (lowest–highest) over 3 seeds\n" in printed


def test_the_files_of_a_sweep_tell_its_windows_apart(tmp_path):
    for job in range(4):
        stop, window = STOPS[job // 2], 3 * (job % 2)
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=7, ttft=1.0 + job, window=window)
    sum_up(tmp_path, find_runs(tmp_path), title="stops")
    with (tmp_path / "sweep.csv").open() as file:
        assert [line["workload.window"] for line in csv.DictReader(file)] == ["0", "3", "0", "3"]
    described = json.loads((tmp_path / "sweep.json").read_text())
    assert [each["runs"] for each in described] == [2, 2]


def test_what_a_sweep_and_compare_say_is_the_middle_is_the_same(sweep, capsys):
    config = OmegaConf.load(sweep / "2" / "config.yaml")
    write = {"stop": config.prefetch.stop, "rate": config.storage.read_gbps, "seed": 2}
    shutil.rmtree(sweep / "2")
    write_run(sweep / "2", ttft=50.0, **write)  # so that mean and median lie far apart
    sum_up(sweep, find_runs(sweep), title="stops")
    compare.main([str(sweep)])
    lines = capsys.readouterr().out.splitlines()
    first, second = (line for line in lines if line.startswith("0.5") and "best_effort" in line)
    assert first == second
    assert "2.00 (1.00–50.0)" in first


def test_one_seed_has_no_middle(tmp_path, capsys):
    for job, stop in enumerate(STOPS):
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=0, ttft=1.0 + job)
    sum_up(tmp_path, find_runs(tmp_path), title="stops")
    compare.main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert "median" not in printed
    assert "seeds" not in printed


def test_figures_of_equal_sweeps_are_equal_bytes(sweep):
    names = ("sweep.png", "sweep.pdf")
    sum_up(sweep, find_runs(sweep), title="stops")
    first = [(sweep / name).read_bytes() for name in names]
    sum_up(sweep, find_runs(sweep), title="stops")
    assert [(sweep / name).read_bytes() for name in names] == first


def test_an_overloaded_run_is_marked(tmp_path, capsys):
    write_run(tmp_path / "0", stop="timeout", rate=1.0, seed=0, ttft=1.0, rho=0.95)
    write_run(tmp_path / "1", stop="best_effort", rate=1.0, seed=0, ttft=1.0)
    compare.main([str(tmp_path)])
    first, other, note = capsys.readouterr().out.splitlines()[-3:]
    assert (first.split()[:3], other.split()[1]) == (["timeout", "1", "a"], "1")
    assert note.startswith("a: GPU overloaded, ρ 0.95 in 1 of 2 runs: queues grow until")


@pytest.mark.parametrize("busy", ["0", "1"])
def test_no_latency_of_an_overloaded_run_is_compared(tmp_path, capsys, busy):
    for job, stop in enumerate(STOPS):
        rho = 0.95 if str(job) == busy else 0.5
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=0, ttft=1.0 + job, rho=rho)
    compare.main([str(tmp_path)])
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if "timeout" in line]
    assert line[-1] == "–"
    assert "2.00" in line  # the latency itself stays
    compare.main([str(tmp_path), "--json", "--metric", "request/ttft_s_mean"])
    row = json.loads(capsys.readouterr().out)[1]
    key = "request/ttft_s_mean"
    assert (row[f"{key} median"], row[f"{key} ratio median"]) == (2.0, None)


def test_what_is_no_latency_is_compared_under_overload_too(tmp_path, capsys):
    for job, stop in enumerate(STOPS):
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=0, ttft=1.0 + job, rho=0.95)
    compare.main([str(tmp_path), "--metric", "cache/token_hit_rate"])
    assert "1.00" in capsys.readouterr().out


def test_rows_over_different_requests_are_called_out(tmp_path, capsys):
    for job, (stop, rejected) in enumerate(zip(STOPS, (0, 168), strict=True)):
        counts = {"count": 600, "rejected_count": rejected, "aborted_count": 3}
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=0, ttft=1.0, **counts)
    compare.main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert "requests rejected: 0 to 168 of 600; the rows cover different requests\n" in printed
    assert "aborted" not in printed


def test_rows_over_as_many_requests_are_not(tmp_path, capsys):
    for job, stop in enumerate(STOPS):
        counts = {"count": 600, "rejected_count": 7, "aborted_count": 3}
        write_run(tmp_path / str(job), stop=stop, rate=1.0, seed=0, ttft=1.0 + job, **counts)
    compare.main([str(tmp_path)])
    assert "requests" not in capsys.readouterr().out


def write_grid(path, ttfts):
    """One run for each stop policy and rate, in this order."""
    grid = [(stop, rate) for stop in ("a", "b", "c") for rate in RATES]
    for job, ((stop, rate), ttft) in enumerate(zip(grid, ttfts, strict=True)):
        write_run(path / str(job), stop=stop, rate=rate, seed=0, ttft=ttft)


@pytest.mark.parametrize(
    ("ttfts", "told"),
    [
        ((1, 2, 1, 2, 3, 4), "a = b (at 0.5, 8)"),
        ((1, 2, 1, 2, 1, 2), "a = b = c (at 0.5, 8)"),
        ((1, 2, 1, 5, 3, 4), "a = b (at 0.5)"),
        ((1, 2, 1, 5, 3, 2), "a = b (at 0.5); a = c (at 8)"),
        ((1, 1, 2, 3, 4, 5), "0.5 = 8 (at a)"),
    ],
)
def test_settings_that_change_nothing_are_called_out(tmp_path, capsys, ttfts, told):
    write_grid(tmp_path, ttfts)
    compare.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    (note,) = [line for line in lines if "identical runs" in line]
    assert note == f"{told}: identical runs, so these settings had no effect here"


def test_settings_that_change_something_are_not(tmp_path, capsys):
    write_grid(tmp_path, (1, 2, 3, 4, 5, 6))
    compare.main([str(tmp_path)])
    assert "identical runs" not in capsys.readouterr().out


def test_seeds_that_change_nothing_are_called_out(tmp_path, capsys):
    for seed in SEEDS:
        write_run(tmp_path / str(seed), stop="timeout", rate=1.0, seed=seed, ttft=1.0)
    compare.main([str(tmp_path)])
    assert "All seeds gave the same run" in capsys.readouterr().out


def test_seeds_that_change_something_are_not(sweep, capsys):
    compare.main([str(sweep)])
    assert "All seeds" not in capsys.readouterr().out


def test_compare_prints_medians_and_the_ratio(sweep, capsys):
    compare.main([str(sweep / "1"), str(sweep / "7"), "--metric", "request/ttft_s_p95"])
    printed = capsys.readouterr().out
    assert "prefetch.stop" in printed
    assert "storage.read_gbps" not in printed
    (line,) = [line.split() for line in printed.splitlines() if "timeout" in line]
    assert line == ["timeout", "1", "8.00", "2.00"]


def test_compare_as_json_holds_numbers_with_all_their_digits(sweep, capsys):
    compare.main([str(sweep), "--json", "--metric", "request/ttft_s_mean"])
    rows = json.loads(capsys.readouterr().out)
    key = "request/ttft_s_mean"
    assert [row[f"{key} median"] for row in rows] == [2, 4, 1, 2]
    assert [row[f"{key} ratio highest"] for row in rows] == [None, 2, None, 2]


@pytest.mark.parametrize("arguments", [["nowhere"], [".", "--metric", "no/such_s"]])
def test_compare_refuses_in_one_sentence(sweep, monkeypatch, capsys, arguments):
    monkeypatch.chdir(sweep)
    with pytest.raises(SystemExit) as caught:
        compare.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_failed_runs_are_left_out_and_close_names_are_suggested(sweep, tmp_path, capsys):
    failed = tmp_path / "failed"
    failed.mkdir()
    (failed / "error.txt").write_text("it failed")
    groups = compared_groups([sweep, failed])
    assert f"{failed} is left out: its run failed" in capsys.readouterr().err
    assert [group.settings for group in groups] == [
        group.settings for group in compared_groups([sweep])
    ]
    with pytest.raises(ValueError, match=r"ttft_s_mean \(did you mean request/ttft_s_mean\?\)"):
        groups[0].values("ttft_s_mean")
    with pytest.raises(ValueError, match=r"no setting prefetch\.stp \(did you mean prefetch\.stop"):
        compared_groups([sweep], where=["prefetch.stp=timeout"])

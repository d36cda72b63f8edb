"""`hicache size`: its search against a search of every cell, and its table."""

import json

import pytest

from hicache import experiment
from hicache.cache.kinds import MAMBA, SWA
from hicache.cli.size import Cell, bound_of, knee_of, main, measure, search, shared_kind, show
from hicache.runs.schema import config_of

SMALL = ("workload=chat", "workload.num_sessions=30", "cache.device_gib=4", "--workers=1")
SHARES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
# by size of the host: the hit rate of each share
HILLS = {
    1.0: [0.0, 0.1, 0.15, 0.2, 0.1, 0.0, 0.0],
    2.0: [0.1, 0.2, 0.3, 0.2, 0.1, 0.0, 0.0],
    4.0: [0.0, 0.1, 0.2, 0.3, 0.48, 0.2, 0.0],
    8.0: [0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0],
    16.0: [0.4, 0.45, 0.5, 0.4, 0.3, 0.0, 0.0],
}


def cell(size, hit_rate, share=None, ttft_s=1.0):
    return Cell(host_gib=size, share=share, hit_rate=hit_rate, ttft_s=ttft_s)


def searched(sizes, shares, rate_of, guess=1, **options):
    """Run the search; return the best cell of each size, and the (size, share) pairs measured.

    By the bound, the size at `guess` is the knee, and each share may gain.
    """
    measured = []

    def bound(size, share):
        return 99.0 * (size >= sizes[guess]) + 1 - (share or 0)

    def measure(places):
        measured.extend(places)
        return [cell(size, rate_of(size, share), share) for size, share in places]

    return search(sizes, shares, measure, bound, **options), measured


def on_hills(**options):
    return searched(
        list(HILLS), SHARES, lambda size, share: HILLS[size][int(share * 10)], **options
    )


def test_the_search_measures_few_cells_and_finds_the_knee():
    best, every = on_hills(every_cell=True)
    assert [each.hit_rate for each in best] == [max(hill) for hill in HILLS.values()]
    assert len(every) == len(HILLS) * len(SHARES)
    for guess in range(len(HILLS)):
        found, measured = on_hills(guess=guess)
        assert knee_of(found) == knee_of(best) == cell(8.0, 0.5, 0.0)
        assert {each.host_gib for each in found} >= {1.0, 4.0, 8.0, 16.0}
        assert len(measured) == len(set(measured)) < len(every) / 2


def test_sizes_far_from_the_knee_are_not_simulated():
    sizes = [float(2**n) for n in range(20)]
    rates = {size: min(size, 1000.0) / 2000 for size in sizes}
    for guess, most in ((10, 4), (9, 4), (11, 8), (1, 8), (19, 8)):  # the knee is 1024
        found, measured = searched(sizes, [None], lambda size, _: rates[size], guess=guess)
        assert knee_of(found).host_gib == 1024
        assert len(measured) <= most


@pytest.mark.parametrize(("aux", "moved"), [(True, {0.1, 0.3}), (False, {0.1})])
def test_a_layer_kind_that_the_host_never_evicts_gets_no_larger_share(aux, moved):
    measured = []

    def measure(places):
        measured.extend(places)
        kept = {"evicts_aux": aux, "ttft_s": 1.0}
        return [Cell(host_gib=size, share=share, hit_rate=size, **kept) for size, share in places]

    search([0.0, 0.5, 1.0], [0.0, 0.1, 0.2, 0.3], measure, lambda _, share: 9 - share)
    assert {share for size, share in measured if size == 1.0} == {0.2} | moved


@pytest.mark.parametrize(
    ("bounds", "moved"),
    [
        ([0.9, 0.9, 0.8, 0.6], {0.1}),  # with less full-attention KV, fewer hits are possible
        ([0.9, 0.803, 0.8, 0.7], {0.3}),  # more full-attention KV has few more hits
        ([0.9, 0.8, 0.8, 0.6], set()),
        ([0.5, 0.5, 0.5, 0.5], {0.1, 0.3}),  # no bound, since the run hits more
    ],
)
def test_a_share_is_simulated_only_if_the_bound_allows_it_to_gain(bounds, moved):
    shares = [0.0, 0.1, 0.2, 0.3]
    rates = dict(zip(shares, (0.3, 0.4, 0.6, 0.5), strict=True))
    measured = []

    def measure(places):
        measured.extend(places)
        return [cell(size, size and rates[share], share) for size, share in places]

    bound_of_share = dict(zip(shares, bounds, strict=True))
    search([0.0, 1.0], shares, measure, lambda size, share: size and bound_of_share[share])
    assert {share for size, share in measured if size} == {0.2} | moved


@pytest.mark.parametrize(
    "settings",
    [
        ("model=qwen3_next_80b",),
        ("model=qwen3_next_80b", "cache.policy=lfu"),
        ("model=llama3_8b", "parallel.replicas=2"),
        ("model=llama3_8b", "storage=memory"),
    ],
)
def test_no_run_hits_more_than_the_bound(settings):
    config = config_of("experiment=sizing", *SMALL[:-1], "cache.device_gib=16", *settings)
    share = None if shared_kind(config) is None else 0.2
    bound = bound_of(config)
    for size in (1.0, 8.0):
        assert 0 < measure(config, (size, share)).hit_rate <= bound(size, share) < 1


@pytest.mark.parametrize(("every_cell", "share"), [(False, 0.4), (True, 0.1)])
def test_a_host_of_size_zero_is_simulated_once_for_all_shares(every_cell, share):
    shares = [0.1, 0.2, 0.4]  # all hit alike
    cells, measured = searched([0.0, 1.0], shares, lambda size, _: size, every_cell=every_cell)
    assert measured.count((0.0, None)) == 1
    assert [each.share for each in cells] == [None, share]


@pytest.mark.parametrize(
    ("rates", "knee"), [([0.1, 0.5, 0.59, 0.6], 4.0), ([0.1, 0.2, 0.3, 0.4], 8.0), ([0.3] * 4, 1.0)]
)
def test_the_knee_is_the_smallest_size_with_95_percent_of_the_gain(rates, knee):
    cells = [cell(size, rate) for size, rate in zip((1.0, 2.0, 4.0, 8.0), rates, strict=True)]
    assert knee_of(cells).host_gib == knee


def test_the_host_share_for_states_is_chosen_for_each_size(capsys):
    main([*SMALL, "model=qwen3_next_80b", "--gib=0,16,64", "--shares=.1,.4", "--all", "--json"])
    cells = json.loads(capsys.readouterr().out)
    assert [each["host_gib"] for each in cells] == [0, 16, 64]
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
def test_a_share_is_searched_only_if_the_host_is_divided_by_layer_kind(model, pools, kind):
    assert shared_kind(config_of(f"model={model}", f"cache.pools={pools}")) == kind


def test_the_table_marks_the_knee_unless_hits_still_rise_and_prices_the_memory(capsys):
    main([*SMALL, "model=llama3_8b", "--gib=0,64,128", "--dollars-per-gib=4"])
    told = capsys.readouterr().out
    assert told.count("← knee") == 1
    assert "512" in told  # dollars for 128 GiB
    assert "for states" not in told
    main([*SMALL, "model=llama3_8b", "--gib=16"])
    told = capsys.readouterr().out
    assert "← knee" not in told
    assert "no knee: hits still rise at 16 GiB" in told
    assert "`hicache run cache.unlimited=true`" in told
    assert [line.split()[0] for line in told.splitlines()[3:5]] == ["0", "16"]


@pytest.mark.parametrize("ttft_s", [None, 1.0])
def test_the_table_reports_overloaded_sizes(capsys, ttft_s):
    cells = [cell(0, 0, ttft_s=None), cell(1, 1, ttft_s=ttft_s)]
    show(config_of("model=llama3_8b"), cells, None)
    assert "overloaded at this size" in capsys.readouterr().out


def test_the_table_shows_what_speculation_costs_at_each_size(capsys):
    told = {"dropped_tokens": 1234567, "draft_cold_tokens": 0, "tokens_per_step": 2.534}
    cells = [Cell(host_gib=8.0, share=None, hit_rate=0.5, ttft_s=1.0, speculation=told)]
    show(config_of("experiment=sizing", "model=llama3_8b"), cells, None)
    shown = capsys.readouterr().out
    assert all(each in shown for each in ("dropped tokens", "1,234,567", "draft cold", "2.53"))


def test_the_result_of_each_size_has_the_completion_times_of_jobs(capsys):
    main([*SMALL, "workload.jobs=true", "model=llama3_8b", "--gib=8", "--json"])
    cells = json.loads(capsys.readouterr().out)
    result = experiment.run(
        config_of(
            *("experiment=sizing", *SMALL[:-1]),
            *("workload.jobs=true", "model=llama3_8b", "cache.host_gib=8"),
        )
    )
    wanted = [result.measures[f"jobs/{key}"] for key in ("completion_s_mean", "in_time_per_hour")]
    assert list(cells[1]["jobs"].values()) == pytest.approx(wanted)
    show(config_of("experiment=sizing", "model=llama3_8b"), [Cell(**cells[1])], None)
    assert "job completion" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        # two KV heads of 256 in bfloat16 and 12 layers are 24 KiB; four devices hold them twice
        (
            ("model=qwen3_next_80b", "parallel.tp=4"),
            ("states, GiB", "as the full KV of 1,572.0 tokens (48.0 KiB each)", "2 copies"),
        ),
        # 16 KV heads of 128: 8 KiB a layer, of which 52 are windows and 10 are not
        (
            ("model=gemma3_27b",),
            ("windows, GiB", "one token of windows takes 416 KiB", "5.2 tokens (80.0 KiB each)"),
        ),
        (("model=llama3_8b", "parallel.replicas=2"), ("each engine has a host of its own",)),
        (
            ("model=llama3_8b", "parallel.prefill=1", "parallel.decode=1"),
            ("host memory is that of each engine, hits are those of prefill engines",),
        ),
    ],
)
def test_the_table_says_what_a_share_holds_and_whose_the_host_is(
    words, wanted, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "160")
    config = config_of("experiment=sizing", *words)
    share = None if shared_kind(config) is None else 0.25
    show(config, [cell(0, 0.1), cell(64, 0.5, share)], None)
    shown = capsys.readouterr().out
    assert [each for each in wanted if each not in shown] == []
    rows = [line.split()[:4] for line in shown.splitlines()]
    assert (["64", "25%", "16", "48"] in rows) == (share is not None)

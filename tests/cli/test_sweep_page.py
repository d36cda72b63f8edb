import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from hicache.cli import report
from hicache.cli.sweep import sum_up
from hicache.cli.tables import sweep_figure
from hicache.cli.tables.groups import find_runs
from hicache.clock import SECOND_NS
from hicache.results import figures
from hicache.results.metrics import summarize
from hicache.results.report import KNOBS
from hicache.results.requests_file import write_requests
from hicache.results.tracking import write_json
from hicache.results.verdict import objections
from tests.conftest import finished_request, row_at

METRICS = ("cache/token_hit_rate", "request/ttft_s_mean")


@pytest.fixture(autouse=True)
def no_figure_is_drawn(monkeypatch):
    """Tests of pages would spend most of their time on the figure beside the page."""
    monkeypatch.setattr(sweep_figure, "draw_sweep", lambda *_, **__: None)
    monkeypatch.setattr(figures, "save", lambda _, path: path.touch())


def write_run(path, measures, *, slower=1.0, seed=0, rho=0.5, overrides=(), **settings):
    """Write a run of 40 requests; their TTFTs are drawn from the seed, times `slower`."""
    path.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    records = [
        finished_request(
            number,
            first_token_ns=number * SECOND_NS + 123 + (prefill_ns := int(slower * ns)),
            finish_ns=(number + 9) * SECOND_NS,
            prefill_ns=prefill_ns,
        )
        for number, ns in enumerate(draw.integers(SECOND_NS // 10, SECOND_NS, 40).tolist())
    ]
    write_requests(path, records)
    summary = summarize(records, measures)
    rhos = dict.fromkeys([key for key in summary if "/rho_" in key], rho)
    write_json(path / "summary.json", {**summary, **rhos, "gpu/seconds_per_request": slower})
    lines = [
        json.dumps(row_at(10.0 * at, computed=90, device_hit=10) | {"interval/token_hit_rate": 0.1})
        for at in range(1, 5)
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    areas = {key.partition(".")[0]: {} for key in KNOBS if "." in key}
    config = {"name": "a sweep", "seed": seed, "metrics": list(METRICS), **areas, **settings}
    OmegaConf.save(OmegaConf.create(config), path / "config.yaml")
    (path / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create(list(overrides)), path / ".hydra" / "overrides.yaml")


def write_arms(path, measures, *, seeds, **slower):
    for name, factor in slower.items():
        for seed in range(seeds):
            run = path / f"{len(list(path.glob('*')))}_{name}"
            write_run(run, measures, slower=factor, seed=seed, cache={"policy": name})


def page_of(path):
    sum_up(path, find_runs(path), title="a sweep")
    return html.unescape((path / "sweep.html").read_text())


def charts_of(page):
    return {
        each["title"]: each for each in json.loads(re.findall(r"\(\"charts\"\), (.*?)\);", page)[0])
    }


def test_a_sentence_per_metric_has_an_interval_and_a_verdict(tmp_path, measures):
    write_arms(tmp_path, measures, seeds=3, lru=1.0, slru=1.1)
    page = page_of(tmp_path)
    found = re.findall(r"<li>(TTFT mean.*?)</li>", page)
    assert len(found) == 1
    interval = r"\[\+\d+\.\d%, \+\d+\.\d%\]"
    told = rf"TTFT mean, s: slru \+10\.0% {interval}, higher, against lru with [\d.]+\."
    assert re.fullmatch(told, found[0])
    assert "<li>token hit rate: slru 0 [0, 0], the same, against lru with 0.700.</li>" in page
    assert page.count("Smallest effects") == 1


@pytest.mark.parametrize(
    ("slru", "told"),
    [
        (0.9, r"slru, -10\.0% \[-\d+\.\d%, -\d+\.\d%\] against lru"),
        (1.1, "lru, as no arm is shown to be faster"),
    ],
)
def test_the_page_recommends_the_fastest_arm_and_says_how_far_to_trust_it(
    tmp_path, measures, slru, told
):
    write_arms(tmp_path, measures, seeds=3, lru=1.0, slru=slru)
    page = page_of(tmp_path)
    assert re.search(f"<li>Recommendation by mean TTFT: {told}. Verdict on the runs: .+</li>", page)


def test_arms_whose_intervals_overlap_with_the_best_are_named(tmp_path, measures):
    write_arms(tmp_path, measures, seeds=3, lru=1.0, slru=0.9, mru=0.9, fifo=0.95)
    found = re.findall(r"<li>(Recommendation .*?)</li>", page_of(tmp_path))
    assert "slru, " in found[0]
    assert "(interval overlaps that of mru)" in found[0]


def test_without_intervals_no_arm_is_recommended(tmp_path, measures):
    write_arms(tmp_path, measures, seeds=2, lru=1.0, slru=0.5)
    assert "Recommendation by mean TTFT: none, as there are no intervals." in page_of(tmp_path)


def test_with_two_seeds_the_page_gives_medians_and_the_number_of_seeds_needed(tmp_path, measures):
    write_arms(tmp_path, measures, seeds=2, lru=1.0, slru=1.1)
    page = page_of(tmp_path)
    assert re.search(
        r"<li>TTFT mean, s: median [^()]+\([^()]+\) \(lru\) to [^()]+\([^()]+\) \(slru\)\.</li>",
        page,
    )
    assert "at least 3 are needed" in page


def test_the_page_shows_the_verdict_once(tmp_path, measures):
    write_arms(tmp_path, measures, seeds=3, lru=1.0, slru=1.1)
    (found, *_) = objections([json.loads((tmp_path / "0_lru" / "summary.json").read_text())])
    assert page_of(tmp_path).count(found.sentence) == 1


def test_arms_that_no_other_beats_are_the_pareto_set(tmp_path, measures):
    write_arms(tmp_path, measures, seeds=1, fast=1.0, slow=2.0)
    chart = next(each for title, each in charts_of(page_of(tmp_path)).items() if "Pareto" in title)
    assert [each["name"] for each in chart["series"]] == ["1 fast", "2 slow", "Pareto set"]
    assert chart["series"][-1]["x"] == [1.0]


def test_each_run_is_a_dot_and_each_arm_a_distribution(tmp_path, measures):
    write_arms(tmp_path, measures, seeds=3, lru=1.0, slru=1.5)
    charts = charts_of(page_of(tmp_path))
    assert [len(each["y"]) for each in charts["TTFT mean, s, a dot per run"]["series"]] == [3, 3]
    fast, slow = (each["y"] for each in charts["TTFT of all requests"]["series"])
    assert fast[-1] == slow[-1] == 1
    assert sum(fast) > sum(slow)


@pytest.mark.parametrize("keys", [("host_gib", "device_gib"), ("host_gib", "policy")])
def test_two_numeric_settings_make_a_heat_map(tmp_path, measures, keys):
    for job, (first, second) in enumerate([(1, 10), (1, 20), (4, 10), (4, 20)]):
        second = second if keys[1] == "device_gib" else f"kind{second}"
        cache = dict(zip(keys, (first, second), strict=True))
        write_run(tmp_path / f"{job}", measures, slower=1 + job, cache=cache)
    page = page_of(tmp_path)
    assert ("cache.host_gib ↓ cache.device_gib →" in page) == (keys[1] == "device_gib")


def test_report_of_a_sweep_links_its_runs(tmp_path, measures, capsys):
    write_arms(tmp_path, measures, seeds=1, lru=1.0)
    report.main([str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "sweep.html")
    assert 'href="0_lru/report.html"' in (tmp_path / "sweep.html").read_text()
    assert "TTFT by prompt length" in (tmp_path / "0_lru" / "report.html").read_text()


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("text", ["5", "{}", "[" * 100_000, '{"time_s": "x"}', '{"time_s": NaN}'])
def test_a_damaged_file_of_a_sweep_is_refused_by_its_path(file, text, tmp_path, measures, capsys):
    write_arms(tmp_path, measures, seeds=1, lru=1.0)
    (tmp_path / "0_lru" / file).write_text(text)
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path)])
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(str(tmp_path / "0_lru" / file))


def test_a_report_without_reasons_of_misses_gives_the_command_to_record_them(tmp_path, measures):
    write_run(tmp_path / "0", measures, overrides=["seed=0", "workload.limit=3"])
    report.main([str(tmp_path / "0")])
    page = (tmp_path / "0" / "report.html").read_text()
    assert "<code>hicache run seed=0 workload.limit=3 engine.explain=true</code>" in page


def test_arms_that_differ_only_in_declined_prefetches_are_called_identical(tmp_path, measures):
    write_arms(tmp_path, measures, seeds=1, lru=1.0, slru=1.0)
    file = tmp_path / "1_slru" / "summary.json"
    write_json(file, json.loads(file.read_text()) | {"prefetch/declined_count": 7})
    assert "lru = slru: identical runs" in page_of(tmp_path)
    write_json(file, json.loads(file.read_text()) | {"transfer/storage_read_bytes": 7})
    assert "identical runs" not in page_of(tmp_path)


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        ({"declined_no_host": 64}, "storage without host"),
        ({"declined_too_short": 64}, "unread storage"),
        ({"declined_too_short": 64, "declined_rate_limited": 128}, None),
        ({"declined_no_host": 64, "started": 1}, None),
    ],
)
def test_a_storage_tier_that_no_request_can_read_is_called_inert(counts, name):
    summary = {"prefetch/declined_count": 9, "prefetch/started_count": counts.pop("started", 0)}
    summary |= {f"prefetch/{key}_tokens": tokens for key, tokens in counts.items()}
    assert [each.name for each in objections([summary])] == ([name] if name else [])


# runs inside a page: reports errors, small text and what is too wide, and hides the first series
PROBE = """<script>
const errors = [], sizes = [];
addEventListener("error", event => errors.push(event.message));
console.error = (...told) => errors.push(told.join(" "));
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (...told) {
  sizes.push(parseFloat(this.font.match(/([\\d.]+)px/)[1]) / devicePixelRatio);
  return fill.apply(this, told);
};
addEventListener("load", () => setTimeout(() => {
  for (const each of document.querySelectorAll("body *:not(script)"))
    if ([...each.childNodes].some(node => node.nodeType == 3 && node.data.trim()))
      sizes.push(parseFloat(getComputedStyle(each).fontSize));
  const root = document.documentElement, canvas = document.querySelector("canvas");
  const wide = [...document.querySelectorAll("body *")].filter(each =>
    !each.closest(".scroll") && each.getBoundingClientRect().right > innerWidth + 1);
  const before = canvas.toDataURL(), over = document.querySelector(".u-over");
  const box = over.getBoundingClientRect();
  over.dispatchEvent(new MouseEvent("mouseenter"));
  over.dispatchEvent(new MouseEvent("mousemove", {clientX: box.x + 90, clientY: box.y + 90}));
  const button = document.querySelector(".legend button");
  setTimeout(() => {
    const value = document.querySelector(".value").textContent;
    button.click();
    setTimeout(() => parent.postMessage({
      page: document.title, width: innerWidth, errors, smallest: Math.min(...sizes), value,
      wide: wide.map(each => each.outerHTML.slice(0, 80)), scroll: root.scrollWidth,
      shown: plots[0].plot.series[1].show, pressed: button.getAttribute("aria-pressed"),
      changed: canvas.toDataURL() != before, charts: plots.length}, "*"), 100);
  }, 100);
}, 300));
</script>"""
FRAMES = """<body><script>
addEventListener("message", ({data}) => document.body.append(JSON.stringify(data) + "\\n"));
</script>%s"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_sweep_and_run_reports_at_two_widths_and_hides_an_arm(tmp_path, measures):
    runs = tmp_path / "sweep"
    write_arms(runs, measures, seeds=3, lru=1.0, slru=1.1, a_policy_with_a_rather_long_name=1.2)
    report.main([str(runs / "0_lru")])
    sum_up(runs, find_runs(runs), title="a sweep")
    pages = [runs / "sweep.html", runs / "0_lru" / "report.html"]
    frames = ""
    for page in pages:
        assert page.stat().st_size < 2e6
        probed = page.with_name("probed.html")
        probed.write_text(page.read_text().replace("<head>", f"<head>{PROBE}", 1))
        for width in (1280, 390):
            source = probed.relative_to(tmp_path)
            frames += f'<iframe src="{source}" width={width} height=900></iframe>'
    (tmp_path / "frames.html").write_text(FRAMES % frames)
    found = dump(tmp_path / "frames.html", home=tmp_path)
    told = [json.loads(line) for line in re.findall(r'\{"page".*\}', found)]
    assert sorted((each["page"], each["width"]) for each in told) == [
        ("0_lru", 390),
        ("0_lru", 1280),
        ("a sweep", 390),
        ("a sweep", 1280),
    ]
    for each in told:
        assert each["errors"] == []
        assert each["smallest"] >= 11
        assert each["wide"] == []
        assert each["scroll"] <= each["width"]
        assert each["value"]
        assert (each["shown"], each["pressed"], each["changed"]) == (False, "false", True)
        assert each["charts"] == (5 if each["page"] == "a sweep" else 4)


def dump(page: Path, home: Path) -> str:
    """Return the HTML of the page after a browser has run its scripts."""
    told = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    told += [f"--user-data-dir={home / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        ["chromium", *told, page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    return html.unescape(done.stdout)

from dataclasses import replace
from pathlib import Path

from experiments.studies.report_figures import QUESTIONS, draw
from hicache.cli.tables.groups import Group, StoredRun

QUESTION = QUESTIONS["prefetch_cut"]


def group(arm: str, host_gib: int, model: str) -> Group:
    """One run that rejected a fifth of its prompt tokens."""
    settings = {"arm": arm, "model": model, "cache.host_gib": host_gib}
    summary = dict.fromkeys(QUESTION.metrics, 1.0)
    summary |= {"request/prompt_tokens": 100, "cache/rejected_tokens": 20}
    run = StoredRun(path=Path(), config={**settings, "seed": 0}, summary=summary)
    return Group(settings=settings, runs=(run,))


def test_a_figure_of_the_reports_tells_the_verdict_under_its_title_and_inside_it():
    groups = [
        group(arm, host_gib, model)
        for arm in QUESTION.arms
        for host_gib in (8, 32)
        for model in ("llama3_8b", "qwen3_next_80b")
    ]
    figure = draw(groups, replace(QUESTION, title="A question"))
    told = figure.get_suptitle().splitlines()
    assert told[1] == "verdict: 20% of the prompt tokens rejected"
    figure.draw_without_rendering()
    title = figure._suptitle.get_window_extent()
    assert title.y1 <= figure.bbox.y1
    assert max(axes.get_tightbbox().y1 for axes in figure.axes) <= title.y0

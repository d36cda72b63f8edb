"""The program that draws hit rate against capacity."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.studies import capacity
from hicache.cli.schema import config_of
from hicache.workload.oracle import Curve


def test_the_curve_rises_to_what_a_cache_without_limit_hits(tmp_path: Path) -> None:
    config = config_of("experiment=capacity", "workload=chat", "workload.num_sessions=20")

    capacity.carry_out(config, tmp_path)

    summary = json.loads((tmp_path / "summary.json").read_text())
    rates = [summary[f"oracle/lru_{gib}_gib_token_hit_rate"] for gib in capacity.CAPACITIES_GIB]
    assert rates == sorted(rates)
    assert rates[-1] == summary["oracle/infinite_token_hit_rate"] > 0
    assert (tmp_path / "capacity.png").stat().st_size > 10_000


def test_checkpoints_cost_hits(tmp_path: Path) -> None:
    config = config_of(
        "experiment=capacity", "workload=chat", "workload.num_sessions=20", "model=qwen3_next_80b"
    )

    capacity.carry_out(config, tmp_path)

    summary = json.loads((tmp_path / "summary.json").read_text())
    bound = summary["oracle/infinite_token_hit_rate"]
    assert 0 < summary["oracle/lru_maximum_token_hit_rate"] < bound


def test_every_line_of_the_figure_says_what_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    curve = Curve(
        capacity_bytes=np.array([0, 2**34]), hit_tokens=np.array([0, 30]), prompt_tokens=100
    )
    found = capacity.Findings(
        curve=curve, bound=0.39, bounds=[0.3] * len(capacity.CAPACITIES_GIB), token_bytes=1e5
    )
    capacity.draw(found, "a trace, a model", tmp_path / "capacity.png", "mooncake_conversation")
    [axes] = figures[0].axes
    texts = {text.get_text() for text in axes.texts}
    assert {"3 M tokens", "50 M tokens"} <= texts
    named = {line.get_label(): (line.get_linestyle(), line.get_color()) for line in axes.lines}
    shown = {name: look for name, look in named.items() if not name.startswith("_")}
    assert len(set(shown.values())) == len(shown) == 5

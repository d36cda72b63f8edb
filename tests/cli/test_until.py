"""`hicache run --until`: seeds are added until the interval of a metric is narrow."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from hicache.cli import run, until
from hicache.results import figures
from tests.forked import forked

SMALL = (
    *("workload=chat", "workload.num_sessions=10", "storage=none", "model=llama3_8b"),
    "workload.limit=24",
    "tracker.wandb_mode=disabled",
)
GRID = "cache.device.tokens.full=40000,200000"


def widths(text: str) -> list[tuple[int, float]]:
    told = re.findall(r"^(\d+) seeds: .* is known to ±([\d.e-]+)", text, re.M)
    return [(int(seeds), float(width)) for seeds, width in told]


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run sweeps in copies of this process, which has imported all of it, and draw no figure."""

    def sweep(command: Sequence[str], *, check: bool) -> CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "hicache", "run"]
        monkeypatch.setattr(sys, "argv", ["hicache run", *command[4:]])
        return CompletedProcess(command, forked(run.main))

    monkeypatch.setattr(until, "subprocess", SimpleNamespace(run=sweep))
    monkeypatch.setattr(figures, "save", lambda figure, path: path.touch())


@pytest.mark.usefixtures("forking")
def test_seeds_are_added_until_the_interval_of_the_metric_is_narrow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric = "request/ttft_s_mean"
    place = f"hydra.sweep.dir={tmp_path}"
    until.main([*SMALL, GRID, place, "--until", "0.001", "--metric", metric, "--most", "4"])
    told = widths(capsys.readouterr().out)
    assert [seeds for seeds, _ in told] == [3, 4]
    assert told[-1][1] == pytest.approx(until.widest(tmp_path, metric), rel=0.06)
    assert len(list(tmp_path.glob("*/summary.json"))) == 8
    # a width that is reached adds no run
    begun = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    until.main([*SMALL, GRID, place, "--until", "1e9", "--metric", metric])
    assert begun == {
        path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--until", "0"], "--until must be above 0"),
        (["--until", "0.1", "--most", "2"], "--most at least 3"),
        (["--until", "0.1", "seed=0,1"], "leave out seed"),
    ],
)
def test_arguments_that_until_cannot_use_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        until.main([*SMALL, *words])
    assert refused.value.code == 2
    assert told in capsys.readouterr().err

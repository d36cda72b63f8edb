import re
import sys

from hicache.cli.progress import JobWatch, progress_bar
from hicache.results.metrics import Progress


def draw_bars(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")


def test_a_title_that_looks_like_markup_is_shown_unchanged(monkeypatch, capsys):
    draw_bars(monkeypatch)
    with progress_bar("x[/b] [red]y") as show:
        show(Progress(done_count=1, total_count=2, time_s=3.0, row=None))
    assert "x[/b] [red]y" in capsys.readouterr().err


def test_one_bar_counts_the_finished_jobs_of_a_sweep(tmp_path, monkeypatch, capsys):
    draw_bars(monkeypatch)

    def end(job: str, file: str = "summary.json") -> None:
        (tmp_path / job).mkdir(exist_ok=True)
        (tmp_path / job / file).write_text("{}")

    end("0_seed=0")
    watch = JobWatch(tmp_path, 4, lambda path: f"results of {path.name}")
    end("1_seed=1")
    end("2_seed=2", "error.txt")
    watch.stop()
    assert watch.left(watch._started_s + 20) == ", 10 s left"  # two jobs took 20 s, one is left
    printed = capsys.readouterr()
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed.err)
    assert re.findall(r"(\d)/4 jobs(, \d+ s left)?", drawn)[0] == ("1", "")
    assert re.findall(r"(\d)/4 jobs(, \d+ s left)?", drawn)[-1] == ("3", ", 0 s left")
    assert [line for line in printed.out.splitlines() if "→" in line] == [
        "1_seed=1 (2 of 4)  →  results of 1_seed=1",
        "0_seed=0 (1 of 4)  →  already finished, and nothing has changed since",
    ]

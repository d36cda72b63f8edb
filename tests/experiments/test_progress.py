import sys

from hicache.cli.progress import ProgressBar
from hicache.results.metrics import Progress


def test_a_title_that_looks_like_markup_is_shown_as_it_stands(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar("x[/b] [red]y") as bar:
        bar.show(Progress(done_count=1, total_count=2, time_s=3.0, row=None))
        assert bar._bar is not None
        bar._bar.refresh()
    assert "x[/b] [red]y" in capsys.readouterr().err

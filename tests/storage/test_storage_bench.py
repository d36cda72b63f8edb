import sys

from hicache.storage import bench


def test_each_engine_is_measured_with_the_requested_number_of_pages(monkeypatch, capsys):
    measured, num_pages = bench._round, []

    def counted(storage, plain, source, target, turn):
        seconds = measured(storage, plain, source, target, turn)
        num_pages.append(len(source))
        return seconds

    monkeypatch.setattr(bench, "_round", counted)
    words = ["--engine", "slab", "file", "memory", "--page-kib", "64", "--mib", "1"]
    monkeypatch.setattr(sys, "argv", ["bench", *words, "--rounds", "1"])
    bench.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:2] for row in rows] == [["slab", "64"], ["file", "64"], ["memory", "64"]]
    assert num_pages == [16] * 6

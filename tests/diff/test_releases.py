import json
from argparse import Namespace
from pathlib import Path

import pytest

from experiments.diff import releases
from experiments.diff.releases import place, table


@pytest.fixture
def options(tmp_path: Path) -> Namespace:
    return Namespace(releases=["1.0", "1.1", "1.2", "1.3"], out=tmp_path, requests=3)


def keep(options: Namespace, release: str, rate: float, hits: list[list[int]]) -> None:
    totals = {"hit/full/device": sum(map(sum, hits)), "moved/full/read": 1 << 30}
    values = {"release": release, "hit_rate": rate, "totals": totals, "hits": hits}
    place(options, "chat", "full", release).write_text(json.dumps(values))


def test_a_change_of_half_a_point_is_marked_and_what_has_not_run_is_said(
    options: Namespace,
) -> None:
    keep(options, "1.0", 0.100, [[1, 0, 0], [2, 0, 0], [3, 0, 0]])
    keep(options, "1.1", 0.104, [[1, 0, 0], [2, 0, 0], [4, 0, 0]])
    keep(options, "1.3", 0.110, [[9, 0, 0], [9, 0, 0], [4, 0, 0]])
    rows = table(options, "chat", "full")[4:]
    assert rows[0].startswith("| 1.0 | 10.00% | 6 | 0 | 0 |")
    assert rows[0].endswith("| – |")
    assert rows[1].startswith("| 1.1 | 10.40% |")
    assert rows[1].endswith("| 1 |")
    assert rows[2].startswith("| 1.2 | not run |")
    assert rows[3].startswith("| 1.3 | **11.00%** (+0.60) |")
    assert rows[3].endswith("| 2 |")


def test_what_was_not_copied_has_no_bytes(options: Namespace) -> None:
    options.releases = ["1.0"]
    keep(options, "1.0", 0.1, [[1, 0, 0]] * 3)
    values = json.loads(place(options, "chat", "full", "1.0").read_text())
    found = releases._row(values, None, {"full": 1 << 30, "mamba": 1 << 40})
    assert found.endswith("| 0.0 GiB | 0.0 GiB | 0.0 GiB | 1,073,741,824.0 GiB | – |")


def test_bytes_are_those_of_the_model(options: Namespace) -> None:
    keep(options, "1.0", 0.1, [[1, 0, 0]] * 3)
    assert "131,072.0 GiB" in table(options, "chat", "full")[4]

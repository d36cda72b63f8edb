"""Hits counted as kvcache-simulator counts them."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from experiments.studies import catalog_hits
from hicache.workload.oracle import infinite, lru_curve, min_hits

# three requests that are not counted, three that are; the last block of each is not full
ROWS = [
    (1100, [1, 2, 3]),
    (600, [7, 8]),
    (1100, [1, 2, 3]),
    (600, [7, 8]),
    (1500, [1, 2, 4]),
    (1100, [1, 2, 3]),
]
COUNTED = 600 + 1500 + 1100


def test_only_the_last_half_is_counted_and_no_block_as_more_than_its_tokens() -> None:
    visits = catalog_hits.literal_visits(ROWS)
    assert visits.prompt_tokens == COUNTED
    assert infinite(visits) == 600 + 1024 + 1100
    curve = lru_curve(visits, page_bytes=1)
    # 1 block: the first of the last request; 4: all first and second ones but 8, which is the
    # fifth from the top; 3 is the sixth
    hits = [round(curve.hit_rate(size) * COUNTED) for size in (1, 4, 5, 6)]
    assert hits == [512, 2560, 2648, 2724]
    assert min_hits(visits, 6) == 2724
    assert min_hits(visits, 3) == 1024 + 1024 + 76


def test_an_id_after_another_prefix_is_another_page() -> None:
    visits = catalog_hits.literal_visits([(1024, [1, 2]), (1024, [3, 2])])
    assert visits.num_pages == 4
    assert infinite(visits) == 0


@pytest.mark.parametrize(("more", "status"), [(0, 0), (1, 1)])
def test_a_difference_is_told(
    more: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    with gzip.open(trace, "wt") as lines:
        for prompt_len, ids in ROWS:
            lines.write(json.dumps({"input_length": prompt_len, "hash_ids": ids}) + "\n")
    results = {"lru": {"hitTokens": 2724 + more}, "optimal": {"hitTokens": 2724}}
    said = {"points": [{"gib": 1, "cacheBlocks": 6, "results": results}]}
    said["ceiling"] = {"hitTokens": 2724}  # type: ignore[assignment]
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["catalog_hits", str(stand_in), str(trace)])
    assert catalog_hits.main() == status

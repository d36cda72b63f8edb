"""Writers that are killed: every page is whole or absent, and no slot stays reserved."""

from pathlib import Path
from random import Random

import pytest
from storage_engines import DISKS, opened
from storage_pages import start_writer

from hicache.storage.contract import PAGE_BYTES, keys, num_whole, write

RUN_PAGES = 4000  # more than a writer can write before it is killed
FULL_PAGES = 16


def survive_kills(kind: str, root: Path, rng: Random, *, times: int, is_full: bool) -> None:
    capacity_bytes = FULL_PAGES * PAGE_BYTES if is_full else None
    capacity_kib = FULL_PAGES * PAGE_BYTES // 1024 if is_full else None
    acknowledged: set[int] = set()
    for turn in range(times):
        first = turn * 40
        with start_writer(kind, str(root), first, RUN_PAGES, capacity_kib=capacity_kib) as writer:
            lines = [writer.stdout.readline() for _ in range(1 + rng.randrange(60))]
            writer.kill()
            lines += writer.stdout.readlines()
        acknowledged.update(map(int, lines[1:]))
        with opened(kind, root, capacity_bytes) as storage:
            num_whole(storage, keys(*range(first + RUN_PAGES)))
            if is_full:
                later = keys(*range(10**6, 10**6 + FULL_PAGES))
                assert all(write(storage, later))
                storage.delete(later)
            else:
                assert all(storage.contains(keys(*acknowledged)))


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.soak)])
def test_killed_writers_leave_pages_whole_or_absent(times, kind, is_full, tmp_path):
    survive_kills(kind, tmp_path, Random(1), times=times, is_full=is_full)

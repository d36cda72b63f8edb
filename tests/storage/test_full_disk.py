"""Full disks and short transfers: no page is lost or wrong, and no draft stays behind."""

import errno
import os
from functools import partial

import pytest
from storage_engines import DISKS, failing, opened
from storage_pages import full_disk, start_writer

from hicache.storage.base import StorageError
from hicache.storage.contract import PAGE_BYTES, keys, num_whole, payload, poisoned, write


@pytest.mark.parametrize(("kind", "file_kib"), [("slab", 64), ("file", 4)])
def test_a_full_disk_declines_pages_and_keeps_earlier_ones(kind, file_kib, tmp_path):
    every = keys(*range(100))
    with start_writer(kind, str(tmp_path), 0, 100, file_kib=file_kib) as writer:
        said = writer.stdout.read().split()
    assert writer.returncode == 0
    stored = [int(word) for word in said if word.isdigit()]
    assert {"refused", "failed"} & set(said)
    with opened(kind, tmp_path) as storage:
        assert num_whole(storage, every) == len(stored)
        assert all(storage.contains(keys(*stored)))
        assert write(storage, every) == [True] * 100
        assert num_whole(storage, every) == 100
    assert list(tmp_path.glob("*/writing/*")) == []


def test_a_file_store_on_a_full_disk_is_opened_and_read(tmp_path):
    few, many = keys(1, 2, 3), keys(*range(1, 9))
    with opened("file", tmp_path, 8 * PAGE_BYTES) as storage:
        assert write(storage, few) == [True] * 3
    with full_disk(), opened("file", tmp_path, 8 * PAGE_BYTES) as storage:
        found = storage.contains(many)
        num_read = num_whole(storage, many)
        written = write(storage, many)
    assert found == written == [True] * 3 + [False] * 5
    assert num_read == 3
    with opened("file", tmp_path, 8 * PAGE_BYTES) as storage:
        assert write(storage, many) == [True] * 8


@pytest.mark.parametrize("name", ["open", "pwritev", "rename"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_failed_write_leaves_no_draft_and_frees_its_room(name, error, tmp_path):
    with opened("file", tmp_path, 2 * PAGE_BYTES) as storage:
        with failing(name, error):
            if error == errno.EIO:
                with pytest.raises(StorageError, match=r"cannot store pages in .*Input/output er"):
                    write(storage, keys(1))
            else:
                assert write(storage, keys(1, 2, 3)) == [False, False, False]
        assert list(tmp_path.glob("*/writing/*")) == []
        assert write(storage, keys(4, 5)) == [True, True]
        assert storage.stats().stored_bytes == 2 * PAGE_BYTES
        assert storage.contains(keys(4, 5)) == [True, True]


def move_at_most(move, most: int, file: int, parts: list[memoryview], offset: int) -> int:
    some = []
    for part in parts:
        some.append(part[:most])
        most -= some[-1].nbytes
    return move(file, some, offset)


@pytest.mark.parametrize(
    ("most", "num_bytes"),
    [(7, 100), (4096, PAGE_BYTES), (PAGE_BYTES - 1, PAGE_BYTES), (PAGE_BYTES + 15, PAGE_BYTES)],
)
@pytest.mark.parametrize("kind", DISKS)
def test_a_short_read_or_write_is_continued(kind, most, num_bytes, tmp_path, monkeypatch):
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partial(move_at_most, getattr(os, name), most))
    pages = [payload(each, num_bytes) for each in keys(1, 2)]
    buffers = [poisoned(num_bytes), poisoned(num_bytes)]
    with opened(kind, tmp_path) as storage:
        assert storage.write(keys(1, 2), pages) == [True, True]
        assert storage.read(keys(1, 2), buffers) == [True, True]
    assert buffers == pages

"""A full disk, and a process that writes pages."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hicache
from hicache.config import StorageConfig
from hicache.storage.base import StorageError
from hicache.storage.contract import PAGE_BYTES, keys, write
from hicache.storage.factory import open_storage


@contextmanager
def full_disk() -> Iterator[None]:
    """Within this context, no file that this process writes can become longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def start_writer(
    kind: str, root: str, first: int, count: int, **more: object
) -> "subprocess.Popen[str]":
    """Start a process that runs `main` with these arguments."""
    told = json.dumps({"kind": kind, "root": root, "first": first, "count": count, **more})
    return subprocess.Popen(
        [sys.executable, __file__, told],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(hicache.__file__).parents[1])},
    )


def main(
    kind: str,
    root: str,
    first: int,
    count: int,
    namespace: str = "test",
    capacity_kib: int | None = None,
    file_kib: int | None = None,
) -> None:
    """Write pages [first, first + count) in batches of 4, and print each number once stored.

    With `file_kib`, no file grows longer than that once the store is open, as on a full disk, and
    pages that were not stored are printed too.
    """
    capacity_gib = None if capacity_kib is None else capacity_kib / 2**20
    config = StorageConfig(kind=kind, root=root, capacity_gib=capacity_gib)
    storage = open_storage(config, namespace=namespace, page_bytes={0: PAGE_BYTES})
    assert storage is not None
    print("open", flush=True)
    if file_kib is not None:
        limit = file_kib * 1024
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for start in range(first, first + count, 4):
        numbers = range(start, start + 4)
        try:
            results = write(storage, keys(*numbers))
        except StorageError:
            print("failed", flush=True)
            continue
        for number, stored in zip(numbers, results, strict=True):
            if stored:
                print(number, flush=True)
            elif file_kib is not None:
                print("refused", flush=True)
    storage.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

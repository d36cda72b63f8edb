"""Measures how fast storage engines move pages: python -m hicache.storage.bench.

The reference is a plain file that is written and read in order, one page per call. The engine and
the file take turns with the same buffers, and each ratio is a median over these rounds. On a shared
machine absolute speeds drift, and ratios much less. Reads come from the operating system's page
cache.
"""

import argparse
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from hicache.config import StorageConfig
from hicache.storage.base import KEY_BYTES, Storage
from hicache.storage.factory import open_storage

BATCH_PAGES = StorageConfig().batch_pages
LOCAL = ("slab", "file", "memory")
SERVERS = ("redis", "mooncake")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hicache.storage.bench", description=__doc__)
    parser.add_argument("--engine", nargs="+", choices=(*LOCAL, *SERVERS))
    parser.add_argument("--page-kib", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--mib", type=int, default=256, help="MiB written and read per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, help="directory on the disk to measure")
    parser.add_argument("--redis", help="URL of the Redis server")
    parser.add_argument("--mooncake", help="HOST:PORT of the Mooncake master")
    options = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(
        f"Rates in GB/s, and as a share of plain file I/O: {options.mib} MiB in batches of "
        f"{BATCH_PAGES} pages, median of {options.rounds} rounds, read from the OS page cache"
    )
    print("engine       KiB | plain write  read | write  ratio | read   ratio")
    engines = options.engine or [*LOCAL, *(name for name in SERVERS if getattr(options, name))]
    for name, page_kib in product(engines, options.page_kib):
        rates = _measure(name, page_kib * 1024, options) / 1e9
        plain_write, plain_read, write, read = np.median(rates, axis=0)
        write_ratio, read_ratio = np.median(rates[:, 2:] / rates[:, :2], axis=0)
        print(
            f"{name:12} {page_kib:4} | {plain_write:11.2f} {plain_read:5.2f} |"
            f" {write:5.2f}  {write_ratio:5.2f} | {read:5.2f}  {read_ratio:5.2f}"
        )


def _measure(name: str, page_bytes: int, options: argparse.Namespace) -> NDArray[np.float64]:
    """Return [rounds, 4] rates in bytes/s: write and read of a plain file, then of the engine."""
    num_pages = max(options.mib * 2**20 // page_bytes, 1)
    source, target = _pages(num_pages, page_bytes), _pages(num_pages, page_bytes)
    rng = Random(0)
    for page in source:
        page[:] = rng.randbytes(page_bytes)  # all pages differ
    with tempfile.TemporaryDirectory(dir=options.root) as directory:
        root = getattr(options, name, None) or directory
        config = StorageConfig(kind=name, root=root)
        storage = open_storage(config, namespace="bench", page_bytes=None)
        assert storage is not None
        plain = Path(directory) / "plain"
        with closing(storage):
            # the first round touches memory and files for the first time
            seconds = [
                _round(storage, plain, source, target, turn) for turn in range(options.rounds + 1)
            ][1:]
    rates: NDArray[np.float64] = num_pages * page_bytes / np.array(seconds)
    return rates


def _round(
    storage: Storage, plain: Path, source: list[memoryview], target: list[memoryview], turn: int
) -> list[float]:
    keys = [
        (turn << 64 | index).to_bytes(KEY_BYTES - 1, "little") + b"\0"
        for index in range(len(source))
    ]

    def move(call: Callable[..., list[bool]], pages: list[memoryview]) -> None:
        for first in range(0, len(keys), BATCH_PAGES):
            batch = slice(first, first + BATCH_PAGES)
            assert all(call(keys[batch], pages[batch])), "the engine is full or has lost a page"

    file = os.open(plain, os.O_RDWR | os.O_CREAT)
    try:
        seconds = [
            _seconds(lambda: _move_plain(os.pwritev, file, source)),
            _seconds(lambda: move(storage.write, source)),
            _seconds(lambda: _move_plain(os.preadv, file, target)),
            _seconds(lambda: move(storage.read, target)),
        ]
        assert target == source, f"wrong bytes in round {turn}"
    finally:
        os.close(file)
        plain.unlink()
        storage.delete(keys)
    return [seconds[0], seconds[2], seconds[1], seconds[3]]


def _pages(num_pages: int, page_bytes: int) -> list[memoryview]:
    arena = memoryview(mmap.mmap(-1, num_pages * page_bytes))
    return [arena[i * page_bytes : (i + 1) * page_bytes] for i in range(num_pages)]


def _move_plain(
    move: Callable[[int, list[memoryview], int], int], file: int, pages: list[memoryview]
) -> None:
    for index, page in enumerate(pages):
        assert move(file, [page], index * page.nbytes) == page.nbytes, "a short read or write"


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

"""Measures how fast storage engines move pages: python -m hicache.storage.bench.

The reference is a plain file that is written and read in order, one page per call. The engine and
the file take turns with the same buffers, and each ratio is a median over these rounds. On a shared
machine absolute speeds drift, and ratios much less. Reads come from the operating system's page
cache.
"""

import argparse
import itertools
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from hicache.config import StorageConfig
from hicache.storage.base import KEY_BYTES, Storage
from hicache.storage.engines.mooncake import MooncakeStorage
from hicache.storage.factory import open_storage

LOCAL = ("slab", "file", "memory")


class Speed(NamedTuple):
    plain_write: float
    plain_read: float
    write: float
    read: float


def main() -> None:
    options = _parser().parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(
        f"Rates in GB/s, and as a share of plain file I/O: {options.mib} MiB in batches of "
        f"{options.batch} pages, median of {options.rounds} rounds, read from the OS page cache"
    )
    print("engine       KiB | plain write  read | write  ratio | read   ratio")
    servers = [name for name in ("redis", "mooncake") if getattr(options, name)]
    for name, page_kib in itertools.product(options.engine or [*LOCAL, *servers], options.page_kib):
        speeds = _measure(name, page_kib * 1024, options)
        gb = Speed(*(median(column) / 1e9 for column in zip(*speeds, strict=True)))
        write_ratio = median(speed.write / speed.plain_write for speed in speeds)
        read_ratio = median(speed.read / speed.plain_read for speed in speeds)
        print(
            f"{name:12} {page_kib:4} | {gb.plain_write:11.2f} {gb.plain_read:5.2f} |"
            f" {gb.write:5.2f}  {write_ratio:5.2f} | {gb.read:5.2f}  {read_ratio:5.2f}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hicache.storage.bench", description=__doc__)
    parser.add_argument("--engine", nargs="+", choices=(*LOCAL, "redis", "mooncake"))
    parser.add_argument("--page-kib", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--mib", type=int, default=256, help="MiB written and read per round")
    parser.add_argument(
        "--batch", type=int, default=StorageConfig().batch_pages, help="pages per call"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, help="directory on the disk to measure")
    parser.add_argument("--redis", help="URL of the Redis server")
    parser.add_argument("--mooncake", help="HOST:PORT of the Mooncake master")
    return parser


def _measure(name: str, page_bytes: int, options: argparse.Namespace) -> list[Speed]:
    num_pages = max(options.mib * 2**20 // page_bytes, 1)
    source, target = _pages(num_pages, page_bytes), _pages(num_pages, page_bytes)
    rng = Random(0)
    for page in source:
        page[:] = rng.randbytes(page_bytes)  # all pages differ
    speeds = []
    with tempfile.TemporaryDirectory(dir=options.root) as directory:
        root = Path(directory)
        with closing(_open(name, root, options)) as storage:
            for turn in range(options.rounds + 1):
                speed = _round(storage, root, source, target, turn=turn, options=options)
                if turn:  # the first turn touches memory and files for the first time
                    speeds.append(speed)
    return speeds


def _open(name: str, root: Path, options: argparse.Namespace) -> Storage:
    if name == "mooncake":
        return MooncakeStorage(options.mooncake, namespace="bench", deadline_s=30.0)
    config = StorageConfig(kind=name, root=options.redis if name == "redis" else str(root))
    storage = open_storage(config, namespace="bench", page_bytes=None)
    assert storage is not None
    return storage


def _round(
    storage: Storage,
    root: Path,
    source: list[memoryview],
    target: list[memoryview],
    *,
    turn: int,
    options: argparse.Namespace,
) -> Speed:
    num_bytes = sum(page.nbytes for page in source)
    keys = [
        (turn << 64 | index).to_bytes(KEY_BYTES - 1, "little") + b"\0"
        for index in range(len(source))
    ]
    batches = [slice(i, i + options.batch) for i in range(0, len(keys), options.batch)]

    def write() -> None:
        for batch in batches:
            assert all(storage.write(keys[batch], source[batch])), "the engine is full"

    def read() -> None:
        for batch in batches:
            assert all(storage.read(keys[batch], target[batch])), "a page is missing"

    plain = root / "plain"
    file = os.open(plain, os.O_RDWR | os.O_CREAT)
    try:
        plain_write = _seconds(lambda: _move_plain(os.pwritev, file, source))
        own_write = _seconds(write)
        plain_read = _seconds(lambda: _move_plain(os.preadv, file, target))
        own_read = _seconds(read)
        assert target == source, f"wrong bytes in round {turn}"
    finally:
        os.close(file)
        plain.unlink()
        storage.delete(keys)
    return Speed(*(num_bytes / took for took in (plain_write, plain_read, own_write, own_read)))


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

"""Stores results that take long to compute in the user's cache folder, for later runs.

Each file carries a digest of its contents and is renamed into place, so two writers can only store
the same contents. Damaged files are computed again, and an unwritable folder is ignored. When there
are too many files, the oldest are removed. (joblib.Memory would not detect damage.)
"""

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

import numpy as np
from platformdirs import user_cache_path
from xxhash import xxh3_128, xxh3_128_digest

from hicache import request

Made = TypeVar("Made")
DIGEST_BYTES = 16
FILES_KEPT = 64


def kept(make: Callable[[], Made], *made_of: bytes) -> Made:
    """Return the result of `make`, or read it from the user's cache folder.

    `made_of` holds all data that determines the result. A copy in the folder is used only if that
    data and the source code of this package have not changed. A new result is stored in the folder.
    """
    folder = user_cache_path("hicache") / "made"
    modules = [Path(request.__file__), *sorted(Path(__file__).parent.glob("*.py"))]
    sources = [file.read_bytes() for file in modules]
    hasher = xxh3_128(np.__version__.encode())
    for part in (*sources, *made_of):
        hasher.update(f"{len(part)}\n".encode())
        hasher.update(part)
    file = folder / f"{hasher.hexdigest()}.kept"
    with suppress(OSError):
        written = memoryview(file.read_bytes() if file.is_file() else b"")
        if xxh3_128_digest(written[DIGEST_BYTES:]) == written[:DIGEST_BYTES]:
            os.utime(file)
            with no_collection():  # the collector would search every new object several times
                found: Made = pickle.loads(written[DIGEST_BYTES:])
            return found
    made = make()
    with suppress(OSError):
        _write(file, pickle.dumps(made))
        _forget_oldest(folder)
    return made


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch off Python's garbage collector inside a `with` block."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _write(file: Path, packed: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, suffix=".new", delete=False) as scratch:
        unfinished = Path(scratch.name)
    try:
        unfinished.write_bytes(xxh3_128_digest(packed) + packed)
        unfinished.replace(file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _forget_oldest(folder: Path) -> None:
    # includes the leftovers of killed writers
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    for file in files[:-FILES_KEPT]:
        file.unlink(missing_ok=True)

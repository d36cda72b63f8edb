"""Arrays that take long to make, kept in the user's cache folder from one run to the next.

A file carries a digest of itself and is put in place whole, so that of two writers the last one
wins, with the same. One that is damaged is made again, and a folder that cannot be written is done
without. The oldest files go when there are too many. joblib.Memory would
notice no damage.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from numpy.typing import NDArray
from pooch.utils import os_cache
from xxhash import xxh3_128, xxh3_128_digest

Arrays = dict[str, NDArray[np.generic]]
DIGEST_BYTES = 16
FILES_KEPT = 64


def kept(make: Callable[[], Arrays], *made_of: bytes) -> Arrays:
    """What `make` gives, made once for all that it depends on besides the code of this room."""
    folder = Path(os_cache("hicache")) / "made"
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    hasher = xxh3_128(np.__version__.encode())
    for part in (*sources, *made_of):
        hasher.update(f"{len(part)}\n".encode())
        hasher.update(part)
    file = folder / f"{hasher.hexdigest()}.kept"
    with suppress(OSError):
        written = memoryview(file.read_bytes() if file.is_file() else b"")
        if xxh3_128_digest(written[DIGEST_BYTES:]) == written[:DIGEST_BYTES]:
            os.utime(file)
            with np.load(BytesIO(written[DIGEST_BYTES:])) as arrays:
                return dict(arrays)
    made = make()
    with suppress(OSError):
        _write(file, made)
        _forget_oldest(folder)
    return made


def _write(file: Path, arrays: Arrays) -> None:
    packed = BytesIO()
    np.savez(packed, **arrays)  # type: ignore[arg-type]  # mypy takes a name for an option
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, suffix=".new", delete=False) as scratch:
        unfinished = Path(scratch.name)
    try:
        unfinished.write_bytes(xxh3_128_digest(packed.getbuffer()) + packed.getbuffer())
        unfinished.replace(file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _forget_oldest(folder: Path) -> None:
    # what a killed writer left is among the files
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    for file in files[:-FILES_KEPT]:
        file.unlink(missing_ok=True)

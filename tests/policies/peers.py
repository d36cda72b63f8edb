"""Misses that libCacheSim counts on the streams, kept in peers.json.

PYTHON -m tests.policies.peers > tests/policies/peers.json

PYTHON is one of an environment with libcachesim 0.3.5 (`pip install libcachesim`).
"""

import json
import sys

from tests.policies.streams import CAPACITY, STREAMS

NAMES = ("LRU", "FIFO", "LFU", "SLRU", "ARC", "S3FIFO", "GDSF")


def main() -> None:
    import libcachesim

    found: dict[str, dict[str, int]] = {}
    for stream, make in STREAMS.items():
        found[stream] = {}
        for name in NAMES:
            cache = getattr(libcachesim, name)(cache_size=CAPACITY)
            misses = 0
            for number, page in enumerate(make()):
                request = libcachesim.Request()
                request.obj_id, request.obj_size, request.clock_time = page, 1, number
                misses += not cache.get(request)
            found[stream][name] = misses
    package = f"libcachesim {libcachesim.__version__}"
    json.dump({"package": package, "misses": found}, sys.stdout, indent=2)


if __name__ == "__main__":
    main()

"""Policies of the literature miss as often as their originals do."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.policies.eviction import Fifo, Lfu
from hicache.policies.stock import STOCK
from tests.policies.single import misses_of
from tests.policies.streams import CAPACITY, STREAMS

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())
WORLD = SimpleNamespace(
    capacity={"device": {"full": CAPACITY}, "host": {"full": 0}}, seed=0, page_size=4
)
WORLD.flops = lambda start, end: float(end - start)
WORLD.unit_bytes = {"device": {"full": 1}}
OURS = {
    "LRU": lambda: None,
    "FIFO": Fifo,
    "LFU": Lfu,
    "SLRU": lambda: STOCK["slru"](WORLD),
    "ARC": lambda: STOCK["arc"](WORLD),
    "S3FIFO": lambda: STOCK["s3fifo"](WORLD),
    "GDSF": lambda: STOCK["gdsf"](WORLD),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", OURS)
def test_misses_are_those_of_libcachesim(name: str, stream: str) -> None:
    accesses, expected = STREAMS[stream](), PEERS["misses"][stream][name]
    if name == "GDSF":  # libCacheSim inserts before it evicts, which a cache of KV cannot
        assert gdsf_misses(accesses, inserts_first=True) == expected
        expected = gdsf_misses(accesses, inserts_first=False)
    assert misses_of(accesses, CAPACITY, OURS[name]()) == expected


def gdsf_misses(accesses: list[int], *, inserts_first: bool) -> int:
    """Misses of GDSF with pages of equal size and cost, by search of the lowest value."""
    floor = misses = 0
    held: dict[int, tuple[int, int, int]] = {}  # page: value, last access, accesses
    for now, page in enumerate(accesses):
        uses = 1 + held.get(page, (0, 0, 0))[2]
        misses += page not in held
        if page in held or inserts_first:
            held[page] = (floor + uses, now, uses)
        if len(held) + (page not in held) > CAPACITY:
            victim = min(held, key=lambda each: held[each])
            floor = held.pop(victim)[0]
        if not inserts_first:
            held[page] = (floor + uses, now, uses)
    return misses

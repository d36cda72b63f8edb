"""Stores of a simulated run compared with each other, and the bytes of keys in a real store."""

from random import Random

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tree.keys import Key, key_bytes, keys, kinds_of
from hicache.executor.simulated.stores import EndlessStore, StandIns
from hicache.storage.base import KEY_BYTES
from hicache.storage.engines.memory import MemoryStorage

KINDS = (FULL, SWA, MAMBA)
NAMES = {"numbers": [8 * page for page in range(9)], "digests": [bytes([9]) * 16, bytes([1]) * 16]}


def test_an_endless_store_answers_like_a_storage_engine_of_stand_ins() -> None:
    rng = Random(5)
    plain, engine = EndlessStore(), StandIns(MemoryStorage(capacity_bytes=None))
    for _ in range(300):
        some: list[Key] = [
            8 * rng.randrange(10) + rng.choice(KINDS) for _ in range(rng.randint(0, 6))
        ]
        what = rng.choice(["contains", "read", "write", "delete"])
        assert getattr(plain, what)(some) == getattr(engine, what)(some)


def test_a_stand_in_store_counts_pages_that_found_no_room() -> None:
    assert StandIns(MemoryStorage(capacity_bytes=KEY_BYTES - 1)).write([8, 16]) == 2


def test_a_changed_stand_in_page_is_not_read() -> None:
    storage = MemoryStorage(capacity_bytes=None)
    storage.write(key_bytes([8, 16]), [memoryview(each) for each in key_bytes([8, 24])])
    assert StandIns(storage).read([8, 16]) == 1


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_a_key_names_its_page_and_its_kind(names: list[Key]) -> None:
    of = {kind: list(keys(names, kind)) for kind in KINDS}
    assert [set(kinds_of(of[kind])) for kind in KINDS] == [{FULL}, {SWA}, {MAMBA}]
    in_bytes = [each for kind in KINDS for each in key_bytes(of[kind])]
    assert {len(each) for each in in_bytes} == {KEY_BYTES}
    assert len(set(in_bytes)) == 3 * len(names)
    assert [each[-1:] for each in in_bytes] == [t for t in (b"f", b"s", b"m") for _ in names]

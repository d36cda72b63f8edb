"""What a cache counts while pages move between its tiers, step by step."""

from collections import Counter

from hicache.cache.kinds import FULL
from hicache.cache.tiers.transfer import BackUp, StorageWrite
from hicache.cache.tree.node import DEVICE
from hicache.observe import invariants
from tests.cache.small import make_cache


class Ledger:
    """A cache with three small tiers, and its counters since the last step.

    A page has 1 byte, a window page 10 and a state 100, so that a sum of bytes tells how many of
    each there are. At most 146 bytes wait to be written.
    """

    def __init__(self) -> None:
        self.cache = make_cache(
            device=(8, 8, 4),
            host=(6, 4, 1),
            window_len=8,
            has_states=True,
            page_bytes=(1, 10, 100),
            storage_queue_bytes=146,
        )
        self._before: Counter[str] = Counter()

    def new(self, sort: str = "") -> dict[str, int]:
        """Counts since the last call, by name: those that begin with `sort`, named without it."""
        now = Counter(self.cache.counters)
        new, self._before = now - self._before, now
        return {name.removeprefix(sort).removesuffix("_pages"): n for name, n in new.items()}

    def serve(self, num_tokens: int, first: int = 0) -> dict[str, int]:
        self.cache.serve(num_tokens, first)
        return self.new("evict/")

    def complete(self, sort: type) -> tuple[dict[str, int], int]:
        """End all copies of class `sort`; return the new counts and the bytes to be written."""
        for work in [each for each in self.cache.in_flight if isinstance(each, sort)]:
            self.cache.complete(work)
        return self.new("storage/"), self.cache.queued_write_bytes


def test_every_page_that_moves_down_the_tiers_or_is_evicted_is_counted():
    ledger = Ledger()
    # 4 pages, a window of 2, a state
    assert ledger.serve(16) == {"transfer/back_up_bytes": 124}
    assert ledger.complete(BackUp) == ({"queued_write": 7}, 124)
    # 2 pages, 2 of a window; its state finds no room
    assert ledger.serve(8, 100) == {"transfer/back_up_bytes": 22, "back_up/dropped_mamba": 1}
    assert ledger.complete(BackUp) == ({"queued_write": 4}, 146)
    # its pages find no room, nor what belongs to them
    assert ledger.serve(8, 200) == {"back_up/dropped_full": 2}
    assert ledger.complete(StorageWrite) == ({}, 0)
    # the first prompt leaves the device, from its end
    assert ledger.serve(8, 300) == {
        "device_full": 2,
        "device_swa": 2,
        "device_mamba": 1,
        "host_full": 2,
        "host_swa": 2,
        "host_mamba": 1,
        "transfer/back_up_bytes": 122,
    }
    assert ledger.complete(BackUp) == ({"queued_write": 5}, 122)
    # the only state on the host stays, because it is being written
    assert ledger.serve(16, 400) == {
        "device_full": 4,
        "device_swa": 4,
        "device_mamba": 1,
        "host_full": 4,
        "host_swa": 2,
        "transfer/back_up_bytes": 24,
        "back_up/dropped_mamba": 1,
    }
    assert ledger.complete(BackUp)[0] == {"queued_write": 6}
    ledger.complete(StorageWrite)
    ledger.cache.evict_all(DEVICE, FULL)
    assert ledger.new("evict/") == {"device_full": 8, "device_swa": 8, "device_mamba": 3}
    sequence, acquired = ledger.cache.begin(9, 300)
    assert (acquired.cached_len, acquired.host_len) == (8, 8)
    assert ledger.new() == {"transfer/load_back_bytes": 122}
    ledger.cache.abandon(sequence)
    ledger.cache.complete_all()
    invariants.check_drained(ledger.cache, None)

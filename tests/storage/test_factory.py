"""Which engine and guards a configuration opens, and which configurations are refused."""

from contextlib import closing
from threading import Event
from unittest.mock import Mock

import pytest
from storage_engines import DISKS
from storage_pages import full_disk

from hicache.clock import SimulatedClock, to_ns
from hicache.config import FaultsConfig, StorageConfig
from hicache.storage.base import Storage, StorageError
from hicache.storage.contract import PAGE_BYTES, keys, payload, read, write
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.factory import (
    GuardedStorage,
    open_guarded_storage,
    open_simulated_storage,
    open_storage,
)

FAULTY = FaultsConfig(missing_rate=0.5)
THREE_PAGES_GIB = 3 * PAGE_BYTES / 2**30


def plain(config: StorageConfig, namespace: str = "test") -> Storage:
    storage = open_storage(config, namespace=namespace, page_bytes={0: PAGE_BYTES})
    assert storage is not None
    return storage


def guarded(config: StorageConfig, **options: int) -> GuardedStorage:
    """The engine and its guards as a real run opens them."""
    storage = open_guarded_storage(
        config, namespace="test", page_bytes={0: PAGE_BYTES}, clock=SimulatedClock(), **options
    )
    assert storage is not None
    return storage


def simulated(config: StorageConfig, seed: int = 0, **options: SimulatedClock) -> GuardedStorage:
    options = {"clock": SimulatedClock()} | options
    storage = open_simulated_storage(
        config, namespace="test", page_bytes={0: PAGE_BYTES}, seed=seed, **options
    )
    assert storage is not None
    return storage


def layers(storage: object) -> list[str]:
    """The classes that a call passes, from the outermost to the engine."""
    inner = getattr(storage, "_inner", None)
    return [type(storage).__name__, *([] if inner is None else layers(inner))]


def counted(storage: GuardedStorage) -> dict[str, int]:
    return {
        name.removeprefix("storage/"): count for name, count in storage.counts().items() if count
    }


class Own(MemoryStorage):
    """A user's engine. With the root `stuck`, lookups wait for `go`."""

    go = Event()

    def __init__(self, root, *, namespace, capacity_bytes, page_bytes):
        super().__init__(capacity_bytes=capacity_bytes, page_bytes=page_bytes)
        self.given = root, namespace

    def contains(self, page_keys):
        if self.given[0] == "stuck":
            self.go.wait(60)
        return super().contains(page_keys)


class Unfinished:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def contains(self, keys: list[bytes]) -> list[bool]:
        return [False for _ in keys]


class Unbuildable:
    pass


OWN = StorageConfig(kind=f"{__name__}:Own", root="anything", capacity_gib=THREE_PAGES_GIB)


def test_kind_none_opens_nothing():
    options = {"namespace": "test", "page_bytes": {}}
    none, clock = StorageConfig(kind="none"), SimulatedClock()
    assert open_storage(none, **options) is None
    assert open_guarded_storage(none, clock=clock, **options) is None
    assert open_simulated_storage(none, clock=clock, seed=0, **options) is None


@pytest.mark.parametrize("kind", ["memory", OWN.kind])
def test_engines_in_memory_count_the_nominal_size_of_placeholders(kind):
    storage = plain(StorageConfig(kind=kind, capacity_gib=THREE_PAGES_GIB))
    storage.write(keys(1, 2, 3, 4), [memoryview(b"")] * 4)
    assert storage.contains(keys(1, 2, 3, 4)) == [False, True, True, True]


@pytest.mark.parametrize("kind", DISKS)
def test_disk_engines_create_their_directory_and_stay_within_the_capacity(kind, tmp_path):
    root = tmp_path / "new" / "root"
    config = StorageConfig(kind=kind, root=str(root), capacity_gib=THREE_PAGES_GIB)
    with closing(plain(config)) as storage:
        for number in range(5):
            write(storage, keys(number))
        assert storage.stats().stored_bytes == 3 * PAGE_BYTES
        assert read(storage, keys(1, 4)) == [None, payload(keys(4)[0])]


def test_a_users_engine_is_given_root_and_namespace():
    assert plain(OWN, namespace="mine").given == ("anything", "mine")
    names = {simulated(OWN).engine.given[1] for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("test-") for name in names)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("no_module:Own", "cannot be loaded: .*No module named 'no_module'"),
        (f"{__name__}:Nobody", "cannot be loaded: .*no attribute 'Nobody'"),
        ("math:pi", r"must be a class or a function, got 3\.14"),
        (f"{__name__}:Unfinished", "lacks read, write, delete, stats, close"),
        (f"{__name__}:Unbuildable", r"cannot be built: .*Unbuildable\(\) takes no arguments"),
        *((kind, "needs storage.root") for kind in ("slab", "file", "redis", "mooncake")),
    ],
)
def test_a_kind_that_cannot_be_opened_is_refused(kind, told):
    with pytest.raises(ValueError, match=f"storage.kind={kind} {told}"):
        plain(StorageConfig(kind=kind))


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"one of none, memory, mooncake_master, .*, got 'tape'"):
        plain(StorageConfig(kind="tape"))


def test_redis_with_a_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity_gib must be None for redis"):
        plain(StorageConfig(kind="redis", root="redis://127.0.0.1:1/0", capacity_gib=1.0))


@pytest.mark.parametrize("kind", DISKS)
def test_a_root_that_is_a_file_is_refused_with_its_path(kind, tmp_path):
    root = tmp_path / "root"
    root.write_text("a file, not a directory")
    with pytest.raises(StorageError, match=str(root)):
        plain(StorageConfig(kind=kind, root=str(root)))


@pytest.mark.parametrize(("capacity_gib", "segment_bytes"), [(None, 0), (0.5, 2**29)])
def test_mooncake_is_opened_with_its_master_and_the_capacity_as_its_segment_size(
    capacity_gib, segment_bytes, monkeypatch
):
    made = Mock()
    monkeypatch.setattr("hicache.storage.factory.MooncakeStorage", made)
    assert plain(StorageConfig(kind="mooncake", root="host:1", capacity_gib=capacity_gib))
    made.assert_called_once_with("host:1", namespace="test", segment_bytes=segment_bytes)


@pytest.mark.parametrize(
    ("kind", "faults", "between"),
    [
        ("memory", FaultsConfig(), []),
        ("memory", FaultsConfig(gone_from_s=1.0), ["DeadlineStorage", "FaultyStorage"]),
        ("slab", FaultsConfig(), ["DeadlineStorage"]),
        ("file", FaultsConfig(corrupt_rate=0.5), ["DeadlineStorage", "FaultyStorage"]),
        (OWN.kind, FaultsConfig(), ["OwnStorage", "DeadlineStorage"]),
    ],
)
def test_a_real_run_opens_its_engine_behind_the_guards_it_needs(kind, faults, between, tmp_path):
    storage = guarded(StorageConfig(kind=kind, root=str(tmp_path), faults=faults))
    engine = type(storage.engine).__name__
    assert layers(storage.storage) == ["BreakerStorage", *between, engine]
    assert (storage.faulty is not None) == (not faults.is_harmless)
    storage.storage.close()


@pytest.mark.parametrize(("faults", "between"), [(FaultsConfig(), []), (FAULTY, ["FaultyStorage"])])
def test_a_simulation_has_no_deadline_threads(faults, between):
    storage = simulated(StorageConfig(kind="memory", faults=faults))
    assert layers(storage.storage) == ["BreakerStorage", *between, "MemoryStorage"]
    injected = [name for name in storage.counts() if "injected" in name]
    assert len(storage.counts()) == 3 + len(injected)
    assert bool(injected) == bool(between)


def test_counts_of_failures_and_damage_remain_after_close(tmp_path):
    storage = guarded(
        StorageConfig(kind="file", root=str(tmp_path), faults=FaultsConfig(missing_rate=1.0))
    )
    write(storage.storage, keys(1, 2))
    (first, _) = sorted(tmp_path.glob("*/*/*.page"))
    first.write_bytes(b"cut short")
    read(storage.storage, keys(1, 2))
    (directory,) = tmp_path.iterdir()
    away = directory.rename(tmp_path / "elsewhere")
    assert [read(storage.storage, keys(2)) for _ in range(5)] == [[None]] * 5
    away.rename(directory)
    storage.storage.close()
    assert counted(storage) == {
        "failed_count": 3,
        "bypassed_count": 2,
        "damaged_pages": 1,
        "injected_missing_count": 1,
    }


def test_a_call_of_a_real_run_is_abandoned_at_its_deadline():
    storage = guarded(StorageConfig(kind=OWN.kind, root="stuck", deadline_s=0.01))
    assert storage.storage.contains(keys(1)) == [False]
    assert counted(storage) == {"failed_count": 1}
    Own.go.set()


@pytest.mark.parametrize("open_with", [guarded, simulated])
def test_the_seed_decides_the_faults(open_with):
    def missing(**seed: int) -> list[bool]:
        storage = open_with(StorageConfig(kind="memory", faults=FAULTY), **seed).storage
        write(storage, keys(*range(100)))
        return [page is None for page in read(storage, keys(*range(100)))]

    assert missing() == missing(seed=0) == missing(seed=0) != missing(seed=1)


def test_injected_delays_of_a_simulation_are_charged_to_its_stall():
    faults = FaultsConfig(delay_ms=100.0, full_rate=1.0)
    storage = simulated(StorageConfig(kind="memory", faults=faults, deadline_s=0.2))
    assert write(storage.storage, keys(1)) == [False]
    assert storage.stall.take() == to_ns(0.1)
    assert counted(storage) == {"injected_delay_count": 1, "injected_full_count": 1}


def test_a_simulated_call_fails_at_its_deadline_and_then_bypasses_the_engine():
    clock, slow = SimulatedClock(), FaultsConfig(delay_ms=100.0)
    config = StorageConfig(kind="memory", faults=slow, deadline_s=0.05)
    storage = simulated(config, clock=clock)
    for _ in range(5):
        write(storage.storage, keys(1))
    assert storage.stall.take() == 3 * to_ns(0.05)
    clock.wait_until(to_ns(5.0))
    write(storage.storage, keys(1))
    assert (storage.storage.failed_calls, storage.storage.bypassed_calls) == (4, 2)


@pytest.mark.parametrize("kind", DISKS)
def test_each_simulation_has_a_directory_of_its_own_and_removes_it(kind, tmp_path):
    root = tmp_path / "new" / "root"
    one, other = (simulated(StorageConfig(kind=kind, root=str(root))) for _ in range(2))
    write(one.storage, keys(1))
    assert (one.storage.contains(keys(1)), other.storage.contains(keys(1))) == ([True], [False])
    for each in (one, other):
        each.forget()
    assert list(root.iterdir()) == []


def test_a_simulation_whose_engine_cannot_be_opened_leaves_no_files(tmp_path):
    with full_disk(), pytest.raises(StorageError, match="disk I/O error"):
        simulated(StorageConfig(kind="slab", root=str(tmp_path / "root")))
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("fails", [False, True])
def test_each_simulation_has_a_namespace_of_its_own_on_a_server_and_deletes_it(fails, redis_url):
    def fail() -> None:
        raise StorageError("gone")

    config = StorageConfig(kind="redis", root=redis_url)
    one, other = simulated(config), simulated(config)
    before = one.engine.stats().stored_pages
    write(one.storage, keys(1, 2))
    assert other.storage.contains(keys(1)) == [False]
    forget_all = one.engine.forget_all
    if fails:
        one.engine.forget_all = fail
    one.forget()
    assert other.engine.stats().stored_pages == before + 2 * fails
    forget_all()
    assert other.engine.stats().stored_pages == before


def test_forget_closes_the_engine():
    storage = simulated(StorageConfig(kind="memory"))
    write(storage.storage, keys(1))
    storage.forget()
    assert storage.engine.contains(keys(1)) == [False]

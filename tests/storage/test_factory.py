"""What a configuration opens, and what it is told when it makes no sense."""

from contextlib import closing
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
from storage_pages import PAGE_BYTES, keys, payload, read, write

from hicache.clock import SimulatedClock, to_ns
from hicache.config import FaultsConfig, StorageConfig
from hicache.storage.base import Storage, StorageError
from hicache.storage.engines.file import FileStorage
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.factory import (
    GuardedStorage,
    open_guarded_storage,
    open_simulated_storage,
    open_storage,
)


def opened(config: StorageConfig, namespace: str = "test") -> Storage:
    storage = open_storage(config, namespace=namespace, page_bytes={0: PAGE_BYTES})
    assert storage is not None
    return storage


def test_none_opens_nothing() -> None:
    assert open_storage(StorageConfig(kind="none"), namespace="test", page_bytes={}) is None


def test_memory_takes_stand_ins_of_nominal_size() -> None:
    storage = opened(StorageConfig(kind="memory", capacity_gib=3 * PAGE_BYTES / 2**30))
    assert isinstance(storage, MemoryStorage)
    storage.write(keys(1, 2, 3, 4), [memoryview(b"")] * 4)
    assert storage.contains(keys(1, 2, 3, 4)) == [False, True, True, True]


@pytest.mark.parametrize("kind", ["slab", "file"])
def test_a_directory_is_made_and_pages_come_back(kind: str, tmp_path: Path) -> None:
    with closing(opened(StorageConfig(kind=kind, root=str(tmp_path / "new" / "root")))) as storage:
        write(storage, keys(1))
        assert read(storage, keys(1)) == [payload(keys(1)[0])]


@pytest.mark.parametrize("kind", ["slab", "file"])
def test_a_capacity_in_gib_is_kept(kind: str, tmp_path: Path) -> None:
    config = StorageConfig(kind=kind, root=str(tmp_path), capacity_gib=3 * PAGE_BYTES / 2**30)
    with closing(opened(config)) as storage:
        for number in range(5):
            write(storage, keys(number))
        assert storage.stats().stored_bytes == 3 * PAGE_BYTES


class Own(MemoryStorage):
    """An engine of a user's own."""

    def __init__(self, root, *, namespace, capacity_bytes, page_bytes):
        super().__init__(capacity_bytes=capacity_bytes, page_bytes=page_bytes)
        self.told = root, namespace


OWN = StorageConfig(kind=f"{__name__}:Own", root="anything")


def test_an_engine_of_the_users_own_is_named_by_its_class() -> None:
    storage = opened(OWN, namespace="mine")
    assert isinstance(storage, Own)
    assert storage.told == ("anything", "mine")


def test_an_engine_of_the_users_own_may_hang_in_earnest_and_is_empty_in_a_simulation() -> None:
    guarded = open_guarded_storage(OWN, namespace="a", page_bytes={}, clock=SimulatedClock())
    assert guarded is not None
    assert layers(guarded.storage) == ["BreakerStorage", "OwnStorage", "DeadlineStorage", "Own"]
    guarded.storage.close()
    names = {simulated(OWN).engine.told[1] for _ in range(2)}  # type: ignore[attr-defined]
    assert len(names) == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no_module:Own", "No module named 'no_module'"),
        (f"{__name__}:Nobody", "no attribute 'Nobody'"),
    ],
)
def test_a_class_that_is_not_there_is_named(kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"storage.kind={kind} cannot be loaded: .*{reason}"):
        opened(StorageConfig(kind=kind))


def test_what_is_no_class_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"storage\.kind=math:pi must be a class or a function, got 3\.14"
    ):
        opened(StorageConfig(kind="math:pi"))


class Unfinished:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def contains(self, keys: list[bytes]) -> list[bool]:
        return [False for _ in keys]


class Unbuildable:
    pass


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Unfinished", "lacks read, write, delete, stats, close"),
        ("Unbuildable", r"cannot be built: .*Unbuildable\(\) takes no arguments"),
    ],
)
def test_an_unfinished_class_of_ones_own_is_refused(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"storage\.kind={__name__}:{name} {told}"):
        opened(StorageConfig(kind=f"{__name__}:{name}"))


@pytest.mark.parametrize("kind", ["slab", "file", "redis", "mooncake"])
def test_a_missing_root_is_named(kind: str) -> None:
    with pytest.raises(ValueError, match=f"storage.kind={kind} needs storage.root"):
        opened(StorageConfig(kind=kind))


@pytest.mark.parametrize("kind", ["slab", "file"])
def test_a_root_that_cannot_be_written_is_named(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.write_text("a file, not a directory")
    with pytest.raises(StorageError, match=str(root)):
        opened(StorageConfig(kind=kind, root=str(root)))


def test_faults_of_a_guarded_engine_are_misses(tmp_path: Path) -> None:
    config = StorageConfig(kind="file", root=str(tmp_path))
    guarded = open_guarded_storage(
        config, namespace="test", page_bytes={0: PAGE_BYTES}, clock=SimulatedClock()
    )
    assert guarded is not None
    storage = guarded.storage
    with closing(storage):
        write(storage, keys(1))
        assert read(storage, keys(1)) == [payload(keys(1)[0])]
        (directory,) = tmp_path.iterdir()
        directory.rename(tmp_path / "elsewhere")
        assert read(storage, keys(1)) == [None]
        assert storage.failed_calls == 1


def test_a_guarded_engine_tells_after_its_end_what_went_wrong(tmp_path: Path) -> None:
    config = StorageConfig(
        kind="file", root=str(tmp_path), faults=FaultsConfig(missing_rate=1.0), breaker_failures=1
    )
    guarded = open_guarded_storage(
        config, namespace="test", page_bytes={0: PAGE_BYTES}, clock=SimulatedClock()
    )
    assert guarded is not None
    write(guarded.storage, keys(1, 2))
    (first, _) = sorted(tmp_path.glob("*/*/*.page"))
    first.write_bytes(b"cut short")
    read(guarded.storage, keys(1, 2))
    (directory,) = tmp_path.iterdir()
    away = directory.rename(tmp_path / "elsewhere")
    read(guarded.storage, keys(2))
    read(guarded.storage, keys(2))
    away.rename(directory)
    guarded.storage.close()
    counts = guarded.counts()
    assert {name: count for name, count in counts.items() if count} == {
        "storage/failed_count": 1,
        "storage/bypassed_count": 1,
        "storage/damaged_pages": 1,
        "storage/injected_missing_count": 1,
    }


def test_an_unknown_kind_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"one of none, memory, mooncake_master, .*, got 'tape'"):
        opened(StorageConfig(kind="tape"))


def test_a_capacity_for_redis_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_gib must be None for redis"):
        opened(StorageConfig(kind="redis", root="redis://127.0.0.1:1/0", capacity_gib=1.0))


@pytest.mark.parametrize("kind", ["slab", "file"])
def test_a_simulation_leaves_no_files_even_if_its_store_cannot_be_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    first_use = {"slab": "slab.SlotTable", "file": "file.FileStorage._scan"}
    monkeypatch.setattr(f"hicache.storage.engines.{first_use[kind]}", no_space)
    with pytest.raises(StorageError, match="No space left on device"):
        simulated(StorageConfig(kind=kind, root=str(tmp_path / "root")))
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("kind", ["slab", "file"])
def test_a_simulation_has_a_fresh_directory_and_leaves_no_files(kind: str, tmp_path: Path) -> None:
    config = StorageConfig(kind=kind, root=str(tmp_path / "new" / "root"))
    one, other = simulated(config), simulated(config)
    write(one.storage, keys(1))
    assert (one.storage.contains(keys(1)), other.storage.contains(keys(1))) == ([True], [False])
    for each in (one, other):
        each.forget()
    assert list((tmp_path / "new" / "root").iterdir()) == []


def simulated(config: StorageConfig, seed: int = 0) -> GuardedStorage:
    storage = open_simulated_storage(
        config, namespace="test", page_bytes={0: PAGE_BYTES}, clock=SimulatedClock(), seed=seed
    )
    assert storage is not None
    return storage


def test_a_simulation_leaves_no_keys_on_a_server(redis_url: str) -> None:
    config = StorageConfig(kind="redis", root=redis_url)
    simulated = open_simulated_storage(
        config, namespace="test", page_bytes={0: PAGE_BYTES}, clock=SimulatedClock(), seed=0
    )
    assert simulated is not None
    before = simulated.engine.stats().stored_pages
    write(simulated.storage, keys(1, 2))
    assert simulated.engine.stats().stored_pages == before + 2
    simulated.forget()
    with closing(opened(config)) as storage:
        assert storage.stats().stored_pages == before


def layers(storage: object) -> list[str]:
    """The classes that a call passes, from the outermost."""
    names = [type(storage).__name__]
    while inner := getattr(storage, "_inner", None):
        storage = inner
        names.append(type(storage).__name__)
    return names


FAULTY = FaultsConfig(missing_rate=0.5)
CORRUPT = FaultsConfig(corrupt_rate=0.5)
GONE = FaultsConfig(gone_from_s=1.0)


@pytest.mark.parametrize(
    ("kind", "faults", "between"),
    [
        ("memory", FaultsConfig(), []),
        ("slab", FaultsConfig(), ["DeadlineStorage"]),
        ("file", FaultsConfig(), ["DeadlineStorage"]),
        ("memory", GONE, ["DeadlineStorage", "FaultyStorage"]),
        ("slab", FAULTY, ["DeadlineStorage", "FaultyStorage"]),
        ("file", CORRUPT, ["DeadlineStorage", "FaultyStorage"]),
    ],
)
def test_an_engine_in_earnest_has_the_guards_it_needs(
    kind: str, faults: FaultsConfig, between: list[str], tmp_path: Path
) -> None:
    guarded = guard(StorageConfig(kind=kind, root=str(tmp_path), faults=faults))
    assert layers(guarded.storage) == ["BreakerStorage", *between, f"{kind.title()}Storage"]
    assert (guarded.faulty is not None) == (faults != FaultsConfig())
    guarded.storage.close()


def guard(config: StorageConfig, **options: int) -> GuardedStorage:
    guarded = open_guarded_storage(
        config, namespace="test", page_bytes={0: PAGE_BYTES}, clock=SimulatedClock(), **options
    )
    assert guarded is not None
    return guarded


def test_nothing_is_guarded_and_nothing_simulated_where_there_is_none() -> None:
    clock = SimulatedClock()
    config = StorageConfig(kind="none")
    assert open_guarded_storage(config, namespace="test", page_bytes={}, clock=clock) is None
    assert (
        open_simulated_storage(config, namespace="test", page_bytes={}, clock=clock, seed=0) is None
    )


def test_a_simulated_engine_has_its_faults_and_a_breaker(tmp_path: Path) -> None:
    for faults, between in ((FaultsConfig(), []), (FAULTY, ["FaultyStorage"])):
        config = StorageConfig(kind="memory", faults=faults)
        assert layers(simulated(config).storage) == ["BreakerStorage", *between, "MemoryStorage"]


def drawn(storage: Storage) -> list[bool]:
    """Which of a hundred pages are missing."""
    write(storage, keys(*range(100)))
    return [page is None for page in read(storage, keys(*range(100)))]


def test_faults_follow_from_the_seed() -> None:
    config = StorageConfig(kind="memory", faults=FAULTY)
    for opened_with in (
        lambda seed: guard(config, seed=seed),
        lambda seed: simulated(config, seed),
    ):
        first, again, other = (drawn(opened_with(seed).storage) for seed in (0, 0, 1))
        assert first == again
        assert first != other
    assert drawn(guard(config).storage) == drawn(guard(config, seed=0).storage)


def test_a_simulated_engine_takes_its_time_from_the_stall_and_counts() -> None:
    faults = FaultsConfig(delay_ms=100.0, full_rate=1.0)
    storage = simulated(StorageConfig(kind="memory", faults=faults, deadline_s=0.2))
    assert write(storage.storage, keys(1)) == [False]
    assert storage.stall.take() == to_ns(0.1)
    assert {name: count for name, count in storage.counts().items() if count} == {
        "storage/injected_delay_count": 1,
        "storage/injected_full_count": 1,
    }
    assert set(simulated(StorageConfig(kind="memory")).counts()) == {
        "storage/damaged_pages",
        "storage/failed_count",
        "storage/bypassed_count",
    }


def test_a_simulated_call_fails_at_its_deadline_and_the_breaker_is_as_configured() -> None:
    config = StorageConfig(
        kind="memory",
        faults=FaultsConfig(delay_ms=100.0),
        deadline_s=0.05,
        breaker_failures=2,
        breaker_retry_s=3.0,
    )
    clock = SimulatedClock()
    storage = open_simulated_storage(
        config, namespace="test", page_bytes={0: PAGE_BYTES}, clock=clock, seed=0
    )
    assert storage is not None
    for _ in range(4):
        write(storage.storage, keys(1))
    assert storage.stall.take() == 2 * to_ns(0.05)
    assert storage.counts()["storage/bypassed_count"] == 2
    clock.wait_until(to_ns(3.0))
    write(storage.storage, keys(1))
    assert storage.counts()["storage/failed_count"] == 3


def test_a_call_in_earnest_is_given_up_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = guard(StorageConfig(kind="file", root=str(tmp_path), deadline_s=0.01))
    stuck = Event()
    monkeypatch.setattr(FileStorage, "contains", lambda *_: stuck.wait(60))
    assert guarded.storage.contains(keys(1)) == [False]
    assert guarded.counts()["storage/failed_count"] == 1
    stuck.set()


@pytest.mark.parametrize(("capacity_gib", "capacity_bytes"), [(None, None), (0.5, 2**29)])
@pytest.mark.parametrize("kind", ["memory", "slab", "file"])
def test_an_engine_gets_the_capacity_in_bytes(
    kind: str, capacity_gib: float | None, capacity_bytes: int | None, tmp_path: Path
) -> None:
    config = StorageConfig(kind=kind, root=str(tmp_path), capacity_gib=capacity_gib)
    with closing(opened(config)) as storage:
        keeper = getattr(storage, "_table", storage)
        assert keeper._capacity_bytes == capacity_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize(("capacity_gib", "segment_bytes"), [(None, 0), (0.5, 2**29)])
def test_mooncake_is_given_its_master_and_the_memory_to_add(
    capacity_gib: float | None, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    monkeypatch.setattr("hicache.storage.factory.MooncakeStorage", made)
    assert opened(StorageConfig(kind="mooncake", root="host:1", capacity_gib=capacity_gib))
    made.assert_called_once_with("host:1", namespace="test", segment_bytes=segment_bytes)


@pytest.mark.parametrize("fails", [False, True])
def test_a_simulation_has_a_namespace_of_its_own_on_a_server_and_forgets_it(
    *, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server(MemoryStorage):
        forgotten = 0

        def __init__(self, url: str, *, namespace: str) -> None:
            super().__init__(capacity_bytes=None)
            names.append(namespace)

        def forget_all(self) -> None:
            self.forgotten += 1
            if fails:
                raise StorageError("gone")

    names: list[str] = []
    monkeypatch.setattr("hicache.storage.factory.RedisStorage", Server)
    config = StorageConfig(kind="redis", root="redis://host")
    stores = [simulated(config) for _ in range(2)]
    assert len(set(names)) == 2
    assert all(name.startswith("test-") for name in names)
    for store in stores:
        write(store.storage, keys(1))
        store.forget()
        assert isinstance(store.engine, Server)
        assert store.engine.forgotten == 1
        assert store.engine.contains(keys(1)) == [False]

"""What a configuration opens, and what it is told when it makes no sense."""

from contextlib import closing
from pathlib import Path

import pytest
from storage_pages import PAGE_BYTES, keys, payload, read, write

from hicache.clock import SimulatedClock
from hicache.config import FaultsConfig, StorageConfig
from hicache.storage.base import Storage, StorageError
from hicache.storage.build import (
    SimulatedStorage,
    open_guarded_storage,
    open_simulated_storage,
    open_storage,
)
from hicache.storage.memory import MemoryStorage


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


@pytest.mark.parametrize("kind", ["slab", "file", "redis", "mooncake"])
def test_a_missing_root_is_named(kind: str) -> None:
    with pytest.raises(ValueError, match=f"storage.root must be given when .* is {kind}"):
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
    with pytest.raises(ValueError, match=r"one of none, memory, slab, .*, got 'tape'"):
        opened(StorageConfig(kind="tape"))


def test_a_capacity_for_redis_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_gib must be none for redis"):
        opened(StorageConfig(kind="redis", root="redis://127.0.0.1:1/0", capacity_gib=1.0))


@pytest.mark.parametrize("kind", ["slab", "file"])
def test_a_simulation_leaves_no_files_even_if_its_store_cannot_be_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"hicache.storage.{kind}.own_directory", no_space)
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
        each.close()
    assert list((tmp_path / "new" / "root").iterdir()) == []


def simulated(config: StorageConfig, seed: int = 0) -> SimulatedStorage:
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
    simulated.close()
    with closing(opened(config)) as storage:
        assert storage.stats().stored_pages == before

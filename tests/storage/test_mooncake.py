"""The Mooncake engine: staging memory, namespaces, and servers that die."""

from contextlib import closing

import pytest
from storage_servers import mooncake_cluster

from hicache.clock import SimulatedClock
from hicache.storage.base import StorageError
from hicache.storage.contract import keys, payload, poisoned, read, write
from hicache.storage.engines.mooncake import MooncakeStorage
from hicache.storage.guards.breaker import BreakerStorage

pytestmark = pytest.mark.slow


def test_a_batch_larger_than_staging_memory_is_read(mooncake_master, namespace):
    num_bytes = 400_001  # two fit into staging memory
    some = keys(*range(5))
    storage = MooncakeStorage(
        mooncake_master, namespace=namespace, staging_bytes=2**20, deadline_s=20.0
    )
    with closing(storage):
        storage.write(some, [payload(page_key, num_bytes) for page_key in some])
        buffers = [poisoned(num_bytes) for _ in some]
        assert storage.read(some, buffers) == [True] * 5
        assert buffers == [payload(page_key, num_bytes) for page_key in some]


def test_forget_all_deletes_one_namespace(mooncake_master, namespace):
    with (
        closing(MooncakeStorage(mooncake_master, namespace=namespace)) as storage,
        closing(MooncakeStorage(mooncake_master, namespace=f"{namespace}2")) as other,
    ):
        write(storage, keys(1, 2))
        write(other, keys(1))
        storage.forget_all()
        assert storage.contains(keys(1, 2)) == [False, False]
        assert other.contains(keys(1)) == [True]


def test_a_page_larger_than_staging_memory_is_refused(mooncake_master, namespace):
    storage = MooncakeStorage(mooncake_master, namespace=namespace, staging_bytes=2**20)
    with closing(storage), pytest.raises(ValueError, match="do not fit the staging buffer"):
        storage.read(keys(1), [poisoned(2**20)])


def test_pages_of_a_dead_node_are_misses(tmp_path):
    with mooncake_cluster(tmp_path) as cluster:
        storage = MooncakeStorage(cluster.master, namespace="test", deadline_s=20.0)
        with closing(storage):
            assert write(storage, keys(1)) == [True]
            cluster.node_process.kill()
            cluster.node_process.wait()
            assert read(storage, keys(1)) == [None]


def test_a_dead_master_is_bypassed(tmp_path):
    with mooncake_cluster(tmp_path) as cluster:
        engine = MooncakeStorage(cluster.master, namespace="test", deadline_s=0.2)
        storage = BreakerStorage(engine, clock=SimulatedClock(), max_failures=2)
        write(storage, keys(1))
        cluster.master_process.kill()
        cluster.master_process.wait()
        assert [read(storage, keys(1)) for _ in range(5)] == [[None]] * 5
        assert (storage.failed_calls, storage.bypassed_calls) == (2, 3)
        storage.close()


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        ("127.0.0.1:9", StorageError, r"cannot connect to a Mooncake master at 127\.0\.0\.1:9"),
        ("somewhere", ValueError, "HOST:PORT, got 'somewhere'"),
    ],
)
def test_an_address_without_a_master_is_refused(address, error, told):
    pytest.importorskip("mooncake", reason="Mooncake is not installed")
    with pytest.raises(error, match=told):
        MooncakeStorage(address, namespace="test")

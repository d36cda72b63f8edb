"""The Redis engine: messages, damaged values, full servers, and servers that are gone."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count

import pytest
from storage_servers import free_port, redis_server

from hicache.clock import SimulatedClock, to_ns
from hicache.secret import PASSWORD
from hicache.storage.base import StorageError
from hicache.storage.contract import PAGE_BYTES, keys, payload, poisoned, read, write
from hicache.storage.digest import namespace_name
from hicache.storage.engines.parts import parts
from hicache.storage.engines.redis import RedisStorage
from hicache.storage.guards.breaker import BreakerStorage

MIB = 2**20


@pytest.fixture
def connect() -> Iterator[Callable[..., RedisStorage]]:
    """A function that opens stores of the namespace `test`; all are closed at the end."""
    with ExitStack() as stack:

        def connect_to(url: str, namespace: str = "test", **options: float) -> RedisStorage:
            storage = RedisStorage(url, namespace=namespace, **options)
            return stack.enter_context(closing(storage))

        yield connect_to


@pytest.fixture
def storage(connect, redis_url: str, namespace: str) -> RedisStorage:
    return connect(redis_url, namespace)


def test_a_batch_of_many_messages_is_read_as_it_was_written(storage):
    num_bytes = 5 * MIB  # three pages a message
    some = keys(*range(4))
    pages = [payload(page_key, num_bytes) for page_key in some]
    buffers = [poisoned(num_bytes) for _ in some]
    storage.write(some, pages)
    assert storage.read(some, buffers) == [True] * 4
    assert buffers == pages


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([], []),
        ([0], [1]),
        ([8 * MIB, 8 * MIB, 1], [2, 1]),
        ([8 * MIB, 8 * MIB - 1, 1, 1], [3, 1]),
        ([8 * MIB, 8 * MIB + 1, 8 * MIB - 1], [1, 2]),
        ([17 * MIB, 17 * MIB, 1, 0], [1, 1, 2]),
        ([1, 17 * MIB], [1, 1]),
    ],
)
def test_a_batch_is_split_into_parts_of_16_mib_or_one_page(sizes, counts):
    found = list(parts(sizes, 16 * MIB))
    assert [part.stop - part.start for part in found] == counts
    indices = [index for part in found for index in range(part.start, part.stop)]
    assert indices == list(range(len(sizes)))


def test_a_write_stores_the_pages_of_a_batch_that_are_missing(storage):
    write(storage, keys(2, 4))
    assert write(storage, keys(1, 2, 3, 4, 5)) == [True] * 5
    assert read(storage, keys(1, 2, 3, 4, 5)) == [payload(each) for each in keys(1, 2, 3, 4, 5)]


def test_a_page_that_another_client_writes_first_is_kept(storage, connect, redis_url, namespace):
    write(connect(redis_url, namespace), keys(1))
    storage.contains = lambda page_keys: [False] * len(page_keys)
    assert storage.write(keys(1, 2), [payload(keys(3)[0]), payload(keys(2)[0])]) == [True, True]
    assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_a_redis_value_of_another_type_is_a_miss_and_is_not_overwritten(storage):
    storage._client.lpush(storage._prefix + keys(1)[0], b"a list")
    assert write(storage, keys(1)) == [True]
    assert read(storage, keys(1)) == [None]


def test_a_page_that_the_server_cannot_store_is_an_error(storage, monkeypatch):
    redis = pytest.importorskip("redis")
    storage.contains = lambda page_keys: [False] * len(page_keys)
    broken = [redis.ResponseError("broken")]
    monkeypatch.setattr(redis.client.Pipeline, "execute", lambda *_, **__: broken)
    with pytest.raises(StorageError, match=r"cannot use Redis at .*: broken"):
        write(storage, keys(1))


def test_a_damaged_value_is_a_miss_and_can_be_written_again(storage):
    write(storage, keys(1))
    storage._client.setrange(storage._prefix + keys(1)[0], 100, b"??")
    assert read(storage, keys(1)) == [None]
    assert storage.stats().damaged_pages == 1
    write(storage, keys(1))
    assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_forget_all_deletes_one_namespace(connect, redis_url, namespace):
    # its name in Redis has a character that means something else in a pattern
    names = (f"{namespace}/{number}" for number in count())
    special = next(name for name in names if b"*" in bytes.fromhex(namespace_name(name)))
    storage, other = connect(redis_url, special), connect(redis_url, namespace)
    many = keys(*range(2_100))
    storage.write(many, [memoryview(b"x")] * len(many))
    write(other, keys(1))
    storage.forget_all()
    assert not any(storage.contains(many))
    assert other.contains(keys(1)) == [True]


def test_the_password_comes_from_the_environment(connect, tmp_path, monkeypatch):
    with redis_server(tmp_path) as server:
        connect(server.url)._client.config_set("requirepass", "p@w/d")
        with pytest.raises(StorageError, match="authenticated"):
            connect(server.url)
        monkeypatch.setenv(PASSWORD, "p@w/d")
        assert write(connect(server.url), keys(1)) == [True]


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_full_server_declines_or_evicts_pages(connect, policy, tmp_path):
    with redis_server(tmp_path, memory="3mb", policy=policy) as server:
        storage = connect(server.url)
        results = [write(storage, keys(number))[0] for number in range(400)]
        if policy == "noeviction":
            assert True in results
            assert results[-1] is False
            assert storage.contains(keys(*range(400))) == results
        else:
            assert all(results)
            assert storage.stats().stored_pages < 3 * MIB // PAGE_BYTES


def test_a_missing_server_is_an_error_with_its_address():
    pytest.importorskip("redis", reason="redis-py is not installed")
    url = f"redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(StorageError, match=f"cannot use Redis at {url}"):
        RedisStorage(url, namespace="test")


def test_a_server_that_does_not_answer_is_an_error(connect, tmp_path):
    with redis_server(tmp_path) as server:
        storage = connect(server.url, deadline_s=0.05)
        server.running.send_signal(signal.SIGSTOP)  # sends no answer and keeps connections open
        with pytest.raises(StorageError, match="cannot use Redis"):
            read(storage, keys(1))
        server.running.send_signal(signal.SIGCONT)


def test_a_server_that_dies_is_bypassed_and_used_again_when_it_returns(connect, tmp_path):
    clock, port = SimulatedClock(), free_port()
    with redis_server(tmp_path, port=port) as server:
        storage = BreakerStorage(connect(server.url), clock=clock, max_failures=2, retry_s=5.0)
        write(storage, keys(1))
    assert [read(storage, keys(1)) for _ in range(4)] == [[None]] * 4
    assert storage.is_bypassed
    with redis_server(tmp_path, port=port):
        clock.wait_until(to_ns(5.0))
        assert write(storage, keys(2)) == [True]
        assert read(storage, keys(1, 2)) == [None, payload(keys(2)[0])]

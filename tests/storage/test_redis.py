"""What only the Redis engine promises: full servers, damaged values, servers that are gone."""

import signal
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from storage_pages import PAGE_BYTES, keys, payload, poisoned, read, write
from storage_servers import RedisServer, free_port, redis_server

from hicache.clock import SimulatedClock, to_ns
from hicache.secret import PASSWORD
from hicache.storage.base import StorageError
from hicache.storage.digest import namespace_name
from hicache.storage.engines.parts import parts
from hicache.storage.engines.redis import RedisStorage
from hicache.storage.guards.breaker import BreakerStorage


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


def test_a_batch_of_many_messages_comes_back(redis_url: str, namespace: str) -> None:
    num_bytes = 5 * 2**20  # three to a message
    some = keys(*range(7))
    with closing(RedisStorage(redis_url, namespace=namespace)) as storage:
        storage.write(some, [payload(page_key, num_bytes) for page_key in some])
        buffers = [poisoned(num_bytes) for _ in some]
        assert storage.read(some, buffers) == [True] * 7
        assert buffers == [payload(page_key, num_bytes) for page_key in some]


def test_messages_hold_sixteen_mebibytes_or_one_page() -> None:
    mib = 2**20
    for sizes, wanted in (
        ([], []),
        ([0], [1]),
        ([mib], [1]),
        ([8 * mib, 8 * mib, 1], [2, 1]),
        ([8 * mib, 8 * mib - 1, 1, 1], [3, 1]),
        ([8 * mib, 8 * mib + 1, 8 * mib - 1], [1, 2]),
        ([17 * mib, 17 * mib, 1, 0], [1, 1, 2]),
        ([1, 17 * mib], [1, 1]),
        ([17 * mib, 8 * mib, 8 * mib, 1], [1, 2, 1]),
    ):
        found = list(parts(sizes, 16 * mib))
        assert [part.stop - part.start for part in found] == wanted, sizes
        assert [index for part in found for index in range(part.start, part.stop)] == list(
            range(len(sizes))
        )


def test_a_batch_that_is_stored_in_part_is_written_in_part(redis_url: str, namespace: str) -> None:
    with closing(RedisStorage(redis_url, namespace=namespace)) as storage:
        write(storage, keys(2, 4))
        assert write(storage, keys(1, 2, 3, 4, 5)) == [True] * 5
        assert read(storage, keys(1, 2, 3, 4, 5)) == [payload(each) for each in keys(1, 2, 3, 4, 5)]
        storage.delete(keys(1, 3))
        assert storage.contains(keys(1, 2, 3)) == [False, True, False]


def test_a_page_that_another_client_wrote_first_stays(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(RedisStorage(redis_url, namespace=namespace)) as storage,
        closing(RedisStorage(redis_url, namespace=namespace)) as other,
    ):
        write(other, keys(1))
        monkeypatch.setattr(storage, "contains", lambda page_keys: [False] * len(page_keys))
        assert storage.write(keys(1, 2), [payload(keys(3)[0]), payload(keys(2)[0])]) == [True, True]
        assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_what_is_no_page_is_kept_and_missed(redis_url: str, namespace: str) -> None:
    with closing(RedisStorage(redis_url, namespace=namespace)) as storage:
        storage._client.lpush(storage._prefix + keys(1)[0], b"a list")  # type: ignore[attr-defined]
        assert write(storage, keys(1)) == [True]
        assert read(storage, keys(1)) == [None]


def test_a_page_that_the_server_fails_to_store_is_an_error(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RedisStorage(redis_url, namespace=namespace)) as storage:
        broken = Mock()
        broken.execute.return_value = [pytest.importorskip("redis").ResponseError("broken")]
        monkeypatch.setattr(storage, "contains", lambda page_keys: [False] * len(page_keys))
        monkeypatch.setattr(storage._client, "pipeline", Mock(return_value=broken))
        with pytest.raises(StorageError, match=r"cannot use Redis at .*: broken"):
            write(storage, keys(1))


def test_a_damaged_value_is_a_miss_and_can_be_written_again(redis_url: str, namespace: str) -> None:
    with closing(RedisStorage(redis_url, namespace=namespace)) as storage:
        write(storage, keys(1))
        storage._client.setrange(storage._prefix + keys(1)[0], 100, b"??")  # type: ignore[attr-defined]
        assert read(storage, keys(1)) == [None]
        assert storage.stats().damaged_pages == 1
        write(storage, keys(1))
        assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_a_namespace_is_forgotten_whole_and_alone(redis_url: str, namespace: str) -> None:
    # its name in Redis holds characters that a pattern would take for its own
    names = (f"{namespace}/{number}" for number in count())
    special = next(name for name in names if b"*" in bytes.fromhex(namespace_name(name)))
    with (
        closing(RedisStorage(redis_url, namespace=special)) as storage,
        closing(RedisStorage(redis_url, namespace=namespace)) as other,
    ):
        for number in range(0, 2_500, 500):
            write(storage, keys(*range(number, number + 500)))
        write(other, keys(1))
        storage.forget_all()
        assert not any(storage.contains(keys(*range(2_500))))
        assert other.contains(keys(1)) == [True]


def test_a_password_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        redis_server(tmp_path) as server,
        closing(RedisStorage(server.url, namespace="test")) as storage,
    ):
        storage._client.config_set("requirepass", "p@w/d")  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match="authenticated"):
            RedisStorage(server.url, namespace="test")
        monkeypatch.setenv(PASSWORD, "p@w/d")
        with closing(RedisStorage(server.url, namespace="test")) as other:
            assert write(other, keys(1)) == [True]


def test_a_full_server_that_evicts_nothing_declines_pages(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, memory="4mb", policy="noeviction") as server,
        closing(RedisStorage(server.url, namespace="test")) as storage,
    ):
        results = [write(storage, keys(number))[0] for number in range(600)]
        assert True in results
        assert results[-1] is False
        assert storage.contains(keys(*range(600))) == results


def test_an_overfilled_server_evicts(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, memory="4mb") as server,
        closing(RedisStorage(server.url, namespace="test")) as storage,
    ):
        assert all(write(storage, keys(number))[0] for number in range(600))
        assert storage.stats().stored_pages < 4 * 2**20 // PAGE_BYTES


def test_no_server_is_one_clear_error() -> None:
    pytest.importorskip("redis", reason="redis-py is not installed")
    url = f"redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(StorageError, match=f"cannot use Redis at {url}"):
        RedisStorage(url, namespace="test")


def test_a_server_that_does_not_answer_is_given_up(server: RedisServer) -> None:
    with closing(RedisStorage(server.url, namespace="test", deadline_s=0.05)) as storage:
        server.running.send_signal(signal.SIGSTOP)  # sends no answer and keeps connections open
        with pytest.raises(StorageError, match="cannot use Redis"):
            read(storage, keys(1))
        server.running.send_signal(signal.SIGCONT)


def test_a_server_that_dies_and_returns_is_bypassed_and_used_again(tmp_path: Path) -> None:
    clock = SimulatedClock()
    port = free_port()
    with redis_server(tmp_path, port=port) as server:
        storage = BreakerStorage(
            RedisStorage(server.url, namespace="test"), clock=clock, max_failures=2, retry_s=5.0
        )
        write(storage, keys(1))
    assert [read(storage, keys(1)) for _ in range(4)] == [[None]] * 4
    assert storage.is_bypassed
    with redis_server(tmp_path, port=port):
        clock.wait_until(to_ns(5.0))
        assert write(storage, keys(2)) == [True]
        assert read(storage, keys(1, 2)) == [None, payload(keys(2)[0])]
        storage.close()

"""Fixtures: opened engines and running servers."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from storage_engines import ENGINES, Engine, Open
from storage_servers import mooncake_cluster, redis_server

from hicache.storage.base import Storage


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


@pytest.fixture
def root(engine: Engine, request: pytest.FixtureRequest) -> str:
    """The directory of the engine's pages, or the address of its server."""
    servers = {"redis": "redis_url", "mooncake": "mooncake_master"}
    return str(request.getfixturevalue(servers.get(engine.kind, "tmp_path")))


@pytest.fixture
def namespace(tmp_path: Path) -> str:
    """A namespace for one test, because tests share a server."""
    return str(tmp_path)


@pytest.fixture
def open_engine(engine: Engine, root: str, namespace: str) -> Iterator[Open]:
    """Return a function that opens the same store; every opened engine is closed at the end."""
    with ExitStack() as stack:

        def open_again(*, suffix: str = "", capacity_bytes: int | None = None) -> Storage:
            storage = engine.open(root, namespace + suffix, capacity_bytes)
            return stack.enter_context(closing(storage))

        yield open_again


@pytest.fixture
def storage(open_engine: Open) -> Storage:
    return open_engine()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mooncake_cluster(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster.master

"""One way to open each engine, so that one suite tests them all."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from storage_pages import PAGE_BYTES

from hicache.storage.base import Storage
from hicache.storage.file import FileStorage
from hicache.storage.memory import MemoryStorage
from hicache.storage.slab import Eviction, SlabStorage

Open = Callable[..., Storage]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How to open one, and which parts of the suite apply."""

    open: Callable[[Path, str, int | None], Storage]
    kind: str
    durable: bool = True  # pages outlive the engine, and other processes see them
    bounded: bool = True  # it keeps a capacity itself


ENGINES = {
    "memory": Engine(
        kind="memory",
        open=lambda root, namespace, capacity: MemoryStorage(capacity_bytes=capacity),
        durable=False,
    ),
    "slab": Engine(
        kind="slab",
        open=lambda root, namespace, capacity: SlabStorage(
            root, namespace=namespace, capacity_bytes=capacity
        ),
    ),
    "slab-fifo-direct": Engine(
        kind="slab",
        open=lambda root, namespace, capacity: SlabStorage(
            root,
            namespace=namespace,
            capacity_bytes=capacity,
            page_bytes={0: PAGE_BYTES},
            eviction=Eviction.fifo,
            direct=True,
            num_threads=1,
        ),
    ),
    "file": Engine(
        kind="file",
        open=lambda root, namespace, capacity: FileStorage(
            root, namespace=namespace, capacity_bytes=capacity
        ),
    ),
}


# the engines that a part of the suite applies to, instead of skips
durable = pytest.mark.parametrize(
    "engine", [name for name, engine in ENGINES.items() if engine.durable], indirect=True
)
bounded = pytest.mark.parametrize(
    "engine", [name for name, engine in ENGINES.items() if engine.bounded], indirect=True
)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


@pytest.fixture
def open_engine(engine: Engine, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store again and again; all are closed in the end."""
    with ExitStack() as stack:

        def open_again(*, namespace: str = "test", capacity_bytes: int | None = None) -> Storage:
            storage = engine.open(tmp_path, namespace, capacity_bytes)
            return stack.enter_context(closing(storage))

        yield open_again


@pytest.fixture
def storage(open_engine: Open) -> Storage:
    return open_engine()

"""How to open each engine, so that one suite tests them all, and how to make its files fail."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest

from hicache.clock import SimulatedClock
from hicache.config import FaultsConfig
from hicache.storage.base import Storage
from hicache.storage.engines.file import FileStorage
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.engines.mooncake import MooncakeStorage
from hicache.storage.engines.mooncake_master import MooncakeMaster
from hicache.storage.engines.redis import RedisStorage
from hicache.storage.engines.slab import SlabStorage
from hicache.storage.guards.breaker import BreakerStorage
from hicache.storage.guards.deadline import DeadlineStorage
from hicache.storage.guards.faults import FaultyStorage
from hicache.storage.guards.own import OwnStorage

Open = Callable[..., Storage]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How to open an engine, and which parts of the suite apply to it."""

    open: Callable[[str, str, int | None], Storage]  # root, namespace, capacity in bytes
    kind: str
    durable: bool = True  # pages outlive the engine, and other processes see them
    bounded: bool = True  # it keeps a capacity itself


def slab(root: str, namespace: str, capacity: int | None, **more: Any) -> Storage:
    return SlabStorage(Path(root), namespace=namespace, capacity_bytes=capacity, **more)


def guarded(capacity: int | None) -> Storage:
    """An engine in memory behind all guards, none of which changes an answer."""
    own = OwnStorage(MemoryStorage(capacity_bytes=capacity), "own")
    faulty = FaultyStorage(own, FaultsConfig(delay_ms=1.0), seed=0, clock=SimulatedClock())
    return BreakerStorage(DeadlineStorage(faulty, deadline_s=60.0), clock=SimulatedClock())


ENGINES = {
    "memory": Engine(
        kind="memory",
        open=lambda root, namespace, capacity: MemoryStorage(capacity_bytes=capacity),
        durable=False,
    ),
    "guarded": Engine(
        kind="memory", open=lambda root, namespace, capacity: guarded(capacity), durable=False
    ),
    "mooncake_master": Engine(
        kind="mooncake_master",
        open=lambda root, namespace, capacity: MooncakeMaster(capacity_bytes=capacity),
        durable=False,
        bounded=False,  # it keeps below 95 %, and not the youngest: test_mooncake_master.py
    ),
    "slab": Engine(kind="slab", open=slab),
    "slab-alone": Engine(kind="slab", open=partial(slab, num_threads=1)),
    "file": Engine(
        kind="file",
        open=lambda root, namespace, capacity: FileStorage(
            Path(root), namespace=namespace, capacity_bytes=capacity
        ),
    ),
    "redis": Engine(
        kind="redis",
        open=lambda root, namespace, capacity: RedisStorage(root, namespace=namespace),
        bounded=False,
    ),
    "mooncake": Engine(
        kind="mooncake",
        open=lambda root, namespace, capacity: MooncakeStorage(
            root, namespace=namespace, staging_bytes=2**20, deadline_s=20.0
        ),
        bounded=False,
    ),
}

DISKS = ("slab", "file")  # the engines that keep pages below a directory of this machine


def opened(kind: str, root: Path, capacity_bytes: int | None = None) -> closing[Any]:
    """An engine of `ENGINES` in the namespace `test`, closed at the end of a `with` block."""
    return closing(ENGINES[kind].open(str(root), "test", capacity_bytes))


# the engines that a part of the suite applies to, instead of skips
durable = pytest.mark.parametrize(
    "engine", [name for name, engine in ENGINES.items() if engine.durable], indirect=True
)
bounded = pytest.mark.parametrize(
    "engine", [name for name, engine in ENGINES.items() if engine.bounded], indirect=True
)


@contextmanager
def before_each(name: str, act: Callable[..., object]) -> Iterator[None]:
    """Before each call of `os.NAME`, call `act` with its arguments; what it raises fails the call.

    Calls that `act` itself makes in its thread are left alone.
    """
    real, acting = getattr(os, name), set()

    def call(*arguments: object, **options: object) -> object:
        if get_ident() not in acting:
            acting.add(get_ident())
            try:
                act(*arguments)
            finally:
                acting.discard(get_ident())
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


def failing(name: str, error: int) -> AbstractContextManager[None]:
    """Make `os.NAME` fail with `error`. Of `os.open`, only the calls that create a file fail."""

    def fail(*arguments: Any) -> None:
        if name != "open" or arguments[1] & os.O_CREAT:
            raise OSError(error, os.strerror(error))

    return before_each(name, fail)

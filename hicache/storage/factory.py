"""Builds the storage engine that a configuration names, with its guards."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from uuid import uuid4

from hicache.clock import Clock, Stall
from hicache.config import STORAGES, ExperimentConfig, StorageConfig
from hicache.models import PLAIN
from hicache.storage.base import KEY_BYTES, Storage, StorageError
from hicache.storage.engines.file import FileStorage
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.engines.mooncake import MooncakeStorage
from hicache.storage.engines.mooncake_master import MooncakeMaster
from hicache.storage.engines.redis import RedisStorage
from hicache.storage.engines.slab import SlabStorage
from hicache.storage.guards.breaker import BreakerStorage
from hicache.storage.guards.deadline import DeadlineStorage
from hicache.storage.guards.faults import Fault, FaultyStorage
from hicache.storage.guards.own import OwnStorage
from hicache.user_code import UserCodeError, loaded, user_code

KINDS = ("none", *STORAGES, "peers")
# consecutive failed calls after which storage is bypassed, and the seconds for which it is
BREAKER_FAILURES, BREAKER_RETRY_S = 3, 5.0
ASKED = [name for name in vars(Storage) if not name.startswith("_")]  # an engine's methods


def open_storage(
    config: StorageConfig, *, namespace: str, page_bytes: Mapping[int, int] | None
) -> Storage | None:
    """Open the storage engine that `config.kind` names; return None if it is `none` or `peers`.

    `config.root` is a directory for the kinds slab and file, a URL for redis, and the master's
    HOST:PORT for mooncake. For mooncake, `config.capacity_gib` is the memory that this process
    lends to the store. A user's class (`module:Class`) is called with `config.root`, `namespace`,
    `capacity_bytes` and `page_bytes`. `page_bytes` maps a kind of page (the last byte of a key) to
    the size in bytes that an engine in memory counts for a page. None means that each page counts
    with its own length, as in all other engines of ours.

    Raises:
        ValueError: the configuration is invalid.
        StorageError: the engine cannot be opened or reached.
    """
    capacity_bytes = None if config.capacity_gib is None else int(config.capacity_gib * 2**30)
    match config.kind:
        case "none" | "peers":
            return None
        case "memory":
            return MemoryStorage(capacity_bytes=capacity_bytes, page_bytes=page_bytes)
        case "mooncake_master":
            return MooncakeMaster(capacity_bytes=capacity_bytes, page_bytes=page_bytes)
        case "slab" | "file":
            engine = SlabStorage if config.kind == "slab" else FileStorage
            return engine(Path(_root(config)), namespace=namespace, capacity_bytes=capacity_bytes)
        case "redis":
            if capacity_bytes is not None:
                raise ValueError(
                    "storage.capacity_gib must be None for redis, whose server limits itself "
                    f"(maxmemory), got {config.capacity_gib}"
                )
            return RedisStorage(_root(config), namespace=namespace)
        case "mooncake":
            return MooncakeStorage(
                _root(config), namespace=namespace, segment_bytes=capacity_bytes or 0
            )
        case kind if ":" in kind:
            return _build_own(
                kind,
                config.root,
                namespace=namespace,
                capacity_bytes=capacity_bytes,
                page_bytes=page_bytes,
            )
        case unknown:
            raise ValueError(
                f"storage.kind must be one of {', '.join(KINDS)} or module:Class, got {unknown!r}"
            )


def _build_own(kind: str, root: str | None, **given: object) -> Storage:
    make: Callable[..., Storage] = loaded("storage.kind", kind)
    try:
        with user_code(f"storage.kind={kind}: its constructor", StorageError):
            engine = make(root, **given)
    except UserCodeError as error:
        if error.own_frames():
            raise
        raise ValueError(f"storage.kind={kind} cannot be built: {error.__cause__}") from error
    missing = [each for each in ASKED if not callable(getattr(engine, each, None))]
    if missing:
        raise ValueError(f"storage.kind={kind} lacks {', '.join(missing)}")
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedStorage:
    """A storage engine behind a circuit breaker, and behind injected faults if there are any.

    Callers use `storage`, the circuit breaker; its calls never raise `StorageError`. In a
    simulation, `stall` adds up the delays that the injected faults would cause.
    """

    engine: Storage
    storage: BreakerStorage
    faulty: FaultyStorage | None
    stall: Stall = field(default_factory=Stall)
    scratch: Path | None = None  # a directory that only this simulation uses

    def counts(self) -> dict[str, int]:
        """Return counters of storage failures by metric name.

        They count failed calls, calls skipped by the circuit breaker, damaged pages, and injected
        faults. The number of damaged pages is that of the last `stats` or `close` call.
        """
        counts = {
            "storage/damaged_pages": self.storage.last_stats.damaged_pages,
            "storage/failed_count": self.storage.failed_calls,
            "storage/bypassed_count": self.storage.bypassed_calls,
        }
        if self.faulty is not None:
            injected = self.faulty.injected
            counts |= {f"storage/injected_{fault.name}_count": injected[fault] for fault in Fault}
        return counts

    def forget(self) -> None:
        if isinstance(self.engine, RedisStorage | MooncakeStorage):
            with suppress(StorageError):  # an unreachable server must not prevent the cleanup
                self.engine.forget_all()
        self.storage.close()
        if self.scratch is not None:
            rmtree(self.scratch)


def open_guarded_storage(
    config: StorageConfig,
    *,
    namespace: str,
    page_bytes: Mapping[int, int] | None,
    clock: Clock,
    seed: int = 0,
) -> GuardedStorage | None:
    """Open the storage engine of `config` for a real run; its failures become cache misses.

    Every call of an engine on disk ends after at most `config.deadline_s` seconds, because a disk
    can block forever. Redis and Mooncake have time limits of their own. `seed` determines the
    injected faults. The caller must detect pages that they corrupt. Return None if `config.kind` is
    `none`.
    """
    engine = open_storage(config, namespace=namespace, page_bytes=page_bytes)
    if engine is None:
        return None
    storage, faulty = engine, None
    if not config.faults.is_harmless:
        storage = faulty = FaultyStorage(engine, config.faults, seed=seed, clock=clock)
    if config.kind not in ("memory", "mooncake_master", "redis", "mooncake") or faulty is not None:
        storage = DeadlineStorage(storage, deadline_s=config.deadline_s)
    behind = _behind_breaker(storage, config, clock)
    return GuardedStorage(engine=engine, storage=behind, faulty=faulty)


def open_simulated_storage(
    config: StorageConfig, *, namespace: str, page_bytes: Mapping[int, int], clock: Clock, seed: int
) -> GuardedStorage | None:
    """Open an empty storage engine for a simulation, behind a circuit breaker and faults.

    `seed` determines the injected faults. Slab and file use a new directory below `config.root`.
    Redis, mooncake and user classes use a new namespace. The result's `forget` method deletes this
    directory, or the keys of the namespace in Redis or Mooncake. So equal simulations give equal
    results on every engine. Return None if `config.kind` is `none`.
    """
    scratch = None
    if config.kind in ("slab", "file"):
        root = Path(_root(config))
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(mkdtemp(prefix="simulated-", dir=root))
        config = replace(config, root=str(scratch))
    elif config.kind not in ("memory", "mooncake_master"):
        namespace = f"{namespace}-{uuid4().hex}"
    try:
        engine = open_storage(config, namespace=namespace, page_bytes=page_bytes)
    except StorageError:
        if scratch is not None:
            rmtree(scratch)
        raise
    if engine is None:
        return None
    stall = Stall()
    faulty = None
    faults, deadline_s = config.faults, config.deadline_s
    if not faults.is_harmless:
        faulty = FaultyStorage(
            engine, faults, seed=seed, clock=clock, wait=stall.add, deadline_s=deadline_s
        )
    behind = _behind_breaker(faulty or engine, config, clock)
    return GuardedStorage(
        engine=engine, storage=behind, faulty=faulty, stall=stall, scratch=scratch
    )


def open_rank_storages(
    config: ExperimentConfig, shard_bytes: Sequence[Mapping[int, int]], clock: Clock
) -> list[GuardedStorage]:
    """Open an empty storage engine for each rank of a simulated run; none if the run has none.

    `shard_bytes` maps, for each rank, a kind of page (the last byte of a key) to the size in bytes
    of the rank's part.
    A simulation stores keys without pages: engines in memory and a user's own count these sizes,
    others the sizes of keys.
    """
    settings, num_ranks, pp = config.storage, len(shard_bytes), config.parallel.pp
    if settings.kind not in ("memory", "mooncake_master") and ":" not in settings.kind:
        shard_bytes = [dict.fromkeys(each, KEY_BYTES) for each in shard_bytes]
    if settings.capacity_gib is not None:
        settings = replace(settings, capacity_gib=settings.capacity_gib / num_ranks)
    form = "" if config.storage_format == PLAIN else f"-{config.storage_format}"
    name = f"{config.model.name}-p{config.cache.page_size}{form}{f'-pp{pp}' if pp > 1 else ''}"
    opened = [
        open_simulated_storage(
            settings,
            namespace=f"{name}{f'-rank{rank}of{num_ranks}' if num_ranks > 1 else ''}-simulated",
            page_bytes=page_bytes,
            clock=clock,
            seed=config.seed * num_ranks + rank,
        )
        for rank, page_bytes in enumerate(shard_bytes)
    ]
    return [each for each in opened if each is not None]


def _behind_breaker(storage: Storage, config: StorageConfig, clock: Clock) -> BreakerStorage:
    if ":" in config.kind:
        storage = OwnStorage(storage, f"storage.kind={config.kind}")
    return BreakerStorage(
        storage, clock=clock, max_failures=BREAKER_FAILURES, retry_s=BREAKER_RETRY_S
    )


def _root(config: StorageConfig) -> str:
    if config.root is None:
        raise ValueError(f"storage.kind={config.kind} needs storage.root, which is not set")
    return config.root

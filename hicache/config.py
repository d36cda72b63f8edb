"""Every knob of a run, typed and checked.

These frozen dataclasses are what the code receives, and the schema that the command line is
checked against (`experiments/schema.py` tells Hydra about them; nothing here needs Hydra). A
check that concerns one knob stands in `__post_init__` and names it.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from pathlib import PurePath

from hicache.models import ComponentKind, HardwareConfig, ModelConfig

# policies of our own, by the knob that names them; module:Class names one of the user's
STOP_POLICIES = ("best_effort", "wait_complete", "timeout", "marginal")
EVICTION_POLICIES = ("lru", "lfu", "slru", "fifo", "random")
CHECKPOINT_PLACEMENTS = ("end", "end_branch", "every")
SERVICE_ORDERS = ("fcfs", "longest_prefix", "shortest_remaining")
SWA_BUDGETS = ("no_host_term", "reports", "double", "sglang_0_5_23")
MISSING = "???"  # OmegaConf's mark of a value that must be given


class WritePolicy(Enum):
    """When device data is copied to the host."""

    write_through = "write_through"  # when it is inserted
    write_through_selective = "write_through_selective"  # when it is hit for the second time
    write_back = "write_back"  # when it is evicted from the device


class Tiering(Enum):
    """Whether a page may be on the host and in storage at once."""

    inclusive = "inclusive"
    exclusive = "exclusive"  # what the host has read is dropped from storage


class StorageWrites(Enum):
    """When host data is written to storage."""

    on_back_up = "on_back_up"  # as soon as it is on the host
    selective = "selective"  # when it has been hit `storage.write_hits` times
    on_host_eviction = "on_host_eviction"  # when it leaves the host


class CutPolicy(Enum):
    """What becomes of a prefetch that host memory has no room for."""

    abandon = "abandon"
    fit = "fit"  # cut to the whole pages that fit
    restorable = "restorable"  # cut to the longest prefix that fits and can be restored


class StageAt(Enum):
    """When a prefetch takes its host pages."""

    enqueue = "enqueue"  # for all that was asked for, before storage is queried
    hit = "hit"  # for what storage has, when that is known


class DeadlineFrom(Enum):
    """What starts the clock of the timeout policy."""

    enqueue = "enqueue"
    first_poll = "first_poll"  # the first time the scheduler was told to wait


class CommitPolicy(Enum):
    """What becomes of a hybrid prefetch that stopped early or read less than it should."""

    all_or_nothing = "all_or_nothing"
    usable = "usable"  # keep the longest prefix whose state and window were read


class HitAgreement(Enum):
    """What the ranks of an engine agree on when storage has answered each of them."""

    restorable = "restorable"  # the longest prefix that every rank can restore
    min_of_maxima = "min_of_maxima"  # the shortest of their longest: not restorable on some


class Batching(Enum):
    """How prompts and answers share a step."""

    prefill_first = "prefill_first"  # a step with prompts in it decodes nothing
    mixed = "mixed"  # prompts and answers in one step


class Arrivals(Enum):
    """What releases a request."""

    open = "open"  # its time in the trace
    causal = "causal"  # its time in the trace, but never before its parent's answer
    closed = "closed"  # its parent's answer, and then the think time


class TraceTokens(Enum):
    """How the token ids of a trace of blocks are made."""

    reconstructed = "reconstructed"  # a turn continues its parent's partial block and answer
    literal = "literal"  # every block id is its own 512 tokens, answers are never seen again


class WandbMode(Enum):
    """What W&B does with a run."""

    disabled = "disabled"
    offline = "offline"
    online = "online"


class StartState(Enum):
    """What the cache holds when measuring begins."""

    cold = "cold"
    warm_storage = "warm_storage"  # storage holds what a first pass over the workload wrote


def _at_least(knob: str, value: float, least: float) -> None:
    _finite(knob, value)
    if value < least:
        raise ValueError(f"{knob} must be at least {least}, got {value}")


def _positive(knob: str, value: float) -> None:
    _finite(knob, value)
    if value <= 0:
        raise ValueError(f"{knob} must be positive, got {value}")


def _finite(knob: str, value: float) -> None:
    if not isfinite(value):
        raise ValueError(f"{knob} must be a finite number, got {value}")


def _share(knob: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= 1:  # which is no share either if it is nan
        raise ValueError(f"{knob} must be a share between 0 and 1, got {value}")


def _policy(knob: str, name: str, ours: tuple[str, ...]) -> None:
    if name not in ours and ":" not in name:
        raise ValueError(f"{knob} must be one of {', '.join(ours)} or module:Class, got {name!r}")


def check_name(name: str) -> None:
    """Refuse a name that would put what a run leaves elsewhere than below `outputs/`."""
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise ValueError(f"name must be that of a directory below outputs/, got {name!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadConfig:
    """Which requests, and when they come.

    `kind` names the loader or generator. `path` overrides where a trace is looked for. `load`
    keeps the share of sessions that gives this GPU utilisation; `time_scale` stretches arrival
    times; `start_jitter_s` starts each session later by a seeded time below it. Generators make
    `num_sessions` sessions at `session_rate` a second. Of `abort_share` of the requests somebody
    gives up, after a seeded time from arrival whose mean is `patience_s`, unless they are answered
    by then.
    """

    kind: str = MISSING
    path: str | None = None
    limit: int | None = None  # first requests only
    load: float | None = None
    time_scale: float = 1.0
    token_stride: int = 1  # keep every n-th token id: the same tree of prefixes, n times smaller
    start_jitter_s: float = 0.0
    tokens: TraceTokens = TraceTokens.reconstructed
    arrivals: Arrivals = Arrivals.causal
    concurrency: int = 32  # sessions at once, for traces whose sessions have no start time
    think_cap_s: float = 600.0
    warm_up_s: float = 0.0  # requests that arrive earlier are served and not counted
    start: StartState = StartState.cold
    abort_share: float = 0.0
    patience_s: float = 10.0
    num_sessions: int = 200
    session_rate: float = 1.0  # sessions a second

    def __post_init__(self) -> None:
        if self.limit is not None:
            _at_least("workload.limit", self.limit, 1)
        if self.load is not None:
            _positive("workload.load", self.load)
        _positive("workload.time_scale", self.time_scale)
        _at_least("workload.token_stride", self.token_stride, 1)
        _at_least("workload.start_jitter_s", self.start_jitter_s, 0)
        _at_least("workload.concurrency", self.concurrency, 1)
        _at_least("workload.think_cap_s", self.think_cap_s, 0)
        _at_least("workload.warm_up_s", self.warm_up_s, 0)
        _share("workload.abort_share", self.abort_share)
        _positive("workload.patience_s", self.patience_s)
        _at_least("workload.num_sessions", self.num_sessions, 1)
        _positive("workload.session_rate", self.session_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How one engine is spread over devices, and how many engines there are.

    `tp` is what the cost model knows. Each of `ranks` keeps a tree and a part of every page of its
    own and reads that from a storage of its own; together they serve as one engine.
    """

    tp: int | None = None  # devices of an engine; none: the model's default
    ranks: int = 1
    hit_agreement: HitAgreement = HitAgreement.restorable
    collective_s: float = 150e-6  # of one collective in every step; sglang issue 30511 gives 150 us
    replicas: int = 1
    router: str = "sticky"  # sticky, round_robin or prefix_load

    def __post_init__(self) -> None:
        if self.tp is not None:
            _at_least("parallel.tp", self.tp, 1)
        _at_least("parallel.ranks", self.ranks, 1)
        _at_least("parallel.collective_s", self.collective_s, 0)
        _at_least("parallel.replicas", self.replicas, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The tree and its two memory tiers.

    `device_gib` and `host_gib` are totals over all devices of an engine; `device_gib` none takes
    all that weights leave of the devices. The shares split a tier between components; none takes
    the model's own. `unlimited` gives pools that never fill.
    """

    page_size: int = 64  # tokens
    device_gib: float | None = 40.0
    host_gib: float = 256.0
    unlimited: bool = False
    swa_device_share: float | None = None
    swa_host_share: float | None = None
    mamba_device_share: float | None = None
    mamba_host_share: float | None = None
    eviction: str = "lru"  # one of EVICTION_POLICIES, or a class of yours as module:Class
    eviction_args: dict[str, float] = field(default_factory=dict)  # of that class, by name
    write_policy: WritePolicy = WritePolicy.write_through
    load_back_threshold: int = 10  # full tokens below which nothing is loaded back
    split_refreshes: bool = False  # a split counts as a use of what lies below it, as in sglang
    # window and state on the host count as used when they leave the device, as in sglang
    leaving_refreshes: bool = False
    # at which page boundaries of a prompt a Mamba state is kept: at its end; there and where it
    # left an edge that had no state; there and every `checkpoint_tokens`; as a class of yours says
    checkpoints: str = "end_branch"
    checkpoints_args: dict[str, float] = field(default_factory=dict)
    checkpoint_tokens: int = 8192  # grid of checkpoints=every

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"cache.page_size must be a power of two, got {self.page_size}")
        if self.device_gib is not None:
            _positive("cache.device_gib", self.device_gib)
        _at_least("cache.host_gib", self.host_gib, 0)
        _at_least("cache.load_back_threshold", self.load_back_threshold, 0)
        for name in (
            "swa_device_share",
            "swa_host_share",
            "mamba_device_share",
            "mamba_host_share",
        ):
            _share(f"cache.{name}", getattr(self, name))
        _policy("cache.eviction", self.eviction, EVICTION_POLICIES)
        _policy("cache.checkpoints", self.checkpoints, CHECKPOINT_PLACEMENTS)
        _at_least("cache.checkpoint_tokens", self.checkpoint_tokens, 1)
        is_grid = self.checkpoints == "every"  # else there is none to be off
        if is_grid and self.checkpoint_tokens % self.page_size:
            raise ValueError(
                f"cache.checkpoint_tokens={self.checkpoint_tokens} must be a multiple of "
                f"cache.page_size={self.page_size}: change either of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchConfig:
    """How pages come from storage ahead of need."""

    stop: str = "timeout"  # one of STOP_POLICIES, or a class of yours as module:Class
    stop_args: dict[str, float] = field(default_factory=dict)  # of that class, by name
    threshold: int = 256  # tokens: a shorter prefetch does not start
    cut: CutPolicy = CutPolicy.fit
    stage_at: StageAt = StageAt.enqueue
    commit: CommitPolicy = CommitPolicy.all_or_nothing
    await_sidecars: bool = True  # report 003: complete pages wait for their state and window
    deadline_from: DeadlineFrom = DeadlineFrom.enqueue
    timeout_base_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    evict_whole: bool = False  # short of host room, evict all that is wanted, as sglang does
    occupied_share: float = 0.5  # of host tokens that prefetches may hold before more are declined

    def __post_init__(self) -> None:
        _policy("prefetch.stop", self.stop, STOP_POLICIES)
        _at_least("prefetch.threshold", self.threshold, 1)
        _at_least("prefetch.timeout_base_s", self.timeout_base_s, 0)
        _at_least("prefetch.timeout_per_ki_token_s", self.timeout_per_ki_token_s, 0)
        _share("prefetch.occupied_share", self.occupied_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Which request runs next, and what a step may hold."""

    order: str = "fcfs"  # one of SERVICE_ORDERS, or a class of yours as module:Class
    order_args: dict[str, float] = field(default_factory=dict)
    chunk_tokens: int = 8192  # extend tokens a step
    max_running: int = 256
    scan_limit: int = 128  # requests waiting for their prefetch that one scan may pass over
    batching: Batching = Batching.prefill_first
    # what a request is charged in the window pool: one of SWA_BUDGETS (hicache.scheduler.budget has
    # the formulas; double is wrong on purpose), or a class of yours as module:Class
    swa_budget: str = "reports"
    swa_budget_args: dict[str, float] = field(default_factory=dict)
    aging: float = 0.1  # seconds of remaining work forgiven for each second waited
    clip_new_tokens: int = 4096  # answer tokens that admission reserves at most
    new_token_ratio: float = 0.7  # share of them it reserves at first
    new_token_ratio_floor: float = 0.098
    new_token_ratio_decay_steps: int = 600

    def __post_init__(self) -> None:
        _policy("scheduler.order", self.order, SERVICE_ORDERS)
        _policy("scheduler.swa_budget", self.swa_budget, SWA_BUDGETS)
        _at_least("scheduler.chunk_tokens", self.chunk_tokens, 1)
        _at_least("scheduler.max_running", self.max_running, 1)
        _at_least("scheduler.scan_limit", self.scan_limit, 1)
        _at_least("scheduler.aging", self.aging, 0)
        _share("scheduler.new_token_ratio", self.new_token_ratio)
        _share("scheduler.new_token_ratio_floor", self.new_token_ratio_floor)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultsConfig:
    """What goes wrong with storage on purpose, whichever engine it is.

    A call takes a log-normal time of median `delay_ms` longer. `error_rate` is of calls, the other
    rates are of pages. The engine is gone for `gone_for_s` (none: for good) from `gone_from_s` on.
    """

    preset: str = "none"  # what tables call it
    delay_ms: float = 0.0
    delay_sigma: float = 0.0  # 0: always the median
    error_rate: float = 0.0
    missing_rate: float = 0.0  # a page that is there cannot be read
    short_rate: float = 0.0  # half a page is read
    corrupt_rate: float = 0.0  # a wrong byte is read
    full_rate: float = 0.0  # a page is refused for want of room
    gone_from_s: float | None = None
    gone_for_s: float | None = None
    failure_ms: float = 0.0  # how long a call takes to fail; 0: refused at once

    def __post_init__(self) -> None:
        for name in ("error_rate", "missing_rate", "short_rate", "corrupt_rate", "full_rate"):
            _share(f"storage.faults.{name}", getattr(self, name))
        for name in ("delay_ms", "delay_sigma", "failure_ms"):
            _at_least(f"storage.faults.{name}", getattr(self, name), 0)
        for name in ("gone_from_s", "gone_for_s"):
            if getattr(self, name) is not None:
                _at_least(f"storage.faults.{name}", getattr(self, name), 0)
        if self.gone_for_s is not None and self.gone_from_s is None:
            raise ValueError(
                "storage.faults.gone_for_s needs storage.faults.gone_from_s, got "
                f"{self.gone_for_s} and none"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """The third tier: which engine, how much of it, and how fast simulated time says it is.

    `kind` is none, memory, slab, file, redis or mooncake. `capacity_gib` none never fills.
    `read_gbps` and `write_gbps` are 10**9 bytes a second; `shared_gbps` caps their sum. After
    `breaker_failures` failed calls in a row the tier is left alone for `breaker_retry_s`.
    `tiering=exclusive` needs `write=on_host_eviction`.
    """

    kind: str = "none"
    root: str | None = None  # directory or address, for engines that have one
    capacity_gib: float | None = None
    read_gbps: float = 6.0
    write_gbps: float = 4.0
    shared_gbps: float | None = None
    query_s: float = 0.0005  # round trip of one query
    operation_s: float = 0.0001  # before the first byte of each batch
    batch_pages: int = 128
    read_workers: int = 1
    write_workers: int = 1
    write_queue_gib: float = 4.0  # host pages that writes may pin; what comes above is dropped
    delay_s: float = 0.0  # mean of an exponential delay of each batch that is read
    sidecar_s: float = 0.0  # by which the window and the state of a prefix come after its pages
    deadline_s: float = 5.0  # a call that takes longer has failed
    tiering: Tiering = Tiering.inclusive
    write: StorageWrites = StorageWrites.on_back_up
    write_hits: int = 1  # write=selective: hits after which a page is worth writing
    breaker_failures: int = 3
    breaker_retry_s: float = 5.0
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        for name in ("read_gbps", "write_gbps", "deadline_s"):
            _positive(f"storage.{name}", getattr(self, name))
        for name in ("shared_gbps", "capacity_gib"):
            if getattr(self, name) is not None:
                _positive(f"storage.{name}", getattr(self, name))
        for name in (
            "query_s",
            "operation_s",
            "write_queue_gib",
            "delay_s",
            "sidecar_s",
            "breaker_retry_s",
        ):
            _at_least(f"storage.{name}", getattr(self, name), 0)
        is_written_late = self.write is StorageWrites.on_host_eviction
        if self.tiering is Tiering.exclusive and not is_written_late:
            raise ValueError(
                "storage.tiering=exclusive needs storage.write=on_host_eviction, got "
                f"{self.write.name}"
            )
        for name in (
            "batch_pages",
            "read_workers",
            "write_workers",
            "breaker_failures",
            "write_hits",
        ):
            _at_least(f"storage.{name}", getattr(self, name), 1)


class RealModel(Enum):
    """What computes under a real executor."""

    exact = "exact"  # the reference model: logits do not depend on how a sequence was cut
    timing = "timing"  # the work of a real model, with weights that mean nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """What carries out a step: the cost model, or a real model on real memory."""

    kind: str = "simulated"  # simulated or torch
    copy_path: str = "kernel"  # simulated: what copies pages, a kernel or the copy_engine
    device: str = "auto"  # torch: cpu, cuda or auto
    model: RealModel = RealModel.exact  # torch
    verify: bool = False  # torch: compare logits with a cold recompute
    storage_deadline_s: float = 10.0  # torch: a call that takes longer has failed

    def __post_init__(self) -> None:
        if self.copy_path not in ("kernel", "copy_engine"):
            raise ValueError(
                f"executor.copy_path must be kernel or copy_engine, got {self.copy_path!r}"
            )
        if self.verify and self.model is not RealModel.exact:
            raise ValueError(f"executor.verify needs executor.model=exact, got {self.model.value}")
        _positive("executor.storage_deadline_s", self.storage_deadline_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The serving loop."""

    jump: bool = True  # take runs of decode steps at once; the result is the same without
    check_invariants: bool = False  # check every law after every step


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerConfig:
    """Where metrics go besides the files of the run, which are always written."""

    wandb_mode: WandbMode = WandbMode.offline
    project: str = "hicache"
    interval_s: float = 10.0  # simulated seconds between rows of metrics.jsonl

    def __post_init__(self) -> None:
        _at_least("tracker.interval_s", self.interval_s, 0.001)


METRICS = (
    "cache/token_hit_rate",
    "request/ttft_s_mean",
    "request/ttft_s_p95",
    "gpu/prefill_seconds_per_request",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentConfig:
    """One run."""

    name: str = "adhoc"
    program: str = "replay"  # or capacity, sim_vs_real: what `python -m experiments.run` does
    metrics: tuple[str, ...] = METRICS  # keys of summary.json that tables and figures show
    seed: int = 0
    data_dir: str | None = None
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        check_name(self.name)
        _at_least("seed", self.seed, 0)
        tp = self.parallel.tp or self.model.default_tp
        for kind, heads in (
            (ComponentKind.full, self.model.num_kv_heads),
            (ComponentKind.swa, self.model.swa_num_kv_heads),
        ):
            is_dealt = kind in self.model.components and not self.model.latent_dim and heads
            if is_dealt and heads % tp and tp % heads:
                raise ValueError(
                    f"parallel.tp must divide the {heads} KV heads of {self.model.name} or be a "
                    f"multiple of them, got {tp}"
                )
        ranks, executor, storage = self.parallel.ranks, self.executor.kind, self.storage.kind
        if ranks > 1 and executor != "simulated":
            raise ValueError(
                f"parallel.ranks={ranks} needs executor.kind=simulated (real memory is dealt "
                f"out by parallel.tp), got {executor}"
            )
        if ranks > 1 and storage == "none":
            raise ValueError(f"parallel.ranks={ranks} needs a storage, got storage.kind=none")

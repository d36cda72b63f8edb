"""Every knob of a run, typed and checked.

These frozen dataclasses are what the code receives, and the schema that the command line is
checked against (`experiments/launch/schema.py` tells Hydra about them; nothing here needs Hydra). A
check that concerns one knob stands in `__post_init__` and names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from math import inf, isfinite
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from hicache.models import ComponentKind, HardwareConfig, ModelConfig
from hicache.models.plausible import check_machine, check_shape

# storages and policies of ours, by the knob that names them; module:Class names one of the user's
STORAGES = ("memory", "slab", "file", "redis", "mooncake")
STOP_POLICIES = ("best_effort", "wait_complete", "timeout", "marginal")
EVICTION_POLICIES = ("lru", "lfu", "slru", "fifo", "random")
CHECKPOINT_PLACEMENTS = ("end", "end_branch", "branch_or_end", "every")
LAST_CHUNK = "last_chunk"
SERVICE_ORDERS = ("fcfs", "longest_prefix", "shortest_remaining")
SWA_BUDGETS = ("no_host_term", "reports", "double", "sglang_0_5_23")
# where knobs of generators, of traces and of timeouts have an effect
GENERATED = "workload.kind=builtin,chat,agents"
ROUNDS = "workload.kind=multi_turn"
PREFIXES = "workload.kind=shared_prefix"
BENCHES = "workload.kind=multi_turn,shared_prefix"
BLOCKS = "workload.kind=trace,mooncake_conversation,mooncake_synthetic,mooncake_toolagent"
TRACED = BLOCKS + ",weka_agentic"
YOURS = "workload.kind=trace"
TIMED = "prefetch.stop=timeout,module:Class"
AGED = "scheduler.order=shortest_remaining,module:Class"
GRID = "cache.checkpoints=every,module:Class or cache.windows=every,module:Class"
SIMULATED, REAL = "executor.kind=simulated", "executor.kind=torch"
STORED = f"storage.kind={','.join(STORAGES)},module:Class"
GROUPS = {"prefetch": STORED, "storage": STORED}  # where all knobs of a group have an effect
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
    # keep the longest prefix that can be restored; its window and state are read before the request
    # goes on
    usable = "usable"


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


def knob(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    ours: tuple[str, ...] | None = None,
    one_of: tuple[str, ...] | None = None,
    only: str | None = None,
) -> Any:
    """A field and its limits, which `check_limits` holds it to; a knob may be none if its type is.

    `ours` are policies of this project: `module:Class` names one of the user's own beside them.
    `only` says where the knob has an effect: `group.other_knob=VALUE,VALUE`, or several of these
    joined by ` or `.
    """
    limits = {"least": least, "above": above, "most": most, "ours": ours, "one_of": one_of}
    return field(default=default, metadata={**limits, "only": only})


def share(default: float | None) -> Any:
    """A knob between 0 and 1."""
    return knob(default, least=0, most=1)


def check_limits(group: str, config: Any) -> None:
    """Check each knob of a group by itself.

    Raises:
        ValueError: one is not within its limits.
    """
    for item in fields(config):
        limits = item.metadata
        held = getattr(config, item.name)
        for value in held if isinstance(held, tuple | list) else (held,):
            if limits and value is not None:
                _check_limits(f"{group}.{item.name}".lstrip("."), value, limits)


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if limits["one_of"] is not None and value not in limits["one_of"]:
        raise ValueError(f"{name} must be one of {', '.join(limits['one_of'])}, got {value!r}")
    if limits["ours"] is not None and value not in limits["ours"] and ":" not in value:
        ours = ", ".join(limits["ours"])
        raise ValueError(f"{name} must be one of {ours} or module:Class, got {value!r}")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    least, above, most = limits["least"], limits["above"], limits["most"]
    if above is not None and value <= above:
        raise ValueError(f"{name} must be above {above}, got {value}")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} must be between {least} and {most}, got {value}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def inert_knobs(config: Any, prefix: str = "", top: Any = None) -> dict[str, str]:
    """The knobs that change nothing in this configuration, and what each of them needs."""
    found: dict[str, str] = {}
    of_group = GROUPS.get(prefix.partition(".")[0])
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            found |= inert_knobs(value, f"{prefix}{item.name}.", top or config)
        for only in (item.metadata.get("only"), of_group):
            if only is None:
                continue
            needs = [need.partition("=") for need in only.split(" or ")]
            is_met = any(
                place == prefix + item.name or _has_value(attrgetter(place)(top or config), values)
                for place, _, values in needs
            )
            if not is_met:
                found[prefix + item.name] = only
    return found


def _has_value(value: object, allowed: str) -> bool:
    name = value.name if isinstance(value, Enum) else str(value)
    return name in allowed.split(",") or (":" in name and ":" in allowed)


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

    kind: str = MISSING  # the loader or generator
    path: str | None = knob(None, only=TRACED)  # of the trace, in place of where it is looked for
    # of a trace of yours: tokens of a block; none: what suits all lines
    block_tokens: int | None = knob(None, least=1, only=YOURS)
    # with which everybody's prompts begin: that they share them makes two requests no conversation
    system_tokens: int = knob(0, least=0, only=BLOCKS)
    # of a log of chats, module:function from a text to its tokens; none: four letters a token
    tokenizer: str | None = knob(None, only=YOURS)
    limit: int | None = knob(None, least=1)  # first requests only
    # GPU utilisation without a cache: sessions are left out, or replayed again, to reach it
    load: float | None = knob(None, above=0)
    time_scale: float = knob(1.0, above=0)  # arrival times are stretched by this
    # keep every n-th token id: the same tree of prefixes, n times smaller
    token_stride: int = knob(1, least=1)
    # each session starts later by a seeded time below this
    start_jitter_s: float = knob(0.0, least=0)
    tokens: TraceTokens = knob(TraceTokens.reconstructed, only=TRACED)
    arrivals: Arrivals = Arrivals.causal
    # sessions at once, for traces whose sessions have no start time
    concurrency: int = knob(32, least=1)
    # closed: between the starts of the first of them
    stagger_s: float = knob(0.0, least=0, only="workload.arrivals=closed")
    think_cap_s: float = knob(600.0, least=0)  # longer think times are cut to this
    warm_up_s: float = knob(0.0, least=0)  # requests that arrive earlier are served and not counted
    # the workload in so many disjoint parts, each warmed up by what came before it; none: all of it
    windows: int | None = knob(None, least=1)
    window: int = knob(0, least=0)  # which of the windows is replayed
    start: StartState = StartState.cold
    abort_share: float = share(0.0)  # of the requests, whose users give up
    patience_s: float = knob(10.0, above=0)  # mean time after which they do
    num_sessions: int = knob(200, least=1, only=GENERATED + ",multi_turn")  # sessions, or clients
    session_rate: float = knob(1.0, above=0, only=GENERATED + ",weka_agentic")  # sessions a second
    # of `multi_turn`, whose clients are `num_sessions`: rounds that each of them asks
    rounds: int = knob(9, least=1, only=ROUNDS)
    turn_tokens: int = knob(4096, least=1, only=ROUNDS)  # that a round adds to the conversation
    first_tokens: int | None = knob(None, least=1, only=ROUNDS)  # of the first; none: as the others
    request_rate: float = knob(16.0, above=0, only=ROUNDS)  # requests a second at most
    parallel: int | None = knob(None, least=1, only=ROUNDS)  # requests at a time at most
    barrier: bool = knob(False, only=ROUNDS)  # no client begins a round before all ended the last
    # of `shared_prefix`: groups of prompts that begin alike
    groups: int = knob(250, least=1, only=PREFIXES)
    group_prompts: int = knob(5, least=1, only=PREFIXES)  # of each group
    prefix_tokens: int = knob(16000, least=1, only=PREFIXES)  # with which a group's prompts begin
    own_tokens: int = knob(256, least=1, only=PREFIXES)  # that each prompt ends with
    # requests a second, stage by stage
    stage_rates: tuple[float, ...] = knob((5.0, 10.0, 15.0), above=0, only=PREFIXES)
    stage_s: float = knob(60.0, above=0, only=PREFIXES)  # how long a stage lasts
    answer_tokens: int = knob(1, least=1, only=BENCHES)  # of every answer

    def __post_init__(self) -> None:
        check_limits("workload", self)
        if self.window >= (self.windows or 1):
            raise ValueError(
                f"workload.window must be less than workload.windows ({self.windows}), got "
                f"{self.window}"
            )

    @property
    def is_timed(self) -> bool:
        """Whether requests come at times of their own, and not because others were answered."""
        return self.arrivals is not Arrivals.closed and self.kind != "multi_turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How one engine is spread over devices, and how many engines there are.

    `tp` is what the cost model knows. Each of `ranks` keeps a tree and a part of every page of its
    own and reads that from a storage of its own; together they serve as one engine.
    """

    tp: int | None = knob(None, least=1)  # devices of an engine; none: the model's default
    ranks: int = knob(1, least=1)  # trees that must agree and serve as one engine
    hit_agreement: HitAgreement = HitAgreement.restorable
    # of one collective in every step; sglang issue 30511 gives 150 us
    collective_s: float = knob(150e-6, least=0)
    replicas: int = knob(1, least=1)  # engines, with a device and a host tier each
    # which engine a request goes to
    router: str = knob("sticky", one_of=("sticky", "round_robin", "prefix_load", "scored"))

    def __post_init__(self) -> None:
        check_limits("parallel", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The tree and its two memory tiers.

    `device_gib` and `host_gib` are totals over all devices of an engine; `device_gib` none takes
    all that weights leave of the devices. The shares split a tier between components; none takes
    the model's own. `unlimited` gives pools that never fill.
    """

    page_size: int = 64  # tokens
    # of all devices of an engine; none: all that weights leave
    device_gib: float | None = knob(40.0, above=0)
    host_gib: float = knob(256.0, least=0)  # of all hosts of an engine
    unlimited: bool = False  # pools that never fill
    # of the device tier, for windows; none: the model's own
    swa_device_share: float | None = share(None)
    swa_host_share: float | None = share(None)  # of the host tier, likewise
    # of the device tier, for states; none: the model's own
    mamba_device_share: float | None = share(None)
    mamba_host_share: float | None = share(None)  # of the host tier, likewise
    # tokens of full KV that the device pool holds; None means what device_gib gives. This and the
    # next five are taken as they are, whatever memory the machine has
    device_tokens: int | None = knob(None, least=1)
    swa_device_tokens: int | None = knob(None, least=1)  # tokens of window KV on the device
    device_states: int | None = knob(None, least=1)  # Mamba states on the device
    # tokens of full KV that the host pool holds; None means what host_gib gives
    host_tokens: int | None = knob(None, least=0)
    swa_host_tokens: int | None = knob(None, least=0)  # tokens of window KV on the host
    host_states: int | None = knob(None, least=0)  # Mamba states on the host
    # what leaves a tier first: one of ours, or a class of yours
    eviction: str = knob("lru", ours=EVICTION_POLICIES)
    eviction_args: dict[str, float] = field(default_factory=dict)  # of that class, by name
    write_policy: WritePolicy = WritePolicy.write_through
    load_back_threshold: int = knob(10, least=0)  # full tokens below which nothing is loaded back
    split_refreshes: bool = False  # a split counts as a use of what lies below it, as in sglang
    # window and state on the host count as used when they leave the device, as in sglang
    leaving_refreshes: bool = False
    trims_leaves: bool = False  # a leaf loses the pages that are missing, its last, as in vllm
    backs_up_answers: bool = True  # else prompts alone are copied to the host, as in vllm
    # at which page boundaries of a prompt a Mamba state is kept: at its end; there and where it
    # left an edge that had no state (its branch); at its branch or, without one, at its end; there
    # and every `checkpoint_tokens`; as a class of yours says. A prompt is published up to the last
    # of them, and the rest of it with the answer
    checkpoints: str = knob("end_branch", ours=CHECKPOINT_PLACEMENTS)
    checkpoints_args: dict[str, float] = field(default_factory=dict)  # of that class, by name
    checkpoint_tokens: int = knob(8192, least=1, only=GRID)  # grid of `every`
    # at which page boundaries of a prompt a window is kept: as `checkpoints`, or all that its last
    # chunk computed; a model with states keeps its windows where its states are
    windows: str = knob("end_branch", ours=(LAST_CHUNK, *CHECKPOINT_PLACEMENTS))
    windows_args: dict[str, float] = field(default_factory=dict)  # of that class, by name
    # a load-back takes all window pages of the nodes that hold the window, as in sglang; else the
    # window alone
    loads_whole_nodes: bool = False
    # slots that a running request holds: two, and any that it only keeps ready, as in sglang
    states_per_request: int = knob(2, least=2)
    # a state on the host is copied into the tree's slot and again into the request's, as in sglang;
    # else it is copied from slot to slot on the device
    loads_states_twice: bool = False

    def __post_init__(self) -> None:
        check_limits("cache", self)
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"cache.page_size must be a power of two, got {self.page_size}")
        is_grid = "every" in (self.checkpoints, self.windows)  # else there is none to be off
        if is_grid and self.checkpoint_tokens % self.page_size:
            raise ValueError(
                f"cache.checkpoint_tokens={self.checkpoint_tokens} must be a multiple of "
                f"cache.page_size={self.page_size}: change either of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchConfig:
    """How pages come from storage ahead of need."""

    # when a request stops waiting for storage: one of ours, or a class of yours
    stop: str = knob("timeout", ours=STOP_POLICIES)
    stop_args: dict[str, float] = field(default_factory=dict)  # of that class, by name
    threshold: int = knob(256, least=1)  # tokens: a shorter prefetch does not start
    cut: CutPolicy = CutPolicy.fit
    stage_at: StageAt = StageAt.enqueue
    commit: CommitPolicy = CommitPolicy.all_or_nothing
    await_sidecars: bool = True  # report 003: complete pages wait for their state and window
    deadline_from: DeadlineFrom = knob(DeadlineFrom.enqueue, only=TIMED)
    # that a prefetch may take whatever its length
    timeout_base_s: float = knob(1.0, least=0, only=TIMED)
    # that it may take for each 1,024 tokens more
    timeout_per_ki_token_s: float = knob(0.25, least=0, only=TIMED)
    evict_whole: bool = False  # short of host room, evict all that is wanted, as sglang does
    # a read that is shorter than a window brings the window pages it has, and the prefix holds the
    # rest of the window; else it brings none unless it begins the prompt, as in sglang
    short_windows: bool = True
    # of host tokens that prefetches may hold before more are declined
    occupied_share: float = share(0.5)

    def __post_init__(self) -> None:
        check_limits("prefetch", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Which request runs next, and what a step may hold."""

    # who is served first: one of ours, or a class of yours
    order: str = knob("fcfs", ours=SERVICE_ORDERS)
    order_args: dict[str, float] = field(default_factory=dict)  # of that class, by name
    chunk_tokens: int = knob(8192, least=1)  # extend tokens a step
    max_running: int = knob(256, least=1)  # requests that decode at once
    # requests waiting for their prefetch that one scan may pass over
    scan_limit: int = knob(128, least=1)
    batching: Batching = Batching.prefill_first
    # what a request is charged in the window pool: one of SWA_BUDGETS (hicache.scheduler.budget has
    # the formulas; double is wrong on purpose), or a class of yours as module:Class
    swa_budget: str = knob("reports", ours=SWA_BUDGETS)
    swa_budget_args: dict[str, float] = field(default_factory=dict)  # of that class, by name
    # seconds of remaining work forgiven for each second waited
    aging: float = knob(0.1, least=0, only=AGED)
    clip_new_tokens: int = 4096  # answer tokens that admission reserves at most
    new_token_ratio: float = share(0.7)  # share of them it reserves at first
    new_token_ratio_floor: float = share(0.098)  # share of them it reserves at last
    new_token_ratio_decay_steps: int = 600  # steps from the first share to the last

    def __post_init__(self) -> None:
        check_limits("scheduler", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultsConfig:
    """What goes wrong with storage on purpose, whichever engine it is.

    A call takes a log-normal time of median `delay_ms` longer. `error_rate` is of calls, the other
    rates are of pages. The engine is gone for `gone_for_s` (none: for good) from `gone_from_s` on.
    """

    preset: str = "none"  # what tables call it
    delay_ms: float = knob(0.0, least=0)  # median time that a call takes longer
    delay_sigma: float = knob(0.0, least=0)  # 0: always the median
    error_rate: float = share(0.0)  # of calls, which fail
    missing_rate: float = share(0.0)  # a page that is there cannot be read
    short_rate: float = share(0.0)  # half a page is read
    corrupt_rate: float = share(0.0)  # a wrong byte is read
    full_rate: float = share(0.0)  # a page is refused for want of room
    gone_from_s: float | None = knob(None, least=0)  # from when on the storage is gone
    gone_for_s: float | None = knob(None, least=0)  # for how long; none: for good
    failure_ms: float = knob(0.0, least=0)  # how long a call takes to fail; 0: refused at once

    def __post_init__(self) -> None:
        check_limits("storage.faults", self)
        if self.gone_for_s is not None and self.gone_from_s is None:
            raise ValueError(
                "storage.faults.gone_for_s needs storage.faults.gone_from_s, got "
                f"{self.gone_for_s} and none"
            )

    @property
    def is_harmless(self) -> bool:
        """Whether nothing ever goes wrong."""
        rates = (self.error_rate, self.missing_rate, self.short_rate, self.corrupt_rate)
        is_gone = self.gone_from_s is not None
        return not (self.delay_ms or any(rates) or self.full_rate or is_gone)

    def is_gone(self, now_s: float) -> bool:
        """Whether every call raises then."""
        if self.gone_from_s is None:
            return False
        end_s = inf if self.gone_for_s is None else self.gone_from_s + self.gone_for_s
        return self.gone_from_s <= now_s < end_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """The third tier: which engine, how much of it, and how fast simulated time says it is.

    `kind` is none, memory, slab, file, redis, mooncake or `module:Class`. `capacity_gib` none never
    fills.
    `read_gbps` and `write_gbps` are 10**9 bytes a second; `shared_gbps` caps their sum. After
    `breaker_failures` failed calls in a row the tier is left alone for `breaker_retry_s`.
    `tiering=exclusive` needs `write=on_host_eviction`.
    """

    kind: str = "none"  # none, memory, slab, file, redis or mooncake
    root: str | None = None  # directory or address, for engines that have one
    capacity_gib: float | None = knob(None, above=0)  # none: it never fills
    read_gbps: float = knob(6.0, above=0)  # 10**9 bytes a second
    write_gbps: float = knob(4.0, above=0)  # likewise
    shared_gbps: float | None = knob(None, above=0)  # cap of both together; none: they do not share
    query_s: float = knob(0.0005, least=0)  # round trip of one query
    operation_s: float = knob(0.0001, least=0)  # before the first byte of each batch
    batch_pages: int = knob(128, least=1)  # pages of one read or write
    read_workers: int = knob(1, least=1)  # batches read at once
    write_workers: int = knob(1, least=1)  # batches written at once
    # host GiB that writes may pin; further writes are dropped. None means half of the host,
    # or no limit with cache.unlimited
    write_queue_gib: float | None = knob(None, least=0)
    delay_s: float = knob(0.0, least=0)  # mean of an exponential delay of each batch that is read
    # by which the window and the state of a prefix come after its pages
    sidecar_s: float = knob(0.0, least=0)
    deadline_s: float = knob(5.0, above=0)  # a call that takes longer has failed
    tiering: Tiering = Tiering.inclusive
    write: StorageWrites = StorageWrites.on_back_up
    # write=selective: hits after which a page is worth writing
    write_hits: int = knob(1, least=1, only="storage.write=selective")
    # failed calls in a row after which the tier is left alone
    breaker_failures: int = knob(3, least=1)
    breaker_retry_s: float = knob(5.0, least=0)  # for how long
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        check_limits("storage", self)
        is_written_late = self.write is StorageWrites.on_host_eviction
        if self.tiering is Tiering.exclusive and not is_written_late:
            raise ValueError(
                "storage.tiering=exclusive needs storage.write=on_host_eviction, got "
                f"{self.write.name}"
            )


class RealModel(Enum):
    """What computes under a real executor."""

    exact = "exact"  # the reference model: logits do not depend on how a sequence was cut
    timing = "timing"  # the work of a real model, with weights that mean nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """What carries out a step: the cost model, or a real model on real memory."""

    # the cost model, or real memory and a real model
    kind: str = knob("simulated", one_of=("simulated", "torch"))
    # simulated: what copies pages, a kernel or the copy_engine
    copy_path: str = knob("kernel", one_of=("kernel", "copy_engine"), only=SIMULATED)
    device: str = knob("auto", one_of=("auto", "cpu", "cuda"), only=REAL)  # torch: where
    model: RealModel = knob(RealModel.exact, only=REAL)  # torch
    verify: bool = knob(False, only=REAL)  # torch: compare logits with a cold recompute
    # torch: a call that takes longer has failed
    storage_deadline_s: float = knob(10.0, above=0, only=REAL)

    def __post_init__(self) -> None:
        check_limits("executor", self)
        if self.verify and self.model is not RealModel.exact:
            raise ValueError(f"executor.verify needs executor.model=exact, got {self.model.value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The serving loop."""

    jump: bool = True  # take runs of decode steps at once; the result is the same without
    # find a reason for every computed token, which makes a replay some 19 % slower; nothing else
    # depends on it, and `experiments.explain` finds them afterwards
    explain: bool = False
    check_invariants: bool = False  # check every law after every step


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerConfig:
    """Where metrics go besides the files of the run, which are always written."""

    wandb_mode: WandbMode = WandbMode.offline
    project: str = "hicache"  # of W&B
    interval_s: float = knob(10.0, least=0.001)  # simulated seconds between rows of metrics.jsonl

    def __post_init__(self) -> None:
        check_limits("tracker", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodputConfig:
    """The rate up to which requests are served in time, sought by replays beside the run."""

    num_rates: int = knob(0, least=0)  # at which the workload is replayed; 0: it is not sought
    times: float = knob(1.0, above=0)  # the highest of them, in rates of the workload itself
    ttft_s: float = knob(2.0, above=0)  # a request is in time with its first token by then
    tpot_s: float = knob(0.05, above=0)  # and so long on the mean for each one after it
    share: float = knob(0.9, above=0, most=1, least=0)  # of the requests that are to be in time

    def __post_init__(self) -> None:
        check_limits("goodput", self)


METRICS = (
    "cache/token_hit_rate",
    "request/ttft_s_mean",
    "request/ttft_s_p95",
    "gpu/prefill_seconds_per_request",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentConfig:
    """One run."""

    name: str = "adhoc"  # of the experiment, and of its directory below outputs/
    program: str = "replay"  # or capacity, sim_vs_real: what `python -m experiments.run` does
    metrics: tuple[str, ...] = METRICS  # keys of summary.json that tables and figures show
    seed: int = knob(0, least=0)  # of arrivals, generators and storage delays
    data_dir: str | None = None  # where traces lie; by default what HICACHE_DATA says
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
    goodput: GoodputConfig = field(default_factory=GoodputConfig)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limits("", self)
        if self.model != ModelConfig():
            check_shape(self.model)
        if self.hardware != HardwareConfig():
            check_machine(self.hardware)
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

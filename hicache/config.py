"""Every knob of a run, typed and checked.

These frozen dataclasses hold the settings that the code receives. They are also the schema against
which the command line is checked (`hicache/runs/schema.py` registers them with Hydra; this module
does not need Hydra). `__post_init__` checks single knobs and names the knob in its errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from math import inf, isfinite
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from hicache.models import FORMATS, PLAIN, HardwareConfig, LayerKind, ModelConfig
from hicache.models.plausible import check_machine, check_shape

# storages and policies of ours, by the knob that names them
STORAGES = ("memory", "mooncake_master", "slab", "file", "redis", "mooncake")
STOP_POLICIES = ("best_effort", "wait_complete", "timeout", "marginal")
STOCK_POLICIES = (
    *("lru", "lfu", "sglang_slru", "fifo", "random", "slru", "s3fifo", "arc", "lecar", "gdsf"),
    *("marconi", "state_flops", "hints", "tinylfu", "oracle"),
)
WRITE_POLICIES = (
    "write_through",
    "write_through_selective",
    "write_back",
    "write_back_watermark",
)
STORAGE_WRITES = ("on_back_up", "selective", "on_host_eviction")
CHECKPOINT_PLACEMENTS = ("end", "end_branch", "chunk_branch", "branch_or_end", "every")
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
TIMED = "prefetch.stop=timeout"
AGED = "scheduler.order=shortest_remaining"
GRID = "cache.checkpoints=every or cache.windows=every"
SIMULATED, REAL = "executor.kind=simulated", "executor.kind=torch"
STORED = f"storage.kind={','.join(STORAGES)},module:Class"
GROUPS = {"prefetch": STORED, "storage": STORED}  # where all knobs of a group have an effect
# bounds of numbers that have no narrower ones: 30 years of seconds, 1e9 GiB or GB/s
MOST_INT, MOST_FLOAT, LEAST_FLOAT = (1 << 31) - 1, 1e9, 1e-6
MISSING = "???"  # OmegaConf's mark of a value that must be given


class Tiering(Enum):
    """Whether a page may be in host memory and in storage at the same time."""

    inclusive = "inclusive"  # it may
    exclusive = "exclusive"  # storage drops a page once the host has read it


class CutPolicy(Enum):
    """What happens to a prefetch that does not fit in host memory.

    A prefetch reads pages from storage into host memory before a request runs.
    """

    abandon = "abandon"  # it is dropped
    fit = "fit"  # it is cut to the whole pages that fit
    # it is cut to the longest prefix that fits and that the model can resume from
    restorable = "restorable"


class StageAt(Enum):
    """When a prefetch allocates its host pages.

    Host pages lie in host memory. A prefetch reads pages from storage into them before a request
    runs.
    """

    enqueue = "enqueue"  # when the request is queued, for all of the prompt that is not cached
    hit = "hit"  # when storage has answered, for the pages that it has


class DeadlineFrom(Enum):
    """When the time limit of prefetch.stop=timeout starts to count.

    With that setting, a queued request waits a limited time for its pages from storage.
    """

    enqueue = "enqueue"  # when the request is queued
    first_poll = "first_poll"  # when the scheduler first considers the request


class CommitPolicy(Enum):
    """What is kept of an incomplete prefetch if the model has sliding windows or Mamba states.

    A prefetch (a read from storage into host memory) is incomplete if it stops before its last
    page.
    """

    all_or_nothing = "all_or_nothing"  # nothing
    # the longest prefix that can be restored, whose window and state are read before the request
    # starts
    usable = "usable"


class HitAgreement(Enum):
    """Which storage hit the ranks of an engine agree on if their storages differ.

    A storage hit is the length of the prompt's prefix that a rank finds in its own storage.
    """

    restorable = "restorable"  # the longest prefix that every rank can restore
    # the minimum of the ranks' longest hits, which some rank may be unable to restore
    min_of_maxima = "min_of_maxima"


class WindowHit(Enum):
    """How a request that starts from a hit gets its sliding window."""

    restore = "restore"  # from the pages that the cache keeps
    replay = "replay"  # by computing the window's tokens again


class Batching(Enum):
    """Whether prefill and decode share a step.

    A step is one forward pass of the model over a batch.
    """

    prefill_first = "prefill_first"  # a step that computes prompt tokens decodes nothing
    mixed = "mixed"  # one step does both
    # a step that computes prompt tokens decodes nothing, as in SGLang: the prompts of a step take
    # their pages together; while memory lacks, the queue is not considered until a running request
    # leaves; and a retracted request goes to the end of the queue
    prompts_together = "prompts_together"
    # the same, but a step that computes prompt tokens also decodes if it has pages for that, as in
    # SGLang with --enable-mixed-chunk
    prompts_mixed = "prompts_mixed"
    # one step does both, as in vLLM: first the requests that run, in order of admission, then those
    # that wait. A decode takes a token of scheduler.chunk_tokens; a chunk may end at any token, and
    # can be hit as soon as it is planned; a request starts if its whole prompt fits, and nothing is
    # reserved for answers; the last request that was admitted is retracted, to the head of the
    # queue; and one whose prefix is loaded from the host computes after the load-back
    running_first = "running_first"


class Refresh(Enum):
    """When a request marks its cached prefix as just used, so that it is evicted later.

    Whatever the setting, the prefix counts as used when the request adds pages behind it.
    """

    admitted = "admitted"  # when the request is admitted, as in vLLM
    considered = "considered"  # each time the scheduler considers the request
    # also when the request arrives, if storage is looked up for it, as in SGLang
    arrived = "arrived"


class Arrivals(Enum):
    """The rule that sets the arrival time of each request of a workload."""

    open = "open"  # at its time in the trace
    # at its time in the trace, but not before its session's previous turn is answered
    causal = "causal"
    closed = "closed"  # when the previous turn is answered and the think time has passed


class TraceTokens(Enum):
    """How prompts are rebuilt from a trace that records only block hashes."""

    # a follow-up prompt repeats the previous turn's partial last block and answer
    reconstructed = "reconstructed"
    # each block hash stands for tokens of its own, and answers never appear in later prompts
    literal = "literal"


class WandbMode(Enum):
    """How a run is reported to Weights & Biases."""

    disabled = "disabled"  # not at all
    offline = "offline"  # in files that `wandb sync` can upload
    online = "online"  # uploaded during the run


class StartState(Enum):
    """What the cache holds when a run starts."""

    cold = "cold"  # nothing
    # storage holds the KV of all prompts and answers, as after a first pass over the workload
    warm_storage = "warm_storage"


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
    """Return a dataclass field for a setting, with limits that `check_limits` enforces.

    `least` and `most` are inclusive bounds; `above` is an exclusive lower bound. A number without
    `most` is at most `MOST_INT` or `MOST_FLOAT`, and one above 0 at least `LEAST_FLOAT`: beyond,
    times and sizes leave the range of their types. `ours` lists the
    built-in names; a user's class, written `module:Class`, is allowed as well. `one_of` lists the
    only allowed values. None is allowed if the type of the field allows it. `only` names the
    settings with which this setting has an effect. It is `group.setting=VALUE,VALUE`, or several of
    these joined by ` or `.
    """
    limits = {"least": least, "above": above, "most": most, "ours": ours, "one_of": one_of}
    metadata = {**limits, "only": only}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def share(default: float | None) -> Any:
    """Return a dataclass field for a setting between 0 and 1, both included."""
    return knob(default, least=0, most=1)


def check_limits(group: str, config: Any) -> None:
    """Check that each setting in `config` lies within the limits of its dataclass field.

    `group` is the name of the group of settings, for error messages.

    Raises:
        ValueError: a value is outside its limits.
    """
    for item in fields(config):
        limits = item.metadata
        held, name = getattr(config, item.name), f"{group}.{item.name}".lstrip(".")
        values = (
            {f"{name}.{key}": each for key, each in held.items()}
            if isinstance(held, dict)
            else {name: held}
        )
        for place, value in values.items():
            for each in value if isinstance(value, tuple | list) else (value,):
                if limits and each is not None:
                    if isinstance(each, int | float) and not isinstance(each, bool):
                        _check_range(place, each, limits)
                    _check_limits(place, each, limits)


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if limits["one_of"] is not None and value not in limits["one_of"]:
        ours = ", ".join(limits["one_of"])
        hint = "; a class of your own goes in cache.policy" if ":" in str(value) else ""
        raise ValueError(f"{name} must be one of {ours}, got {value!r}{hint}")
    if limits["ours"] is not None and value not in limits["ours"] and ":" not in value:
        ours = ", ".join(limits["ours"])
        raise ValueError(f"{name} must be one of {ours} or module:Class, got {value!r}")


def _check_range(name: str, value: float, limits: Mapping[str, Any]) -> None:
    if not isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    least, above, most = limits["least"], limits["above"], limits["most"]
    if above is not None and value <= above:
        raise ValueError(f"{name} must be above {above}, got {value}")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} must be between {least} and {most}, got {value}")
    if above is not None and isinstance(value, float):
        least = max(least or 0, LEAST_FLOAT)
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    top = MOST_FLOAT if isinstance(value, float) else MOST_INT
    if value > top:
        raise ValueError(f"{name} must be at most {top:,}, got {value:g}")


def inert_knobs(config: Any, prefix: str = "", top: Any = None) -> dict[str, str]:
    """Return the settings that have no effect in `config`, each with the setting that it needs.

    For example, `storage.write_hits` needs `storage.write=selective`. Callers give only `config`;
    the other parameters are for the recursion into groups of settings.
    """
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
    """Raise ValueError if a run of this name would write files outside the folder `outputs/`."""
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise ValueError(f"name must be a relative path without `..`, below outputs/, got {name!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadConfig:
    """Which requests are replayed, and when they arrive."""

    # Trace loader or generator that makes the requests; `workload=NAME` sets it together with its
    # defaults.
    kind: str = MISSING
    # Path of the trace file. None means the trace's usual file name in `data_dir`; workload=trace
    # needs a path.
    path: str | None = knob(None, only=TRACED)
    # Tokens per block hash in the trace. None means the one size that fits every line.
    block_tokens: int | None = knob(None, least=1, only=YOURS)
    # Unit of the times in your trace: s, ms, us or ns. None means the unit that its form has; rows
    # that leave it open are read in ms, and tables and chats in s.
    time_unit: str | None = knob(None, one_of=("s", "ms", "us", "ns"), only=YOURS)
    # Largest share of the rows of a trace that may be left out because they cannot be read, and
    # largest share that may be completed because they have no answer. Three rows may always be, but
    # less than half; 1 allows any number.
    odd_rows: float = knob(0.1, least=0, most=1, only=TRACED)
    # Tokens of an image in a text log, where the usage that the log gives does not say it.
    image_tokens: int = knob(1000, least=1, only=YOURS)
    # Length in tokens of the system prompt that all requests of the trace share. Where the trace
    # names no sessions, two requests count as turns of one conversation only if they share more
    # than this.
    system_tokens: int = knob(0, least=0, only=BLOCKS)
    # Tokenizer of a text log: a tokenizer.json of Hugging Face, a folder with one, the name of a
    # model on its hub, or module:function, which takes a text and returns its tokens. None means an
    # approximation of four letters per token.
    tokenizer: str | None = knob(None, only=YOURS)
    # Maximum number of requests, counted from the start of the workload. None means all.
    limit: int | None = knob(None, least=1)
    # Maximum tokens of a prompt and its answer together. A session ends before its first longer
    # request, and the run says how many requests that leaves out. None means no limit.
    max_context: int | None = knob(None, least=1)
    # Target GPU utilization, computed as if nothing were cached (0.6 means 60 %); sessions are left
    # out or repeated with new tokens to reach it. None means the workload as it is.
    load: float | None = knob(None, above=0, least=0, most=1000)
    # Factor on all arrival times; 2 halves the request rate.
    time_scale: float = knob(1.0, above=0)
    # Keep only token ids that are multiples of this number, which makes prompts and answers that
    # many times shorter; shared prefixes stay shared. 1 keeps all tokens.
    token_stride: int = knob(1, least=1)
    # Maximum random delay in seconds of each session's start, uniform from 0. It spreads the
    # arrivals of a trace with coarse timestamps.
    start_jitter_s: float = knob(0.0, least=0, most=1e6)
    tokens: TraceTokens = knob(TraceTokens.reconstructed, only=TRACED)
    arrivals: Arrivals = Arrivals.causal
    # Number of sessions active at once when workload.arrivals=closed; the next one starts when one
    # ends.
    concurrency: int = knob(32, least=1)
    # Seconds between the starts of the first `workload.concurrency` sessions.
    stagger_s: float = knob(0.0, least=0, only="workload.arrivals=closed")
    # Maximum think time in seconds between an answer and the next turn of its session; longer ones
    # are shortened to it.
    think_cap_s: float = knob(600.0, least=0)
    # Length of the warm-up in seconds: requests that arrive earlier are served but not counted in
    # the results.
    warm_up_s: float = knob(0.0, least=0)
    # Number of equal parts into which the workload is cut to get independent runs; each run replays
    # one (`workload.window`), after its warm-up. None means the whole workload.
    windows: int | None = knob(None, least=1)
    # Index of the part to replay, from 0, when `workload.windows` is set.
    window: int = knob(0, least=0)
    start: StartState = StartState.cold
    # Fraction of requests whose client is impatient: it aborts the request if it is not answered in
    # time (`workload.patience_s`).
    abort_share: float = share(0.0)
    # Mean time in seconds from arrival until an impatient client aborts its request, drawn from an
    # exponential distribution.
    patience_s: float = knob(10.0, above=0)
    # Number of sessions to generate; with workload=multi_turn, the number of clients.
    num_sessions: int = knob(200, least=1, most=10**7, only=GENERATED + ",multi_turn")
    # Mean rate at which sessions start (a Poisson process), in sessions per second.
    session_rate: float = knob(1.0, above=0, only=GENERATED + ",weka_agentic,trace")
    # Number of turns that each client asks.
    rounds: int = knob(9, least=1, most=10**5, only=ROUNDS)
    # New prompt tokens in each turn, besides the previous answer.
    turn_tokens: int = knob(4096, least=1, only=ROUNDS)
    # Prompt tokens of each client's first turn. None means `workload.turn_tokens`.
    first_tokens: int | None = knob(None, least=1, only=ROUNDS)
    # Maximum mean rate at which clients send requests (a Poisson process), in requests per second.
    request_rate: float = knob(16.0, above=0, only=ROUNDS)
    # Maximum number of requests in flight at once. None means no limit.
    parallel: int | None = knob(None, least=1, only=ROUNDS)
    # Which of the clients that are ready asks next: random (drawn) or fifo (the one that has been
    # ready for longest), as in SGLang's bench_multiturn.
    ready_queue: str = knob("random", one_of=("random", "fifo"), only=ROUNDS)
    # Start a turn only when all clients have received the answer to their previous turn.
    barrier: bool = knob(False, only=ROUNDS)
    # Number of groups of prompts; the prompts of one group share a prefix.
    groups: int = knob(250, least=1, most=10**6, only=PREFIXES)
    # Number of different prompts in each group of prompts that share a prefix.
    group_prompts: int = knob(5, least=1, most=10**6, only=PREFIXES)
    # Length in tokens of the prefix that the prompts of one group share.
    prefix_tokens: int = knob(16000, least=1, only=PREFIXES)
    # Length in tokens of the part of each prompt that no other prompt shares.
    own_tokens: int = knob(256, least=1, only=PREFIXES)
    # Request rate of each load stage in requests per second; the stages follow one another.
    stage_rates: tuple[float, ...] = knob(
        (5.0, 10.0, 15.0), above=0, least=0, most=1e4, only=PREFIXES
    )
    # Duration of each load stage in seconds.
    stage_s: float = knob(60.0, above=0, least=0, most=1e5, only=PREFIXES)
    # Start a load stage only when all requests of the previous one have ended. False starts it on
    # time.
    drain: bool = knob(False, only=PREFIXES)
    # Length in tokens of the answer to every request; in a trace, where no row has an answer.
    answer_tokens: int = knob(1, least=1, only=BENCHES + ",trace")

    def __post_init__(self) -> None:
        check_limits("workload", self)
        if self.window >= (self.windows or 1):
            raise ValueError(
                f"workload.window must be less than workload.windows ({self.windows}), got "
                f"{self.window}"
            )

    @property
    def is_timed(self) -> bool:
        """True if requests have arrival times; False if each waits for an earlier answer."""
        waits = self.has_rounds or (self.kind == "shared_prefix" and self.drain)
        return self.arrivals is not Arrivals.closed and not waits

    @property
    def has_rounds(self) -> bool:
        """True if clients ask in rounds, as in the workload `multi_turn`.

        A client then sends each request after the answer to its previous request.
        """
        return self.kind == "multi_turn"

    @property
    def stage_ends_s(self) -> tuple[float, ...]:
        """The end of each load stage, in seconds from the start of the workload.

        A load stage is a period with a fixed request rate. The tuple is empty if there are no
        stages.
        """
        if self.kind != "shared_prefix" or self.windows is not None:
            return ()
        stage_s = self.stage_s * self.time_scale
        return tuple(stage_s * (stage + 1) for stage in range(len(self.stage_rates)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How one engine is spread over devices, and how many engines there are.

    `tp` is the tensor-parallel size, on which the simulated times depend. If `ranks` is above 1,
    each rank of an engine has its own radix tree and its own storage. All ranks must then agree on
    every cache hit.
    """

    # Tensor-parallel size: devices per engine. None means the model's default (`model.default_tp`).
    tp: int | None = knob(None, least=1)
    # Number of groups into which expert parallelism divides the devices of an engine: each group
    # holds its part of the experts whole, and divides them among its devices. 1 means that every
    # device holds a slice of every expert.
    ep: int = knob(1, least=1)
    # Number of cache ranks per engine. Each rank has its own radix tree, its own storage and a
    # slice of every page, and all must take the same hits. 1 means one tree for the whole engine.
    ranks: int = knob(1, least=1, most=1024)
    # Seconds that each step takes for the all-reduce by which ranks agree on prefetches and
    # transfers. SGLang issue 30511 reports 150 us.
    collective_s: float = knob(150e-6, least=0, most=1e4)
    # Number of engines; each has its own device and host tiers, and all share one storage.
    replicas: int = knob(1, least=1, most=1024)
    # How requests are assigned to engines: sticky (a session stays on one engine), round_robin,
    # prefix_load (the engine with the longest cached prefix, unless it has over 8 requests more
    # than the least busy one), scored (a weighted sum of queue, free memory and cached prefix, as
    # in llm-d), or scored_device (the same, but of the prefix on the device only).
    router: str = knob(
        "sticky", one_of=("sticky", "round_robin", "prefix_load", "scored", "scored_device")
    )

    def __post_init__(self) -> None:
        check_limits("parallel", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSizes:
    """Sizes of the pools of one tier, by kind of data: full, swa, mamba, or a window of its own.

    A kind that is not named has the size that follows from the memory of the tier and its share.
    """

    # Sizes of pools in tokens, by kind with pages, such as {full: 100000, swa: 4096}. A given size
    # is used even if it exceeds the machine's memory.
    tokens: dict[str, int] = knob({}, least=0)
    # Number of Mamba states. None means the number that follows from the memory of the tier.
    states: int | None = knob(None, least=0)
    # Fractions of the tier's memory, by kind other than full, which gets the rest. A kind that is
    # not named has the model's value, such as `model.swa_host_share`.
    share: dict[str, float] = knob({}, least=0, most=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSizes(TierSizes):
    """Sizes of the device's pools, also by an engine's own rule."""

    # Fraction of each device's memory for weights and the device tier together, by SGLang's rule
    # (--mem-fraction-static): the rest is left free. Replaces `cache.device_gib`. None means not
    # used.
    sglang_fraction: float | None = share(None)
    # Fraction of each device's memory that the engine may use in all, by vLLM's rule
    # (--gpu-memory-utilization): what weights and activations leave of it is the device tier.
    # Replaces `cache.device_gib`. None means not used.
    vllm_fraction: float | None = share(None)

    def __post_init__(self) -> None:
        check_limits("cache.device", self)
        if self.sglang_fraction is not None and self.vllm_fraction is not None:
            raise ValueError(
                "cache.device.sglang_fraction and cache.device.vllm_fraction exclude each other"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSizes(TierSizes):
    """Sizes of the host's pools, also by SGLang's own settings."""

    # Size of the host tier as a multiple of the device tier, pool by pool (SGLang's
    # --hicache-ratio). Replaces `cache.host_gib`. None means not used.
    sglang_ratio: float | None = knob(None, least=0)
    # Host memory for the cache in GiB for each device of an engine (SGLang's --hicache-size).
    # Replaces `cache.host_gib`. None means not used.
    sglang_gib: float | None = knob(None, least=0)

    def __post_init__(self) -> None:
        check_limits("cache.host", self)
        if self.sglang_ratio is not None and self.sglang_gib is not None:
            raise ValueError("cache.host.sglang_ratio and cache.host.sglang_gib exclude each other")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The prefix cache: its radix tree, its device tier and its host tier."""

    # Tokens per KV page, the unit of allocation and transfer; a power of two.
    page_size: int = knob(64, least=1, most=1 << 20)
    # Device memory for the cache in GiB, summed over all devices of an engine. None means all
    # memory that weights and activations leave free.
    device_gib: float | None = knob(40.0, above=0)
    # Host memory for the cache in GiB, summed over all hosts of an engine. None means twice the
    # device memory for the cache, as by default in SGLang.
    host_gib: float | None = knob(256.0, least=0)
    # Other ways to give the sizes of the pools of each tier.
    device: DeviceSizes = field(default_factory=DeviceSizes)
    host: HostSizes = field(default_factory=HostSizes)
    # Format of the numbers of pages and states on the host: plain (the model's own), int8 or fp8
    # (with a scale for each token and head), fp4 (with a scale for each 16 elements, too), or bf16
    # (of fp32 states). Copies between device and host change it. Any but plain is lossy.
    host_format: str = knob(PLAIN, one_of=FORMATS)
    # Give the device and host tiers unlimited capacity, so that nothing is evicted;
    # `cache.device_gib` and `cache.host_gib` are ignored.
    unlimited: bool = False
    # What a full device or host tier evicts first: lru (what was used least recently), another
    # built-in policy, or a class of your own as module:Class. A class of your own takes every
    # decision that it has a method for, also those of other settings, and is told of events.
    policy: str = knob("lru", ours=STOCK_POLICIES)
    # Keyword arguments passed to the class of `cache.policy`.
    policy_args: dict[str, float] = field(default_factory=dict)
    # When device pages are copied to the host: write_through (when they are inserted into the
    # tree), write_through_selective (when a later request hits or inserts them), write_back (when
    # they are evicted from the device) or write_back_watermark (as write_back, and when they are
    # inserted while less than `cache.write_watermark` of the device is free).
    write_policy: str = knob("write_through", one_of=WRITE_POLICIES)
    # Free share of a device pool below which cache.write_policy=write_back_watermark copies what is
    # inserted.
    write_watermark: float = knob(
        0.2, least=0, most=1, only="cache.write_policy=write_back_watermark"
    )
    # How the kinds of data divide a tier: split (each kind has its own pool), shared (on the host,
    # all kinds take pages from the same bytes, and what is evicted to make room for one kind may be
    # of another: the data of any kind that was used least recently, or what `cache.policy` chooses)
    # or shared_both (on the device too, as in vLLM). Only simulated runs can share.
    pools: str = knob("split", one_of=("split", "shared", "shared_both"))
    # Whether the host keeps data that is loaded back to the device: inclusive (it does) or
    # exclusive (it frees its copy as soon as the device holds the data and no copy reads or writes
    # it). exclusive needs cache.write_policy=write_back and storage.kind=none, and is for simulated
    # runs only.
    device_host: str = knob("inclusive", one_of=("inclusive", "exclusive"))
    # Minimum host hit, in tokens, that is copied back to the device; a shorter one is recomputed,
    # unless its window or state must be loaded anyway. 10 is SGLang's default.
    load_back_threshold: int = knob(10, least=0)
    # When a leaf of the radix tree or a window is evicted, drop only as many of its pages as are
    # needed, from its end, as vLLM does. Windows and states then leave in the order in which
    # requests free them, and stay on the device when their full-attention KV leaves it; the host
    # drops windows with the pages of their requests. False evicts all of it.
    trims_leaves: bool = False
    # Let the host drop its copies of data that the device holds too, in the order of
    # `cache.policy`, as vLLM does. False keeps them until the device evicts the data, as SGLang
    # does, so that a host smaller than the device soon takes no new copies, and storage neither.
    # No effect with cache.write_policy=write_back.
    evicts_mirrors: bool = False
    # Copy generated answers to the host as well as prompts. False copies prompts only, as vLLM
    # does.
    backs_up_answers: bool = True
    # Of the ends of prompts and answers, keep windows and states only where an equal prompt can
    # resume, at the last page boundary before a prompt's last token, and look for branches on the
    # device alone, as vLLM does; other windows and states that are loaded from the host belong to
    # the request that loads them, and leave the device when it has read them. False keeps windows
    # and states at the last page boundary of prompts and of answers, where a longer prompt can
    # resume.
    keeps_for_repeats: bool = False
    # Insert and copy an answer whenever it has grown by this many pages. None means once, when it
    # is complete, as do models with Mamba states, which have no state to resume from before.
    answer_pages: int | None = knob(None, least=1)
    # When a prompt consists of whole pages and the host holds the last one, load that page as well,
    # so that only the last token is computed again, as vLLM does for models with full attention
    # alone. False computes the whole page again.
    loads_last_page: bool = False
    # Prompt positions at which a Mamba state is saved: end (the last page boundary of the prompt),
    # end_branch (the end, and where the prompt diverges from a cached one), chunk_branch (as
    # end_branch, and the end of each chunk), branch_or_end (of each chunk where the prompt
    # diverges, or else its end, as SGLang does), every (as end_branch, and every
    # `cache.checkpoint_tokens` tokens). The cache holds full KV as soon as its chunk is computed;
    # with branch_or_end the part of a chunk after its position follows with the next chunk.
    checkpoints: str = knob("chunk_branch", one_of=CHECKPOINT_PLACEMENTS)
    # Distance in tokens between saved Mamba states or windows; a multiple of `cache.page_size`.
    checkpoint_tokens: int = knob(8192, least=1, only=GRID)
    # How a request gets the sliding window before the end of its hit: restore (the cache keeps
    # windows as it keeps full KV) or replay (no tier keeps windows, any full KV is a hit, and the
    # request computes the hit's last window again, as vLLM does for DeepSeek-V4.1; simulated only).
    window: WindowHit = WindowHit.restore
    # Prompt positions at which the sliding window is copied to the host, so that a later request
    # can resume there: the choices of `cache.checkpoints`. A model that also has Mamba states saves
    # windows where it saves states.
    windows: str = knob("end_branch", one_of=CHECKPOINT_PLACEMENTS)
    # A prompt diverges from a cached one also where storage holds the full KV of its first tokens
    # and no window or state to resume there. False looks at device and host alone, as SGLang does.
    storage_branches: bool = True

    def __post_init__(self) -> None:
        check_limits("cache", self)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"cache.page_size must be a power of two, got {self.page_size}")
        is_grid = "every" in (self.checkpoints, self.windows)  # else there is none to be off
        if is_grid and self.checkpoint_tokens % self.page_size:
            raise ValueError(
                f"cache.checkpoint_tokens={self.checkpoint_tokens} must be a multiple of "
                f"cache.page_size={self.page_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchConfig:
    """How pages are read from storage into host memory before a request runs."""

    # How long a queued request waits for its prefetch from storage: best_effort (not at all),
    # wait_complete (until all pages are read), timeout (up to a limit that grows with the length of
    # the prefetch) or marginal (as long as waiting is expected to cost less than recomputing).
    stop: str = knob("timeout", one_of=STOP_POLICIES)
    # Seconds of waiting that prefetch.stop=marginal takes for a second of computing while no other
    # request waits. None means 2, or 1 if several engines share the storage.
    patience: float | None = knob(None, above=0, only="prefetch.stop=marginal")
    # Minimum length in tokens of a prefetch: nothing is read if fewer tokens are missing from the
    # cache, or if storage has fewer of them. 256 is SGLang's default.
    threshold: int = knob(256, least=1)
    cut: CutPolicy = CutPolicy.fit
    stage_at: StageAt = StageAt.enqueue
    commit: CommitPolicy = CommitPolicy.all_or_nothing
    deadline_from: DeadlineFrom = knob(DeadlineFrom.enqueue, only=TIMED)
    # Fixed part, in seconds, of the time limit that prefetch.stop=timeout puts on a prefetch. 1 is
    # SGLang's default.
    timeout_base_s: float = knob(1.0, least=0, only=TIMED)
    # Seconds that prefetch.stop=timeout adds to the time limit of a prefetch for each 1,024 tokens
    # requested. 0.25 is SGLang's default.
    timeout_per_ki_token_s: float = knob(0.25, least=0, only=TIMED)
    # Maximum size of all running prefetches together, as a fraction of the tokens that the host
    # tier holds; further prefetches are declined. 0.5 is SGLang's value.
    occupied_share: float = share(0.5)

    def __post_init__(self) -> None:
        check_limits("prefetch", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuirksConfig:
    """Inefficiencies of other serving engines that a run can reproduce for comparison.

    They cost hits, time or memory. The defaults reproduce none of them.
    """

    # When a match ends inside a tree node and splits it, also refresh the recency of the part that
    # did not match, as SGLang does.
    split_refreshes: bool = False
    # Order windows and states that only the host holds by the time at which they left the device or
    # their last lock ended, as SGLang does. False orders them by their last use.
    leaving_refreshes: bool = False
    # When a prompt is computed, free the window pages of its last chunk that no saved position
    # needs, as SGLang does. False keeps them on the device until they are evicted.
    trims_windows: bool = False
    # When a sliding window is loaded back from the host, also load the older window pages of the
    # tree node in which it starts, as SGLang does. False loads only the pages of the window.
    loads_whole_nodes: bool = False
    # When a prefetch, or a copy of windows or states from the device, does not fit in free host
    # memory, evict as many pages as it needs in all, as SGLang does. False evicts only as many as
    # are missing. Copies are made node by node: under write_back all data of a node when the first
    # of it leaves, and later data of it never; full-attention KV that is on the device, too, is the
    # first to leave the host.
    evicts_whole: bool = False
    # Mamba state slots that a running request occupies: one for its current state, one for its next
    # checkpoint; more are reserved and stay empty. SGLang reserves 3. With 1, as in vLLM, a
    # checkpoint takes its slot when it is computed, and answers have none.
    states_per_request: int = knob(2, least=1)
    # Copy a state that is loaded back from the host twice over the link, into the slot of the tree
    # and into that of the request, as SGLang does. False copies it once over the link, then from
    # slot to slot on the device.
    loads_states_twice: bool = False
    # In a step with several chunks, compute attention to the tokens before each chunk as if all
    # chunks were as long as the longest, as SGLang's Triton attention does (extend_attention.py).
    pads_chunks: bool = False
    # A prefetch that is shorter than a window and does not begin the prompt reads the window pages
    # it has, and the rest of the window is taken from the prefix. False reads none, as SGLang does.
    short_windows: bool = knob(True, only=STORED)
    # When all pages of a prefetch are read, wait for its window and state as well. False starts the
    # request without them, so that it may not be able to use the pages.
    await_sidecars: bool = knob(True, only=STORED)
    hit_agreement: HitAgreement = HitAgreement.restorable

    def __post_init__(self) -> None:
        check_limits("compat.quirks", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompatConfig:
    """Which serving engine's choices a run makes, such as SGLang's or vLLM's.

    `compat=NAME` on the command line sets them all.
    """

    quirks: QuirksConfig = field(default_factory=QuirksConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Which request runs next, and how much one step computes."""

    # Order in which waiting requests are considered: fcfs (by arrival), longest_prefix (longest
    # cached prefix first) or shortest_remaining (least prefill work first, with aging).
    order: str = knob("fcfs", one_of=SERVICE_ORDERS)
    # Time in seconds that the server spends on each request besides the scheduler and the GPU:
    # HTTP, tokenization, detokenization. It delays a request and does not occupy the engine.
    server_s: float = knob(0.0, least=0, most=1e4)
    # Time in seconds that the engine spends on each request that it begins while its GPU waits. It
    # makes simulated steps longer. 0 means that such work is done while the GPU computes.
    begin_s: float = knob(0.0, least=0, most=1e4)
    # Maximum number of prompt tokens computed per step (chunked prefill).
    chunk_tokens: int = knob(8192, least=1)
    # Maximum number of requests that run at once, in prefill or decode.
    max_running: int = knob(256, least=1)
    # Maximum number of requests waiting for storage that the scheduler skips in one pass over the
    # queue.
    scan_limit: int = knob(128, least=1)
    batching: Batching = Batching.prefill_first
    # Plan a step while the one before it runs, as SGLang and vLLM do on a GPU: a request whose
    # answer is complete holds its memory until the next step is planned.
    asynchronous: bool = False
    refresh: Refresh = Refresh.considered
    # How many tokens of the sliding-window pool admission charges a request: reports (the larger of
    # its chunk and the window, plus window tokens loaded back from the host), no_host_term (without
    # those loaded back, so that prefill can run out of memory), double (those loaded back twice,
    # for comparison) or sglang_0_5_23 (the formula of that release).
    swa_budget: str = knob("reports", one_of=SWA_BUDGETS)
    # Seconds of prefill work subtracted from a request's rank for each second that it has waited,
    # so that long prompts are not starved.
    aging: float = knob(0.1, least=0, only=AGED)
    # Maximum number of answer tokens per request for which admission reserves memory, however long
    # the answer may become. 4,096 is SGLang's value.
    clip_new_tokens: int = knob(4096, least=0)
    # Initial fraction of each running request's remaining answer tokens for which admission
    # reserves memory; it then decays, as in SGLang.
    new_token_ratio: float = share(0.7)
    # Lowest value to which `scheduler.new_token_ratio` decays.
    new_token_ratio_floor: float = share(0.098)
    # Number of decode steps in which `scheduler.new_token_ratio` decays to its floor.
    new_token_ratio_decay_steps: int = knob(600, least=0)

    def __post_init__(self) -> None:
        check_limits("scheduler", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultsConfig:
    """Faults that a run injects into the calls of its storage engine."""

    preset: str = "none"  # Name of this set of faults, shown in tables.
    # Extra delay of each storage call: the median in milliseconds of the log-normal distribution
    # from which it is drawn. 0 means no delay.
    delay_ms: float = knob(0.0, least=0)
    # Sigma of the log-normal distribution of extra delays. 0 means that every delay is the median.
    delay_sigma: float = knob(0.0, least=0)
    error_rate: float = share(0.0)  # Fraction of storage calls that fail with an error.
    missing_rate: float = share(0.0)  # Fraction of page reads that report a stored page as missing.
    # Fraction of page reads that return only the first half of the page, reported as a miss.
    short_rate: float = share(0.0)
    # Fraction of page reads that return the page with one bit flipped.
    corrupt_rate: float = share(0.0)
    # Fraction of page writes that storage refuses as if it were full.
    full_rate: float = share(0.0)
    # Time in seconds from the start of the run at which storage becomes unavailable. None means
    # never.
    gone_from_s: float | None = knob(None, least=0)
    # Duration in seconds of the outage that begins at `storage.faults.gone_from_s`. None means
    # until the end of the run.
    gone_for_s: float | None = knob(None, least=0)
    # Time in milliseconds that a failing storage call takes to return its error. 0 means at once.
    failure_ms: float = knob(0.0, least=0)

    def __post_init__(self) -> None:
        check_limits("storage.faults", self)
        if self.gone_for_s is not None and self.gone_from_s is None:
            raise ValueError(
                f"storage.faults.gone_for_s={self.gone_for_s} "
                "needs storage.faults.gone_from_s, which is not set"
            )

    @property
    def is_harmless(self) -> bool:
        """True if these settings inject no fault."""
        rates = (self.error_rate, self.missing_rate, self.short_rate, self.corrupt_rate)
        is_gone = self.gone_from_s is not None
        return not (self.delay_ms or any(rates) or self.full_rate or is_gone)

    def is_gone(self, now_s: float) -> bool:
        """Return True if all storage calls fail at `now_s` seconds after the start of the run."""
        if self.gone_from_s is None:
            return False
        end_s = inf if self.gone_for_s is None else self.gone_from_s + self.gone_for_s
        return self.gone_from_s <= now_s < end_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """The storage tier below device and host memory: its engine, capacity and simulated speed.

    With `tiering=exclusive`, a page leaves storage when the host has read it. That setting needs
    `write=on_host_eviction`.
    """

    # Storage engine of the third tier: none, memory, mooncake_master (memory that evicts as a
    # Mooncake store does), slab (page slots in large local files), file (one file per page), redis,
    # mooncake, or your own class as module:Class.
    kind: str = "none"
    # Directory (slab, file) or address (redis, mooncake) of the storage engine. None is for engines
    # that need neither.
    root: str | None = None
    # Capacity of storage in GiB. None means unlimited.
    capacity_gib: float | None = knob(None, above=0)
    # Format of the numbers of pages and states in storage, as `cache.host_format`. None means the
    # format of the host; another one needs a plain host.
    format: str | None = knob(None, one_of=FORMATS)
    # Simulated read bandwidth of storage in gigabytes (10**9 bytes) per second.
    read_gbps: float = knob(6.0, above=0)
    # Simulated write bandwidth of storage in gigabytes (10**9 bytes) per second.
    write_gbps: float = knob(4.0, above=0)
    # Limit on the sum of simulated read and write bandwidth, in gigabytes (10**9 bytes) per second.
    # None means that reads and writes do not slow each other.
    shared_gbps: float | None = knob(None, above=0)
    # Simulated time in seconds of one lookup that asks storage which pages it has.
    query_s: float = knob(0.0005, least=0, most=1e4)
    # Simulated latency in seconds of each read or write batch before its first byte.
    operation_s: float = knob(0.0001, least=0, most=1e4)
    # Maximum number of pages per read or write batch. 128 is SGLang's value.
    batch_pages: int = knob(128, least=1)
    # Number of batches that are read from storage in parallel.
    read_workers: int = knob(1, least=1)
    # Number of batches that are written to storage in parallel.
    write_workers: int = knob(1, least=1)
    # Host memory in GiB that may hold pages waiting to be written to storage; further writes are
    # dropped. None means half of `cache.host_gib`, or no limit with `cache.unlimited`.
    write_queue_gib: float | None = knob(None, least=0)
    # Mean in seconds of an extra random delay (exponential) of each read batch. 0 means none.
    delay_s: float = knob(0.0, least=0, most=1e4)
    # Simulated extra latency in seconds of reading the window and state of a prefix, which come
    # after its pages.
    sidecar_s: float = knob(0.0, least=0, most=1e4)
    # Time limit in seconds of one storage call; a call that takes longer counts as failed.
    deadline_s: float = knob(5.0, above=0)
    tiering: Tiering = Tiering.inclusive
    # When host pages are written to storage: on_back_up (as soon as they are on the host),
    # selective (when they have been hit `storage.write_hits` times) or on_host_eviction (when they
    # are evicted from the host).
    write: str = knob("on_back_up", one_of=STORAGE_WRITES)
    # Number of hits after which a page is written to storage.
    write_hits: int = knob(1, least=1, only="storage.write=selective")
    # Number of consecutive failed calls after which storage is bypassed for
    # `storage.breaker_retry_s` seconds.
    breaker_failures: int = knob(3, least=1)
    # Seconds for which storage is bypassed after `storage.breaker_failures` failed calls, before it
    # is tried again.
    breaker_retry_s: float = knob(5.0, least=0)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        check_limits("storage", self)
        is_written_late = self.write == "on_host_eviction"
        if self.tiering is Tiering.exclusive and not is_written_late:
            raise ValueError(
                f"storage.tiering=exclusive needs storage.write=on_host_eviction, got {self.write}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """What executes the steps of a run: a cost model that simulates time, or a real model."""

    # What executes a step: simulated (a cost model; no GPU needed) or torch (a real model and real
    # memory).
    kind: str = knob("simulated", one_of=("simulated", "torch"))
    # How simulated copies between host and device are carried out: kernel (a copy kernel),
    # copy_engine (the GPU's copy engine, cudaMemcpy) or staged (the copy engine, through a device
    # buffer that a kernel gathers pages into or scatters them from).
    copy_path: str = knob("kernel", one_of=("kernel", "copy_engine", "staged"), only=SIMULATED)
    # How a prefill saves Mamba states at checkpoints: scan (the kernel writes them on its way), or
    # cut (computing stops at each checkpoint to copy the state, then reads the weights again).
    capture: str = knob("scan", one_of=("scan", "cut"), only=SIMULATED)
    # Device that runs the model; auto means cuda if available, otherwise cpu.
    device: str = knob("auto", one_of=("auto", "cpu", "cuda"), only=REAL)
    # What moves pages in a real run: triton (the kernels; on a CPU in Triton's interpreter, which
    # needs TRITON_INTERPRET=1), fla (triton, with flash-linear-attention's chunked kernels for
    # recurrent layers; needs a GPU), reference (the same by torch), or auto (triton on a GPU).
    kernels: str = knob("auto", one_of=("auto", "triton", "fla", "reference"), only=REAL)
    # Recompute every request without a cache and compare the logits bit by bit; a difference makes
    # the run fail. With a lossy `cache.host_format` or `storage.format`, or with
    # `executor.kernels=fla`, report the difference.
    verify: bool = knob(False, only=REAL)
    # Time limit in seconds of one storage call, which replaces `storage.deadline_s`; a call that
    # takes longer counts as failed.
    storage_deadline_s: float = knob(10.0, above=0, only=REAL)

    def __post_init__(self) -> None:
        check_limits("executor", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of the serving loop: step by step or faster, what it records, and what it checks."""

    # Simulate several consecutive decode steps at once, which is faster and gives the same results.
    jump: bool = True
    # Record why each computed token was not a cache hit, which makes a replay some 19 % slower;
    # `hicache explain` can find the reasons afterwards instead.
    explain: bool = False
    # Check all invariants of the cache after every step; slow, for debugging.
    check_invariants: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerConfig:
    """Where a run reports its metrics, besides the files that it always writes."""

    wandb_mode: WandbMode = WandbMode.offline
    project: str = "hicache"  # Name of the Weights & Biases project.
    interval_s: float = knob(10.0, least=0.001)  # Simulated seconds between lines of metrics.jsonl.

    def __post_init__(self) -> None:
        check_limits("tracker", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodputConfig:
    """Goodput: the highest request rate at which a given share of requests meets the latency
    limits.

    After the run itself, the workload is replayed at several request rates to find that rate. The
    limits are `ttft_s` and `tpot_s`, both in seconds.
    """

    # Number of request rates at which the workload is replayed to find the goodput. 0 means that
    # goodput is not measured.
    num_rates: int = knob(0, least=0)
    # Highest request rate to try, as a multiple of the workload's own rate.
    times: float = knob(1.0, above=0)
    # Limit on the time to first token in seconds; a request that exceeds it is late.
    ttft_s: float = knob(2.0, above=0)
    # Limit on the mean time per output token after the first, in seconds; a request that exceeds it
    # is late.
    tpot_s: float = knob(0.05, above=0)
    # Fraction of requests that must meet both limits for a request rate to count as sustained.
    share: float = knob(0.9, above=0, most=1, least=0)

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
    """All settings of one run."""

    name: str = "adhoc"  # Name of the experiment, and of its directory below outputs/.
    # Metrics that tables and figures show, as keys of summary.json.
    metrics: tuple[str, ...] = METRICS
    # Random seed of arrivals, generated prompts, aborts, storage delays and faults.
    seed: int = knob(0, least=0)
    # Directory that holds the trace files. None means the one that the environment variable
    # HICACHE_DATA names.
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
    goodput: GoodputConfig = field(default_factory=GoodputConfig)
    compat: CompatConfig = field(default_factory=CompatConfig)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limits("", self)
        if self.model != ModelConfig():
            check_shape(self.model)
        if self.hardware != HardwareConfig():
            check_machine(self.hardware)
        for kind, heads in (
            (LayerKind.full, self.model.num_kv_heads),
            (LayerKind.swa, self.model.swa_num_kv_heads),
        ):
            is_dealt = kind in self.model.kinds and not self.model.latent_dim and heads
            if is_dealt and heads % self.tp and self.tp % heads:
                raise ValueError(
                    f"parallel.tp must divide the {heads} KV heads of {self.model.name} or be a "
                    f"multiple of them, got {self.tp}"
                )
        if self.tp % self.parallel.ep:
            raise ValueError(
                f"parallel.ep must divide parallel.tp={self.tp}, got {self.parallel.ep}"
            )
        formats = self.cache.host_format, self.storage_format
        if len({PLAIN, *formats}) == 3 or formats[0] != PLAIN == formats[1]:
            raise ValueError(
                f"storage.format must be cache.host_format={formats[0]} unless that is plain, "
                f"got {formats[1]}"
            )
        if formats[0] != PLAIN and self.executor.copy_path != "kernel":
            raise ValueError(
                f"cache.host_format={formats[0]} needs executor.copy_path=kernel, "
                f"got {self.executor.copy_path}"
            )
        ranks, executor, storage = self.parallel.ranks, self.executor.kind, self.storage.kind
        simulated = {
            "engine.explain=true": self.engine.explain,
            "cache.window=replay": self.cache.window is WindowHit.replay,
            "model.window_restarts=true": self.model.window_restarts,
            f"cache.pools={self.cache.pools}": self.cache.pools != "split",
            "cache.device_host=exclusive": self.cache.device_host == "exclusive",
        }
        for setting in (each for each, is_set in simulated.items() if is_set):
            if executor != "simulated":
                raise ValueError(f"{setting} needs executor.kind=simulated, got {executor}")
        if ranks > 1 and executor != "simulated":
            raise ValueError(
                f"parallel.ranks={ranks} needs executor.kind=simulated (the real executor splits "
                f"memory by parallel.tp), got {executor}"
            )
        if ranks > 1 and self.cache.pools != "split":
            raise ValueError(f"cache.pools={self.cache.pools} needs parallel.ranks=1, got {ranks}")
        copies = self.cache.write_policy
        if self.cache.device_host == "exclusive" and (copies, storage) != ("write_back", "none"):
            raise ValueError(
                "cache.device_host=exclusive needs cache.write_policy=write_back and "
                f"storage.kind=none, got {copies} and {storage}"
            )
        if ranks > 1 and storage == "none":
            raise ValueError(
                f"parallel.ranks={ranks} needs a storage engine, got storage.kind=none"
            )

    @property
    def storage_format(self) -> str:
        """The number format of pages in storage, such as `plain` or `fp8`.

        It is `storage.format`, or the format of pages on the host if that is None.
        """
        return self.storage.format or self.cache.host_format

    @property
    def is_lossy(self) -> bool:
        """True if hits may change logits, by a number format or by kernels that round by chunk."""
        return self.storage_format != PLAIN or self.executor.kernels == "fla"

    @property
    def tp(self) -> int:
        """The tensor-parallel size: the number of devices per engine.

        If `parallel.tp` is None, it is the model's default, but at most the number of devices of
        the machine.
        """
        return self.parallel.tp or min(self.model.default_tp, self.hardware.num_devices)

"""Every knob of a run, typed and checked.

These frozen dataclasses hold the settings that the code receives. They are also the schema against
which the command line is checked (`hicache/runs/schema.py` registers them with Hydra; this module
does not need Hydra). `__post_init__` checks single knobs and names the knob in its errors.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from pathlib import PurePath
from typing import Any

from hicache.knob import check_limits, knob, share
from hicache.models import FORMATS, PLAIN, HardwareConfig, LayerKind, ModelConfig
from hicache.models.plausible import check_machine, check_shape
from hicache.rules import DRAFT_KEYS, Rules

# storages and policies of ours, by the knob that names them
STORAGES = ("memory", "mooncake_master", "slab", "file", "redis", "mooncake")
STOP_POLICIES = ("best_effort", "wait_complete", "timeout", "marginal")
STOCK_POLICIES = (
    *("lru", "lfu", "sglang_slru", "fifo", "random", "slru", "s3fifo", "arc", "lecar", "gdsf"),
    *("marconi", "state_flops", "hints", "continuum", "cache_ttl", "mori", "gap_oracle"),
    *("tinylfu", "oracle"),
)
WRITE_POLICIES = (
    "write_through",
    "write_through_selective",
    "write_back",
    "write_back_watermark",
)
STORAGE_WRITES = ("on_back_up", "selective", "on_host_eviction")
CHECKPOINT_PLACEMENTS = ("end", "end_branch", "chunk_branch", "branch_or_end", "every")
ROUTERS = (*("sticky", "round_robin", "prefix_load", "scored", "scored_device", "approximate"),)
SERVICE_ORDERS = ("fcfs", "longest_prefix", "shortest_remaining")
SWA_BUDGETS = ("no_host_term", "reports", "double", "sglang_0_5_23")
# where knobs of generators, of traces and of timeouts have an effect
TIMED = "prefetch.stop=timeout"
GRID = "cache.checkpoints=every"
SPECULATES = "speculation.drafts>=1"
SIMULATED, REAL = "executor.kind=simulated", "executor.kind=torch"
SEPARATE = "parallel.decode>=1"  # prefill and decode on separate engines
LINKED = f"{SEPARATE} or storage.kind=peers"
STORED = f"storage.kind={','.join(STORAGES)},module:Class"
READS = STORED.replace("=", "=peers,")
GROUPS = {"prefetch": READS, "storage": READS}  # where all knobs of a group have an effect
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
    sweeps = "sweeps"  # each job of a sweep as with offline, a single run not at all
    offline = "offline"  # in files that `wandb sync` can upload
    online = "online"  # uploaded during the run


class StartState(Enum):
    """What the cache holds when a run starts."""

    cold = "cold"  # nothing
    # storage holds the KV of all prompts and answers, as after a first pass over the workload
    warm_storage = "warm_storage"


def check_name(name: str) -> None:
    """Raise ValueError if a run of this name would write files outside the folder `outputs/`."""
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise ValueError(f"name must be a relative path without `..`, below outputs/, got {name!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadConfig:
    """Which requests are replayed, and when they arrive.

    Each kind of workload has settings of its own in a subclass (`WORKLOADS`).
    """

    # Trace loader or generator that makes the requests; `workload=NAME` sets it together with its
    # defaults.
    kind: str = MISSING
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
    # Which part of the workload is replayed, after its warm-up, as i/n: the workload is cut into n
    # equal parts, counted from 0, to get independent runs. None means the whole workload.
    slice: str | None = None
    start: StartState = StartState.cold
    # Fraction of requests whose client is impatient: it aborts the request if it is not answered in
    # time (`workload.patience_s`).
    abort_share: float = share(0.0)
    # Mean time in seconds from arrival until an impatient client aborts its request, drawn from an
    # exponential distribution.
    patience_s: float = knob(10.0, above=0)
    # Count each session with its sub-agents as a job, and report completion times and jobs per hour
    # (with causal or closed arrivals).
    jobs: bool = False
    # Number of jobs (sessions with their sub-agents) after whose end no request is sent. None means
    # that the run ends with the workload.
    end_jobs: int | None = knob(None, least=1, only="workload.arrivals=closed")
    # Time in seconds after which no request is sent; those in flight are answered. None means that
    # the run ends with the workload.
    end_s: float | None = knob(None, above=0, only="workload.arrivals=closed")

    def __post_init__(self) -> None:
        check_limits("workload", self)
        part, num_parts = self.part
        if not 0 <= part < num_parts:
            raise ValueError(
                f"workload.slice must be i/n with i from 0 to n - 1, got {self.slice!r}"
            )
        if self.jobs and self.arrivals is Arrivals.open:
            raise ValueError("workload.jobs needs workload.arrivals=causal or closed, got open")

    @property
    def part(self) -> tuple[int, int]:
        """The part of the workload that is replayed, from 0, and the number of parts."""
        part, slash, num_parts = (self.slice or "0/1").partition("/")
        is_valid = slash and part.isdecimal() and num_parts.isdecimal()
        return (int(part), int(num_parts)) if is_valid else (0, 0)

    @property
    def is_timed(self) -> bool:
        """True if requests have arrival times; False if each waits for an earlier answer."""
        return self.arrivals is not Arrivals.closed

    @property
    def stage_ends_s(self) -> tuple[float, ...]:
        """The end of each load stage, in seconds from the start of the workload.

        A load stage is a period with a fixed request rate. The tuple is empty if there are no
        stages.
        """
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceConfig(WorkloadConfig):
    """A recorded workload: a public trace, or one of the user's."""

    # Path of the trace file. None means the trace's usual file name in `data_dir`; workload=trace
    # needs a path.
    path: str | None = None
    # Tokens per block hash in the trace. None means the one size that fits every line.
    block_tokens: int | None = knob(None, least=1)
    # Unit of the times in your trace: s, ms, us or ns. None means the unit that its form has; rows
    # that leave it open are read in ms, and tables and chats in s.
    time_unit: str | None = knob(None, one_of=("s", "ms", "us", "ns"))
    # Largest share of the rows of a trace that may be left out because they cannot be read, and
    # largest share that may be completed because they have no answer. Three rows may always be, but
    # less than half; 1 allows any number.
    odd_rows: float = knob(0.1, least=0, most=1)
    # Tokenizer of a text log: a tokenizer.json of Hugging Face, a folder with one, the name of a
    # model on its hub, or module:function, which takes a text and returns its tokens. None means an
    # approximation of four letters per token.
    tokenizer: str | None = None
    tokens: TraceTokens = TraceTokens.reconstructed
    # Mean rate at which sessions start (a Poisson process), in sessions per second.
    session_rate: float = knob(1.0, above=0)
    # Length in tokens of the answer to every request, where no row of the trace has an answer.
    answer_tokens: int = knob(1, least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedConfig(WorkloadConfig):
    """Sessions that are generated from the statistics of public traces."""

    # Number of sessions to generate.
    num_sessions: int = knob(200, least=1, most=10**7)
    # Mean rate at which sessions start (a Poisson process), in sessions per second.
    session_rate: float = knob(1.0, above=0)


STRUCTURE = ("spawn", "agents", "best_of", "samples", "retry", "compact")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentsConfig(GeneratedConfig):
    """Coding agents that are generated from the statistics of a public trace."""

    # How agents branch. Share of tool calls: spawn (they start sub-agents, `agents` at a time).
    # Shares of turns: best_of (asked `samples` times at once; the next turn waits for all), retry
    # (asked again after the answer) and compact (the context is first cut to a summary). By
    # default: 0, 2, 0, 3, 0, and 0.0053 as in the trace.
    structure: dict[str, float] = knob({}, least=0, most=1000)
    # Median duration in seconds of the calls of each tool, such as {read: 0.3, test: 30}. Four of
    # five calls are of the same tool as the call before. Empty means durations as in the trace,
    # without names.
    tools: dict[str, float] = knob({}, above=0, least=0)

    def __post_init__(self) -> None:
        super(AgentsConfig, self).__post_init__()
        for key, value in self.structure.items():
            is_count = key in ("agents", "samples")
            if key not in STRUCTURE or (value < 1 or value % 1 if is_count else value > 1):
                raise ValueError(
                    f"workload.structure takes {', '.join(STRUCTURE)}; agents and samples "
                    f"are whole numbers from 1, the others shares; got {key}: {value:g}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundsConfig(WorkloadConfig):
    """Clients that ask in rounds: each sends a request after the answer to its previous one."""

    # Number of clients.
    num_sessions: int = knob(200, least=1, most=10**7)
    # Number of turns that each client asks.
    rounds: int = knob(9, least=1, most=10**5)
    # New prompt tokens in each turn, besides the previous answer.
    turn_tokens: int = knob(4096, least=1)
    # Prompt tokens of each client's first turn. None means `workload.turn_tokens`.
    first_tokens: int | None = knob(None, least=1)
    # Maximum mean rate at which clients send requests (a Poisson process), in requests per second.
    request_rate: float = knob(16.0, above=0)
    # Maximum number of requests in flight at once. None means no limit.
    in_flight: int | None = knob(None, least=1)
    # Which of the clients that are ready asks next: random (drawn) or fifo (the one that has been
    # ready for longest), as in SGLang's bench_multiturn.
    ready_queue: str = knob("random", one_of=("random", "fifo"))
    # Start a turn only when all clients have received the answer to their previous turn.
    barrier: bool = False
    # Length in tokens of the answer to every request.
    answer_tokens: int = knob(1, least=1)

    @property
    def is_timed(self) -> bool:
        """False: each request waits for an earlier answer."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixesConfig(WorkloadConfig):
    """Prompts in groups that share a prefix, with load stages that follow one another."""

    # Number of groups of prompts; the prompts of one group share a prefix.
    groups: int = knob(250, least=1, most=10**6)
    # Number of different prompts in each group of prompts that share a prefix.
    group_prompts: int = knob(5, least=1, most=10**6)
    # Length in tokens of the prefix that the prompts of one group share.
    prefix_tokens: int = knob(16000, least=1)
    # Length in tokens of the part of each prompt that no other prompt shares.
    own_tokens: int = knob(256, least=1)
    # Request rate of each load stage in requests per second; the stages follow one another.
    stage_rates: tuple[float, ...] = knob((5.0, 10.0, 15.0), above=0, least=0, most=1e4)
    # Duration of each load stage in seconds.
    stage_s: float = knob(60.0, above=0, least=0, most=1e5)
    # Start a load stage only when all requests of the previous one have ended. False starts it on
    # time.
    drain: bool = False
    # Length in tokens of the answer to every request.
    answer_tokens: int = knob(1, least=1)

    @property
    def is_timed(self) -> bool:
        """True if requests have arrival times; False if a stage waits for the one before it."""
        return self.arrivals is not Arrivals.closed and not self.drain

    @property
    def stage_ends_s(self) -> tuple[float, ...]:
        """The end of each load stage, in seconds from the start of the workload."""
        if self.slice is not None:
            return ()
        stage_s = self.stage_s * self.time_scale
        return tuple(stage_s * (stage + 1) for stage in range(len(self.stage_rates)))


# the settings of each kind of workload
WORKLOADS: dict[str, type[WorkloadConfig]] = {
    **dict.fromkeys(("builtin", "chat"), GeneratedConfig),
    "agents": AgentsConfig,
    "multi_turn": RoundsConfig,
    "shared_prefix": PrefixesConfig,
    **dict.fromkeys(("mooncake_conversation", "mooncake_synthetic"), TraceConfig),
    **dict.fromkeys(("mooncake_toolagent", "weka_agentic", "trace"), TraceConfig),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFaults:
    """Faults of separate engines for prefill and decode, and of the link between them."""

    # Fraction of the transfers of KV that are lost on the link.
    lost_rate: float = knob(0.0, least=0, most=1, only=SEPARATE)
    # Number of the engine that is lost for a while, with its caches; prefill engines come first.
    # None means that none is lost.
    gone_engine: int | None = knob(None, least=0, only=SEPARATE)
    # Time in seconds from the start of the run at which the engine is lost.
    gone_from_s: float = knob(60.0, least=0, only=SEPARATE)
    # Time in seconds after which the engine is back, with empty caches.
    gone_for_s: float = knob(60.0, least=0, only=SEPARATE)

    def __post_init__(self) -> None:
        check_limits("parallel.faults", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How one engine is spread over devices, and how many engines there are.

    `tp` is the tensor-parallel size, on which the simulated times depend. If `ranks` is above 1,
    each rank of an engine has its own radix tree and its own storage. All ranks must then agree on
    every cache hit.
    """

    # Tensor-parallel size: devices per engine. None means the model's default (`model.default_tp`).
    tp: int | None = knob(None, least=1)
    # Number of pipeline stages per engine, each of `parallel.tp` devices with a part of the layers.
    # All stages hold the same tokens, as many as the smallest has room for.
    pp: int = knob(1, least=1, most=64)
    # Number of layers of each stage. Empty means equal numbers, where the last stages have one more
    # if there is a rest, as in SGLang.
    stage_layers: tuple[int, ...] = knob((), least=1, only="parallel.pp>=2")
    # Number of groups into which expert parallelism divides the devices of an engine: each group
    # holds its part of the experts whole, and divides them among its devices. 1 means that every
    # device holds a slice of every expert.
    ep: int = knob(1, least=1)
    # Number of cache ranks per engine. Each rank has its own radix tree, its own storage and a
    # slice of every page, and all must take the same hits. 1 means one tree for the whole engine.
    ranks: int = knob(1, least=1, most=1024)
    hit_agreement: HitAgreement = HitAgreement.restorable
    # Number of engines; each has its own device and host tiers, and all share one storage.
    replicas: int = knob(1, least=1, most=1024)
    # Number of processes that run the replicas, each a share of them, with the same results. Needs
    # replicas without storage and with a router that does not look at them (sticky, or round_robin
    # with workload.arrivals=open), and pyarrow. None means that this process runs all.
    workers: int | None = knob(None, least=1, most=1024)
    # How requests are assigned to engines: sticky (a session stays on one engine), round_robin,
    # prefix_load (the engine with the longest cached prefix, unless it has over `slack` requests
    # more than the least busy one), scored (a weighted sum of queue, free memory and cached prefix,
    # as in llm-d), scored_device (the same, but of the prefix on the device only), or approximate
    # (as scored, with an index of what it sent to each engine, as in llm-d).
    router: str = knob("sticky", one_of=ROUTERS)
    # Numbers of the router: slack (of prefix_load, default 8 requests); the weights queue, memory,
    # device and cache (of scored, scored_device and approximate); blocks, block_tokens and
    # most_blocks of the index (of approximate: 41000, 16, 256).
    router_args: dict[str, float] = knob({}, least=0)

    # Engines that only compute prompts. With 0, every engine computes prompts and decodes.
    prefill: int = knob(0, least=0, most=1024)
    # Engines that only decode, and get the KV of prompts from prefill engines over a link.
    decode: int = knob(0, least=0, most=1024)
    # Speed in GB/s with which an engine sends KV to others, and receives it. 50 is one NIC of 400
    # Gb/s.
    link_gbps: float = knob(50.0, above=0, only=LINKED)
    # Latency in seconds of what one engine sends to another, also of messages without KV.
    link_s: float = knob(0.0005, least=0, most=1e4, only=LINKED)
    # What a decode engine caches: nothing (none); KV on the device (device), or also on the host
    # and in storage (tiers); or nothing, but it writes the KV of answers to storage, where prefill
    # engines find it with the next turn (offload).
    decode_cache: str = knob("tiers", one_of=("none", "device", "tiers", "offload"), only=SEPARATE)
    # What happens to the KV of a request that a decode engine retracts: it is computed and sent
    # again (recompute), or copied to the host and back (host_pool). The host has room for a fifth
    # of the device or the longest request if decode_cache=none, else for all, as in SGLang.
    retraction: str = knob("recompute", one_of=("recompute", "host_pool"), only=SEPARATE)
    # With sparse attention, tokens of a request's KV that a decode engine holds on the device,
    # while all of it is on the host. Nothing is cached then. None means all on the device.
    sparse_tokens: int | None = knob(None, least=1, only=SEPARATE)
    # Fraction of the tokens that a sparse decode step reads (compat.rules.sparse_top) that are not
    # on the device and are loaded from the host.
    sparse_miss: float = knob(0.1, least=0, most=1, only=SEPARATE)
    # Settings of decode engines that differ from those of prefill engines, such as
    # {cache.host_gib: 64, parallel.tp: 8}.
    decode_own: dict[str, Any] = knob({}, only=SEPARATE)
    faults: EngineFaults = field(default_factory=EngineFaults)

    def __post_init__(self) -> None:
        check_limits("parallel", self)
        if bool(self.prefill) != bool(self.decode):
            raise ValueError(
                "parallel.prefill and parallel.decode must both be 0 or both be above 0, got "
                f"{self.prefill} and {self.decode}"
            )

    @property
    def num_engines(self) -> int:
        """The number of engines of the run, with those of both roles."""
        return self.prefill + self.decode or self.replicas


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

    # Tokens per KV page, the unit of allocation and transfer; a power of two, or for simulated runs
    # any multiple of 16, such as vLLM's block sizes for models with states.
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
    # Let the host drop its copies of data that the device holds too, in the order of
    # `cache.policy`, as vLLM does. False keeps them until the device evicts the data, as SGLang
    # does, so that a host smaller than the device soon takes no new copies, and storage neither.
    # No effect with cache.write_policy=write_back.
    evicts_mirrors: bool = False
    # Insert and copy an answer whenever it has grown by this many pages. None means once, when it
    # is complete, as do models with Mamba states, which have no state to resume from before.
    answer_pages: int | None = knob(None, least=1)
    # Prompt positions at which a Mamba state, or the window of a model without states, is saved:
    # end (the last page boundary of the prompt), end_branch (the end, and where the prompt diverges
    # from a cached one), chunk_branch (as end_branch, and the end of each chunk), branch_or_end (of
    # each chunk where the prompt diverges, or else its end, as SGLang does), every (as end_branch,
    # and every `cache.checkpoint_tokens` tokens). The cache holds full KV as soon as its chunk is
    # computed; with branch_or_end the part of a chunk after its position follows with the next
    # chunk. None means chunk_branch for states, and end_branch for windows.
    checkpoints: str | None = knob(None, one_of=CHECKPOINT_PLACEMENTS)
    # Distance in tokens between saved Mamba states or windows; a multiple of `cache.page_size`.
    checkpoint_tokens: int = knob(8192, least=1, only=GRID)
    # How a request gets the sliding window before the end of its hit: restore (the cache keeps
    # windows as it keeps full KV) or replay (no tier keeps windows, any full KV is a hit, and the
    # request computes the hit's last window again, as vLLM does for DeepSeek-V4.1; simulated only).
    window: WindowHit = WindowHit.restore

    def __post_init__(self) -> None:
        check_limits("cache", self)
        if self.page_size & (self.page_size - 1) and self.page_size % 16:
            raise ValueError(
                "cache.page_size must be a power of two or, in simulated runs, a multiple of 16, "
                f"got {self.page_size}"
            )
        if self.checkpoints == "every" and self.checkpoint_tokens % self.page_size:
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
    # Minimum length in tokens of a prefetch: nothing is read if fewer tokens are missing from the
    # cache, or if storage has fewer of them. 256 is SGLang's default.
    threshold: int = knob(256, least=1)
    # When all pages of a prefetch are read, wait for its window and state as well. False starts the
    # request without them, so that it may not be able to use the pages.
    await_sidecars: bool = True
    cut: CutPolicy = CutPolicy.fit
    stage_at: StageAt = StageAt.enqueue
    commit: CommitPolicy = CommitPolicy.all_or_nothing
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
class CompatConfig:
    """Which serving engine's choices a run makes, such as SGLang's or vLLM's.

    `compat=NAME` on the command line sets them all.
    """

    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: a draft model proposes tokens, and the model verifies them in one step.

    The draft has KV of its own for each token.
    """

    # Number of tokens that the draft proposes for each request and decode step. 0 means no
    # speculation; the other settings then have no effect.
    drafts: int = knob(0, least=0, most=64)
    # How a hit leaves the draft the hidden state from which it continues: token (not at all),
    # bigram (a page is named by its tokens and the one after them, as in SGLang) or drop_block (the
    # last page of a hit is computed again, as in vLLM). None means the first of
    # `compat.rules.draft_keys`.
    key: str | None = knob(None, one_of=DRAFT_KEYS, only=SPECULATES)
    # Where the draft's KV lies below the device: packed (in the host's pages, as further layers),
    # sidecar (in pages of its own, which storage must have as well) or none (nowhere: hits on the
    # host have no KV for the draft, and are counted as draft cold).
    draft_kv: str = knob("packed", one_of=("packed", "sidecar", "none"), only=SPECULATES)
    # Number of layers of the draft, each with the shape of a full-attention layer of the model.
    layers: int = knob(1, least=1, only=SPECULATES)
    # Probability that a draft token is accepted if those before it are.
    acceptance: float = knob(0.7, least=0, most=1, only=SPECULATES)
    # The same where the draft has no KV of the request's tokens. In between, it is linear in the
    # share of these tokens.
    cold_acceptance: float = knob(0.3, least=0, most=1, only=SPECULATES)
    # How many tokens a decode step gains: random (drawn by `seed`, request and step) or mean (the
    # expected number, rounded so that the sum stays close).
    accepted: str = knob("random", one_of=("random", "mean"), only=SPECULATES)

    def __post_init__(self) -> None:
        check_limits("speculation", self)


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
    batching: Batching = Batching.prefill_first
    # How many tokens of the sliding-window pool admission charges a request: reports (the larger of
    # its chunk and the window, plus window tokens loaded back from the host), no_host_term (without
    # those loaded back, so that prefill can run out of memory), double (those loaded back twice,
    # for comparison) or sglang_0_5_23 (the formula of that release).
    swa_budget: str = knob("reports", one_of=SWA_BUDGETS)
    # Initial fraction of each running request's remaining answer tokens for which admission
    # reserves memory; it then decays, as in SGLang.
    new_token_ratio: float = share(0.7)

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
    # mooncake, peers (no engine: what the hosts of the other engines hold, over the link between
    # engines; nothing is written), or your own class as module:Class.
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
    read_gbps: float = knob(6.0, above=0, only=STORED)
    # Simulated write bandwidth of storage in gigabytes (10**9 bytes) per second.
    write_gbps: float = knob(4.0, above=0, only=STORED)
    # Limit on the sum of simulated read and write bandwidth, in gigabytes (10**9 bytes) per second.
    # None means that reads and writes do not slow each other.
    shared_gbps: float | None = knob(None, above=0, only=STORED)
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
    # The model that computes a step: reference (of this project, with random weights), or hf (that
    # of transformers for the config.json at `model.from_hf`; weights from safetensors files beside
    # it, or random).
    model: str = knob("reference", one_of=("reference", "hf"), only=REAL)
    # What one call of a transformers model computes: step (all new tokens of a request in a step),
    # or page (those of one page, from its start on, so that logits have the same bits with any
    # cache; slower).
    call: str = knob("step", one_of=("step", "page"), only=REAL)
    # Device that runs the model; auto means cuda if available, otherwise cpu.
    device: str = knob("auto", one_of=("auto", "cpu", "cuda"), only=REAL)
    # What moves pages in a real run: triton (the kernels; on a CPU in Triton's interpreter, which
    # needs TRITON_INTERPRET=1), fla (triton, with flash-linear-attention's chunked kernels for
    # recurrent layers; needs a GPU), reference (the same by torch), or auto (triton on a GPU).
    kernels: str = knob("auto", one_of=("auto", "triton", "fla", "reference"), only=REAL)
    # Recompute every request without a cache and compare the logits bit by bit; a difference makes
    # the run fail. With a lossy `cache.host_format` or `storage.format`, or with
    # `executor.kernels=fla`, report the difference. With `executor.model=hf`, it may be what
    # rounding explains, unless `executor.call=page`.
    verify: bool = knob(False, only=REAL)

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

    wandb_mode: WandbMode = WandbMode.sweeps
    project: str = "hicache"  # Name of the Weights & Biases project.
    # Log a table with one row per request to Weights & Biases, beside the file of requests.
    wandb_requests: bool = False
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
    # Limit on the slowdown of a job: its completion time, divided by that on an idle server with an
    # infinite cache. Later jobs do not count in `jobs/in_time_per_hour`.
    job_slowdown: float = knob(2.0, least=1, only="workload.jobs=true")

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
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
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
        if self.parallel.decode:
            self._check_roles()
        if self.storage.kind == "peers":
            self._check_peers()
        if self.parallel.pp > 1:
            self._check_stages()
        ranks, executor, storage = self.parallel.ranks, self.executor.kind, self.storage.kind
        size = self.cache.page_size
        simulated = {
            f"cache.page_size={size}": size & (size - 1) != 0,
            "engine.explain=true": self.engine.explain,
            "cache.window=replay": self.cache.window is WindowHit.replay,
            "model.window_restarts=true": self.model.window_restarts,
            f"cache.pools={self.cache.pools}": self.cache.pools != "split",
            "cache.device_host=exclusive": self.cache.device_host == "exclusive",
        }
        for setting in (each for each, is_set in simulated.items() if is_set):
            if executor != "simulated":
                raise ValueError(f"{setting} needs executor.kind=simulated, got {executor}")
        self._check_speculation()
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

    def _check_roles(self) -> None:
        # what separate engines for prefill and decode do not support
        parallel, rules = self.parallel, self.compat.rules
        kinds, parts = self.model.kinds, self.model.parts
        is_sparse, is_saved = parallel.sparse_tokens is not None, parallel.retraction == "host_pool"
        on_host, offloads = (parallel.decode_cache == each for each in ("tiers", "offload"))
        has_states, has_windows = LayerKind.mamba in kinds, LayerKind.swa in kinds
        has_more = has_states or has_windows or any(part.window_len for part in parts)
        is_simulated = is_sparse or is_saved or on_host or offloads
        gone = parallel.faults.gone_engine
        refused = {
            f"parallel.replicas={parallel.replicas}": parallel.replicas > 1,
            f"parallel.ranks={parallel.ranks}": parallel.ranks > 1,
            f"parallel.faults.gone_engine={gone} of {parallel.num_engines}": gone is not None
            and gone >= parallel.num_engines,
            "speculation.drafts": self.speculation.drafts > 0,
            "scheduler.batching=running_first": self.scheduler.batching is Batching.running_first,
            "cache.window=replay": self.cache.window is WindowHit.replay,
            "compat.rules.trims_leaves=true": rules.trims_leaves,
            "executor.kind=torch with parallel.decode_cache=tiers or offload, host_pool, "
            "sparse_tokens or losses": self.executor.kind != "simulated"
            and (is_simulated or parallel.faults != EngineFaults()),
            "parallel.retraction=host_pool with Mamba states": has_states and is_saved,
            "parallel.decode_cache=offload with windows or Mamba states": offloads
            and (has_more or bool(parts)),
            "parallel.sparse_tokens with windows, Mamba states or decode_cache=offload": is_sparse
            and (has_more or offloads),
            "parallel.decode_cache=tiers, a model with sliding windows and "
            "compat.rules.decode_windows_on_host=false": on_host
            and has_windows
            and not rules.decode_windows_on_host,
        }
        _refuse("separate engines for prefill and decode do not support", refused)

    def _check_peers(self) -> None:
        # what reads from the hosts of other engines do not support
        refused = {
            "executor.kind=torch": self.executor.kind != "simulated",
            f"parallel.ranks={self.parallel.ranks}": self.parallel.ranks > 1,
            "storage.faults": not self.storage.faults.is_harmless,
            f"storage.format={self.storage.format}": self.storage_format != self.cache.host_format,
            "parallel.decode_cache=offload": self.parallel.decode_cache == "offload",
            "speculation.draft_kv=sidecar": self.speculation.drafts > 0
            and self.speculation.draft_kv == "sidecar",
        }
        _refuse("storage.kind=peers does not support", refused)

    def _check_stages(self) -> None:
        # what pipeline stages do not support
        parallel, rules, cache = self.parallel, self.compat.rules, self.cache
        batching = self.scheduler.batching
        refused = {
            "speculation.drafts": self.speculation.drafts > 0,
            "separate engines for prefill and decode": parallel.prefill > 0,
            "executor.kind=torch and model.parts": self.executor.kind != "simulated"
            and bool(self.model.parts),
            f"executor.capture={self.executor.capture}": self.executor.capture == "cut",
            f"scheduler.batching={batching.value}": batching is Batching.running_first,
            "compat.rules.trims_leaves=true": rules.trims_leaves,
            f"cache.pools={cache.pools}": cache.pools != "split",
            "cache.window=replay": cache.window is WindowHit.replay,
        }
        _refuse(f"parallel.pp={parallel.pp} does not support", refused)

    def _check_speculation(self) -> None:
        speculation, model, key = self.speculation, self.model, self.draft_key
        known, draft_kv = self.compat.rules.draft_keys, speculation.draft_kv
        kind, is_simulated = self.executor.kind, self.executor.kind == "simulated"
        is_deep = speculation.layers > model.num_layers or not model.num_full_layers
        refusals = {
            f"key must be one of {', '.join(known)}, the rules of the engine that compat names, "
            f"got {key}": key not in known,
            f"key=bigram needs a model without states, got {model.name}, which SGLang keys by "
            "token": key == "bigram" and model.num_mamba_layers > 0,
            f"layers must be at most the {model.num_layers} layers of {model.name}, of which some "
            f"have full attention, got {speculation.layers}": is_deep,
            f"draft_kv={draft_kv} needs executor.kind=simulated, got {kind}": draft_kv != "packed"
            and not is_simulated,
        }
        for refusal in (each for each, is_so in refusals.items() if is_so and speculation.drafts):
            raise ValueError(f"speculation.{refusal}")

    @property
    def storage_format(self) -> str:
        """The number format of pages in storage, such as `plain` or `fp8`.

        It is `storage.format`, or the format of pages on the host if that is None.
        """
        return self.storage.format or self.cache.host_format

    @property
    def draft_key(self) -> str:
        """The key rule of the prefix cache: token, bigram or drop_block."""
        first = self.compat.rules.draft_keys[0]
        if not self.speculation.drafts:
            return "token"
        if first == "bigram" and self.model.num_mamba_layers:
            first = "token"  # as SGLang keys models with states
        return self.speculation.key or first

    @property
    def overlap(self) -> int:
        """Number of tokens of the next page that are part of a page's key."""
        return int(self.draft_key == "bigram")

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


def _refuse(why: str, found: dict[str, bool]) -> None:
    for setting in (each for each, is_set in found.items() if is_set):
        raise ValueError(f"{why} {setting}")

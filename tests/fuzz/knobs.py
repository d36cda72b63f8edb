"""The space that scenarios are drawn from: knobs, and the values of each that are worth a try.

A value is a name and what it overrides, as on a command line. The first value of a knob is the
plain one, to which a failing scenario is shrunk. Keys that begin with `pools.`, `talk.` or `pages.`
are no knobs of a run: `scenario.py` turns them into some that suit its workload.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter

from hicache.config import STOCK_POLICIES, WRITE_POLICIES, ExperimentConfig
from hicache.models import FORMATS, PLAIN
from hicache.policies.routing import ROUTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that scenarios differ in.

    `values`: overrides, separated by blanks, by their name. `plain_share`: of scenarios with the
    first of them; None: all are as likely. Knobs further down the list override those above.
    """

    name: str
    values: Mapping[str, str]
    plain_share: float | None = 0.6

    @property
    def keys(self) -> set[str]:
        """The settings that some value overrides."""
        return {key for text in self.values.values() for key in overrides_of(text)}


def overrides_of(text: str) -> dict[str, str]:
    """The overrides by their keys."""
    return dict(re.findall(r"([\w.]+)=(.*?)(?= [\w.]+=|$)", text))


def _cases(name: str, *, plain_share: float | None = 0.6, **values: str) -> Knob:
    """A knob whose values override several settings."""
    return Knob(name=name, values=values, plain_share=plain_share)


def _each(key: str, *values: object, plain_share: float | None = 0.6) -> Knob:
    """A knob of the configuration, by the values it may have."""
    return Knob(
        name=key,
        values={str(value): f"{key}={'null' if value is None else value}" for value in values},
        plain_share=plain_share,
    )


def _or_preset(key: str, *values: object) -> Knob:
    """A knob that presets set: as the preset says, or one of these."""
    return Knob(name=key, values={"preset": "", **_each(key, *values).values})


def _layers(pattern: str) -> str:
    """Twice the layers of this pattern."""
    words = 2 * pattern.split()
    full, swa = (sum(word.startswith(letter) for word in words) for letter in "FS")
    return (
        f"model.pattern={pattern} model.num_layers={len(words)} model.num_full_layers={full} "
        f"model.num_swa_layers={swa} model.num_mamba_layers={len(words) - full - swa}"
        + ("" if swa else " model.window_len=0")
    )


# index keys, a second window, and what lies in its pages
PARTS = (
    "{name:index,letter:I,dim:16,query_heads:2,query_dim:16,top:9}",
    "{name:wide,letter:W,window_len:70,dim:24,query_heads:2,query_dim:16}",
    "{name:scales,letter:W,rides_on:wide,dim:2}",
)
CODED = [form for form in FORMATS if form != PLAIN]
FORMED = [f"{where}_{form}" for where in ("both", "storage") for form in CODED]
EXCLUSIVE = "cache.device_host=exclusive cache.write_policy=write_back storage.kind=none"
BY_BATCHES = "storage.kind=memory storage.batch_pages=1 storage.read_gbps=0.002"
USERS = "tests.fuzz.policies:FirstQuarter"
OURS = [f"tests.fuzz.policies:{name}" for name in ("Ledger", "Contrary", "ContraryDemotion")]
WORKLOAD = "workload"

WRITTEN = (
    # the machine
    _each("model.window_len", 32, 5, 100),
    _cases(
        "kinds",
        full=_layers("F"),
        full_swa=_layers("F S"),
        full_mamba=_layers("F M D"),
        all=_layers("F S M D"),
        chunks=f"{_layers('F S')} model.window_len=512 model.window_restarts=true",
        parts=f"{_layers('FI SW M D')} model.parts=[{','.join(PARTS)}]",
        plain_share=None,
    ),
    _cases(
        "copies",
        fast="",
        slow="hardware.kernel_to_device.rate=[1e7,1e7,1e7,1e7] "
        "hardware.kernel_to_host.rate=[1e7,1e7,1e7,1e7]",
        uneven="executor.copy_path=copy_engine hardware.copy_engine.rate=[1e6,1e7,1e8,1e9,1e9,1e9]",
        staged="executor.copy_path=staged",
    ),
    _cases(
        "experts",
        none="",
        some="model.num_moe_layers=2 model.num_experts=8 model.experts_per_token=2 "
        "model.expert_width=64 model.expert_matrices=3 model.expert_params=12288",
    ),
    _each("parallel.tp", 1, 2),
    _cases("parallel.ep", one="parallel.ep=1", two="parallel.ep=2 parallel.tp=2"),
    _each("parallel.ranks", 1, 2, 3, plain_share=0.7),
    _each("parallel.collective_s", 0.00015, 0.0),
    _each("parallel.replicas", 1, 2, 3, plain_share=0.7),
    _each("parallel.router", *ROUTERS, plain_share=None),
    # what is asked
    _cases(
        WORKLOAD,
        talk="",
        chat="workload.kind=chat",
        agents="workload.kind=agents",
        multi_turn="workload.kind=multi_turn workload.rounds=4 workload.turn_tokens=4000 "
        "workload.first_tokens=6000 workload.request_rate=50.0 workload.parallel=3 "
        "workload.barrier=true workload.answer_tokens=2000",
        shared_prefix="workload.kind=shared_prefix workload.groups=4 "
        "workload.group_prompts=3 workload.prefix_tokens=5000 workload.own_tokens=2000 "
        "workload.stage_rates=[0.5,1.5] workload.stage_s=30.0 workload.drain=true "
        "workload.answer_tokens=2000",
        plain_share=0.8,
    ),
    _each("talk.namespaces", 1, 3, plain_share=0.7),
    _each("talk.gap_s", 0.01, 0.001, 0.05),
    _each("talk.giants", 0, 1),
    _each("workload.arrivals", "causal", "open", "closed", plain_share=None),
    _each("workload.concurrency", 32, 2),
    _each("workload.stagger_s", 0, 5),
    _each("scheduler.server_s", 0.0, 0.003),
    _each("scheduler.begin_s", 0.0, 0.001),
    _each("workload.think_cap_s", 0.02, 0.0),
    _cases(
        "patience",
        endless="",
        short="workload.abort_share=0.3 workload.patience_s=0.003",
        long="workload.abort_share=0.3 workload.patience_s=0.03",
        plain_share=0.7,
    ),
    _each("workload.start_jitter_s", 0.0, 0.01),
    _each("workload.warm_up_s", 0.0, 0.03),
    _each("workload.start", "cold", "warm_storage", plain_share=0.3),
    # what it is served with
    _each("compat", "reports", "sglang_0_5_23", "vllm_0_33", "hicache", plain_share=None),
    _each("cache.page_size", 16, 1, 2, 8, 64, 512, plain_share=None),
    _each("cache.unlimited", "false", "true", plain_share=0.93),
    _each("pools.full_device", 1.3, 0.8, 3.0),
    _each("pools.swa_device", 1.0, 0.0, 3.0),
    _each("pools.slots_device", 12, 4, 40),
    _each("pools.in_tokens", 0, 1, plain_share=0.8),
    _each("pools.full_host", 1.8, 0.7, 5.0, 0.0, plain_share=0.75),
    _each("pools.swa_host", 1.0, 0.3, 3.0, 0.0, plain_share=0.75),
    _each("pools.slots_host", 16, 2, 40, 0, plain_share=0.75),
    _each("cache.policy", *OURS, USERS, *STOCK_POLICIES),
    _each("cache.write_policy", *WRITE_POLICIES),
    _each("cache.write_watermark", 0.2, 0.6),
    _each("cache.answer_pages", None, 1, 3),
    _each("cache.load_back_threshold", 10, 0, 100),
    _or_preset("compat.quirks.states_per_request", 2, 3),
    _each("pages.prefetch.threshold", 2, 1, 6),
    _each("prefetch.timeout_base_s", 0.02, 0.0, 1.0),
    _each("prefetch.timeout_per_ki_token_s", 0.25, 0.0),
    _each("prefetch.occupied_share", 1.0, 0.3, plain_share=0.7),
    _each("pages.scheduler.chunk_tokens", 8, 1, 200),
    _each("scheduler.max_running", 256, 1, 3),
    _each("scheduler.scan_limit", 128, 1),
    _each("scheduler.aging", 0.1, 0.0, 10.0),
    _each("scheduler.clip_new_tokens", 4096, 4),
    _each("scheduler.new_token_ratio", 0.7, 0.0, 1.0),
    _each("scheduler.new_token_ratio_floor", 0.098, 0.0, 1.0),
    _each("scheduler.new_token_ratio_decay_steps", 600, 5),
    # what lies behind it
    _cases(
        "formats",
        plain="",
        **{f"both_{form}": f"cache.host_format={form}" for form in CODED},
        **{f"storage_{form}": f"storage.format={form}" for form in CODED},
        plain_share=0.85,
    ),
    _each("storage.kind", "memory", "none", plain_share=0.93),
    _each("pools.storage", 0.0, 3.0),
    _cases(
        "storage.speed",
        fast="",
        slow="storage.read_gbps=0.002 storage.write_gbps=0.002",
        slow_reads="storage.read_gbps=0.0005 storage.write_gbps=1.0",
        slow_writes="storage.read_gbps=1.0 storage.write_gbps=0.0005",
        shared="storage.shared_gbps=0.005",
    ),
    _each("storage.query_s", 0.0005, 0.0, 0.01, plain_share=0.7),
    _each("storage.operation_s", 0.0001, 0.0),
    _each("storage.batch_pages", 128, 1, 3),
    _each("storage.read_workers", 1, 3),
    _each("storage.write_workers", 1, 3),
    _each("pools.write_queue", 100.0, 0.5, 0.0, plain_share=0.7),
    _each("storage.delay_s", 0.0, 0.005, plain_share=0.7),
    _each("storage.sidecar_s", 0.0, 0.01, plain_share=0.7),
    _cases(
        "storage.writes",
        on_back_up="",
        selective="storage.write=selective",
        selective_3="storage.write=selective storage.write_hits=3",
        late="storage.write=on_host_eviction",
        exclusive="storage.write=on_host_eviction storage.tiering=exclusive",
    ),
    _cases(
        "storage.faults",
        none="",
        errors="storage.faults.error_rate=0.2 storage.faults.failure_ms=3.0",
        missing="storage.faults.missing_rate=0.05",
        short="storage.faults.short_rate=0.05",
        corrupt="storage.faults.corrupt_rate=0.05",
        full="storage.faults.full_rate=0.2",
        slow="storage.faults.delay_ms=3.0 storage.faults.delay_sigma=1.0",
        gone="storage.faults.gone_from_s=0.05 storage.faults.gone_for_s=0.05 "
        "storage.faults.failure_ms=5.0",
        gone_for_good="storage.faults.gone_from_s=0.1",
    ),
    _each("storage.breaker_failures", 3, 1),
    _each("storage.breaker_retry_s", 0.01, 5.0, plain_share=0.7),
    _each("storage.deadline_s", 5.0, 0.004, plain_share=0.7),
    _each("talk.longest_answer", 24, 300, plain_share=0.9),
    _cases(
        "host.layout",
        plain="",
        shared="cache.pools=shared",
        one_pool_a_tier="cache.pools=shared_both",
        exclusive=EXCLUSIVE,
        both=f"cache.pools=shared {EXCLUSIVE}",
        plain_share=0.85,
    ),
    # places where much must come together; what they need overrides all of the above
    _cases(
        "seam",
        none="",
        # an answer evicts pages just before a request is routed to the engine that held them
        look_of_a_router="parallel.replicas=2 parallel.router=prefix_load "
        "cache.policy=random cache.write_policy=write_through pools.full_device=0.8 "
        "pools.full_host=0.0 talk.longest_answer=300 talk.gap_s=0.05",
        # a request may go on with a part of what is read for it
        batches_of_a_read=f"cache.policy={USERS} {BY_BATCHES} workload.start=warm_storage",
        # ranks let a request go that one look later would have to wait, and send it back
        votes_of_a_step_ago="cache.policy=tests.fuzz.policies:UntilPagesCome "
        f"parallel.ranks=2 {BY_BATCHES} workload.start=warm_storage "
        "scheduler.new_token_ratio=0.0 scheduler.new_token_ratio_floor=0.0 "
        "talk.longest_answer=300",
        plain_share=0.8,
    ),
    _each("executor.capture", "scan", "cut"),
)

RANKS = (("parallel.ranks", "2"), ("parallel.ranks", "3"), ("seam", "votes_of_a_step_ago"))
WARM = ("workload.start", "warm_storage")
STORED = (  # values that need storage, or copies other than write_back
    *RANKS,
    WARM,
    ("seam", "batches_of_a_read"),
    ("seam", "look_of_a_router"),
)
# of values that cannot go together, the second gives way to its knob's plain one
BARRED = (
    *((("storage.kind", "none"), barred) for barred in (*RANKS[:2], WARM)),
    *((ranks, ("cache.policy", "oracle")) for ranks in RANKS),
    *(
        (("copies", copies), ("formats", form))
        for copies in ("uneven", "staged")
        for form in FORMED
    ),
    *((("kinds", kind), ("cache.window", "replay")) for kind in ("full_mamba", "all", "parts")),
    *(
        (("host.layout", layout), barred)
        for layout in ("shared", "one_pool_a_tier", "both")
        for barred in RANKS
    ),
    *((("host.layout", layout), barred) for layout in ("exclusive", "both") for barred in STORED),
)

# what no scenario sets
UNDRAWN = {
    # other ways to give the size of pools; `pools.in_tokens` sets those in tokens
    *("cache.device.vllm_fraction", "cache.device.sglang_fraction", "cache.host.sglang_gib"),
    *("cache.host.sglang_ratio", "cache.device.tokens", "cache.device.states"),
    *("cache.host.tokens", "cache.host.states"),
    # files, what only a trace has, which part of a long workload is served
    *("storage.root", "workload.path", "workload.block_tokens", "workload.system_tokens"),
    *("workload.tokenizer", "workload.tokens", "workload.window", "workload.windows"),
    *("workload.load", "workload.max_context", "workload.time_unit", "workload.odd_rows"),
    "workload.image_tokens",
    # every scenario is run with and without these
    *("engine.check_invariants", "engine.explain", "engine.jump"),
    # names, arguments of policies
    *("storage.faults.preset", "cache.policy_args", "prefetch.patience"),
}


def _with_few_values() -> Iterator[Knob]:
    """The settings that have few values and are no part of a knob above, by their fields."""
    taken = {key for knob in WRITTEN for key in knob.keys} | UNDRAWN
    for area in ("workload", "parallel", "cache", "prefetch", "scheduler", "compat.quirks"):
        for item in fields(attrgetter(area)(ExperimentConfig())):
            if isinstance(item.default, Enum):
                values = [each.name for each in type(item.default)]
            else:
                is_switch = isinstance(item.default, bool)
                values = (False, True) if is_switch else item.metadata.get("one_of") or ()
            if values and f"{area}.{item.name}" not in taken:
                yield _or_preset(f"{area}.{item.name}", *values)


KNOBS = (*_with_few_values(), *WRITTEN)

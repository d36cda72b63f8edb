"""Whole runs from a config: equal results by several ways, the user's policies, and notes."""

import gc
import json
import re

import pytest

from hicache.cache.checked import PolicyError
from hicache.cache.pages import PageAllocator
from hicache.cache.tree.node import Node
from hicache.config import CHECKPOINT_PLACEMENTS, SERVICE_ORDERS, STOP_POLICIES, ExperimentConfig
from hicache.engine.build import queue_bytes
from hicache.engine.deployment import deploy
from hicache.engine.ranks.agreement import TracedAllocator
from hicache.engine.ranks.lockstep import RankedEngine
from hicache.experiment import run
from hicache.models import GIB
from hicache.observe import invariants
from hicache.policies.checkpoints import PLACEMENTS
from hicache.policies.order import ORDERS
from hicache.policies.stop import STOPS
from hicache.results.metrics import Result, Status, summarize
from hicache.runs import schema

MODELS = ["tiny_hybrid", "llama3_8b", "gemma3_27b", "qwen3_next_80b"]
HYBRID = "model=tiny_hybrid"
SMALL = (HYBRID, "cache.device_gib=0.02", "cache.host_gib=0.02")


def config_of(*overrides: str) -> ExperimentConfig:
    return schema.config_of("workload=builtin", "storage=memory", "workload.limit=60", *overrides)


def summary_of(result: Result) -> dict[str, float]:
    return summarize(result.records, result.measures)


def results_of(*overrides):
    """The summary, the records and the rows of a run."""
    rows = []
    result = run(config_of(*overrides), progress=lambda told: rows.append(told.row))
    return json.dumps(summary_of(result)), result.records, [row for row in rows if row is not None]


@pytest.mark.parametrize(
    "overrides",
    [
        *((f"model={model}", "workload.limit=25") for model in MODELS),
        (*SMALL, "workload.warm_up_s=30.5", "tracker.interval_s=0.37"),
        # a window that is computed again is freed at the end of its prompt: freed with the first
        # answer token, it would admit a waiting request in the middle of a run of decode steps
        (
            *("workload=shared_prefix", HYBRID, "model.window_len=512", "model.pattern=F S"),
            *("model.num_layers=4", "model.num_mamba_layers=0", "model.window_restarts=true"),
            *("workload.prefix_tokens=5000", "workload.own_tokens=2000"),
            *("workload.answer_tokens=2000", "workload.token_stride=4", "workload.limit=4"),
            *("workload.time_scale=0.0005", "storage=memory", "cache.page_size=512"),
            *("cache.window=replay", "cache.write_policy=write_through_selective"),
            *("cache.device_gib=0.003662109375", "cache.device.share.swa=0.2833333333333333"),
        ),
    ],
    ids=lambda overrides: " ".join(overrides[:4]),
)
def test_decoding_one_step_at_a_time_gives_equal_results(overrides):
    assert results_of(*overrides) == results_of(*overrides, "engine.jump=false")


@pytest.mark.parametrize(
    "overrides",
    [
        ("workload.abort_share=0.8", "workload.patience_s=0.2"),
        ("workload.abort_share=0.8", "workload.patience_s=0.2", "parallel.ranks=2"),
        ("workload.abort_share=0.4", "workload.patience_s=0.5", "workload.arrivals=open"),
    ],
)
def test_aborted_requests_are_counted_and_end_their_sessions_unless_arrivals_are_open(overrides):
    result = run(config_of(HYBRID, *overrides))
    summary = summary_of(result)
    gone = {record.id: record for record in result.records if record.status is Status.aborted}
    first = [record for record in gone.values() if record.reason == "gave up"]
    followers = [record for record in gone.values() if record.reason != "gave up"]
    assert 0 < len(gone) < len(result.records) == 60
    assert summary["request/aborted_count"] == len(gone)
    assert summary["cache/aborted_tokens"] == sum(each.prompt_len for each in gone.values())
    assert any(record.output_len for record in first)
    assert bool(followers) == ("workload.arrivals=open" not in overrides)
    for record in followers:
        assert gone[int(record.reason.removeprefix("follows aborted request "))] in first


class Weighted:
    """Weighs the age of a leaf against its length."""

    def __init__(self, world, length_weight=0.0):
        self._length_weight = length_weight

    def rank(self, entry, tier, kind):
        return (entry.used - self._length_weight * entry.count,)


class LastFirst:
    """Serves the newest request first."""

    def sort_key(self, req, match):
        return -req.number


class Generous:
    """Charges the window pool one page for every request."""

    def window_charge(self, *, page, **_):
        return page


class Named:
    """Ranks by a name and a number."""

    def rank(self, entry, tier, kind):
        return kind, (-entry.created, entry.start)


class Mixed:
    """Ranks that cannot be compared."""

    def rank(self, entry, tier, kind):
        return ("first",) if entry.id % 2 else (1,)


class OldWay:
    """A policy of an earlier release."""

    def priority(self, node):
        return (1.0,)


class Deadline:
    """A deadline without a stop policy."""

    def deadline_ns(self, prefetch):
        return 0


GEMMA = ("model=gemma3_27b", "cache.device.share.swa=0.02", "workload.limit=12")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("Named", (HYBRID, "cache.device_gib=0.01", "cache.host_gib=0.01")),
        ("LastFirst", ("model=llama3_8b", "workload.session_rate=5", "parallel.tp=1")),
        ("Generous", GEMMA),
        ("Generous", (*GEMMA, "scheduler.chunk_tokens=512", "workload.limit=6")),
    ],
)
def test_a_policy_class_of_the_user_changes_the_results_of_a_run(name, overrides):
    checked = ("engine.check_invariants=true", f"cache.policy={__name__}:{name}")
    own, builtin = (run(config_of(*overrides, *more)) for more in (checked, ()))
    assert len(own.records) == len(builtin.records)
    assert summary_of(own) != summary_of(builtin)


def test_a_policy_class_of_the_user_gets_its_arguments():
    settings = ("model=llama3_8b", "cache.device_gib=4", "cache.host_gib=8", "workload.limit=150")
    own = (f"cache.policy={__name__}:Weighted", "cache.policy_args.length_weight=")
    lru, none, nine = (
        summary_of(run(config_of(*settings, *more)))
        for more in ((), (own[0], own[1] + "0"), (own[0], own[1] + "9"))
    )
    assert lru == none != nine


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("nonsense", r"cache\.policy"),
        ("no.such:Thing", r"cache\.policy"),
        (f"{__name__}:NoSuch", r"cache\.policy"),
        (f"{__name__}:MODELS", r"cache\.policy"),
        (f"{__name__}:Mixed", "ranks on the device cannot be compared: '<' not"),
        (
            f"{__name__}:OldWay",
            r"OldWay: priority is now rank\(entry, tier, kind\); the methods are on_insert, ",
        ),
        (f"{__name__}:Deadline", "Deadline has deadline_ns without may_stop"),
        (f"{__name__}:Weighted", r"cache\.policy=.* cannot be built"),  # has no argument `patience`
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(policy, message):
    given = ("cache.policy_args={patience:2}",) if "Weighted" in policy else ()
    with pytest.raises((ValueError, PolicyError), match=message):
        run(config_of(HYBRID, "cache.device_gib=0.02", f"cache.policy={policy}", *given))


@pytest.mark.parametrize(
    ("names", "policies"),
    [(STOP_POLICIES, STOPS), (CHECKPOINT_PLACEMENTS, PLACEMENTS), (SERVICE_ORDERS, ORDERS)],
)
def test_the_config_names_every_built_in_policy(names, policies):
    assert tuple(policies) == names


@pytest.mark.parametrize(
    ("overrides", "allocator", "is_checked"),
    [
        (("engine.check_invariants=true",), PageAllocator, True),
        (("parallel.ranks=2",), TracedAllocator, False),
        (("executor=torch", "executor.device=cpu"), PageAllocator, True),
        ((), PageAllocator, False),
    ],
)
def test_settings_decide_which_checks_a_run_makes(overrides, allocator, is_checked, monkeypatch):
    checked, compared = [], []
    monkeypatch.setattr(invariants, "check", lambda *told: checked.append(told))
    monkeypatch.setattr(RankedEngine, "check_equal", lambda engine: compared.append(engine))
    run(config_of(HYBRID, "workload.limit=3", *overrides))
    num_ranks = 1 + ("parallel.ranks=2" in overrides)
    assert len(compared) == num_ranks - 1
    for cache, *_ in checked:
        for pool in (pool for pools in cache.pools for pool in pools):
            assert type(pool) is allocator
            assert (pool._out is not None) == is_checked
    num_held = [len(held) for _, _, held, *_ in checked]
    if "engine.check_invariants=true" in overrides:  # after every step
        assert len(checked) > 5
        assert max(num_held) > 0
    else:  # at the end
        assert num_held == [0] * num_ranks


@pytest.mark.parametrize("collects", [True, False])
def test_a_run_restores_the_garbage_collector_and_leaves_no_tree_nodes(collects):
    before = gc.isenabled()
    gc.collect()
    try:
        (gc.enable if collects else gc.disable)()
        nodes = sum(type(each) is Node for each in gc.get_objects())
        run(config_of(HYBRID, "workload.limit=20"))
        assert gc.isenabled() == collects
        assert sum(type(each) is Node for each in gc.get_objects()) == nodes
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(("more", "declined"), [((), True), (("cache.unlimited=true",), False)])
def test_prefetches_are_limited_by_their_share_of_a_bounded_host(more, declined):
    told = ("workload.limit=9", "prefetch.occupied_share=0", "prefetch.threshold=64")
    measures = run(config_of("model=llama3_8b", *told, *more)).measures
    assert (measures.get("prefetch/started_count", 0) == 0) == declined


@pytest.mark.parametrize(
    ("gbps", "like", "unlike"),
    [(0.2, "best_effort", "wait_complete"), (50, "wait_complete", "best_effort")],
)
def test_the_marginal_policy_waits_where_storage_is_faster_than_prefill(gbps, like, unlike):
    storage = ("workload.start=warm_storage", f"storage.read_gbps={gbps}")
    ttft_s = {
        stop: summary_of(run(config_of(*storage, f"prefetch.stop={stop}")))["request/ttft_s_mean"]
        for stop in ("marginal", like, unlike)
    }
    assert ttft_s["marginal"] == pytest.approx(ttft_s[like], rel=0.1)
    assert ttft_s["marginal"] < 0.8 * ttft_s[unlike]


def test_a_run_counts_the_requests_that_are_longer_than_the_model():
    agents = ("workload=agents", "workload.num_sessions=5", "storage=none")
    short, long = (
        run(config_of(*agents, *more)).notes for more in ((), ("model=phi4_mini_flash",))
    )
    (told,) = [note for note in long if "max_len" in note]
    assert re.fullmatch(r"\d+ requests are longer than model.max_len=65,536: they are .*", told)
    assert not [note for note in short if "max_len" in note]


def test_writes_may_pin_half_of_a_bounded_host_by_default():
    def limit(*overrides):
        config = config_of(*overrides)
        return queue_bytes(config, deploy(config))

    assert limit("cache.host_gib=6") == 3 * GIB
    assert limit("cache.device_gib=6", "cache.host_gib=null") == 6 * GIB
    assert limit("storage.write_queue_gib=0") == 0
    small, large = (limit("cache.unlimited=true", f"cache.host_gib={gib}") for gib in (1, 64))
    assert small == large > 1e6 * GIB


def test_the_notes_of_a_run_are_its_workload_its_load_and_what_the_workload_reports():
    chat = ("workload=chat", "workload.num_sessions=20", "workload.limit=30")
    result = run(config_of(*chat, "workload.max_context=12000", "workload.load=0.01"))
    first, second, third, *_ = result.notes
    assert first.startswith("chat: ")
    assert second.startswith("workload.load: target 0.01, reached ")
    assert "workload.max_context" in third

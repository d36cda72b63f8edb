"""Whole runs from a config: equal bytes, several engines, and a policy from outside."""

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hicache import experiment
from hicache.cache.checked import PolicyError
from hicache.cache.pages import Pools
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tree.entry import Entry
from hicache.cache.tree.node import MatchResult, Node
from hicache.clock import SECOND_NS
from hicache.config import (
    CHECKPOINT_PLACEMENTS,
    SERVICE_ORDERS,
    STOP_POLICIES,
    ExperimentConfig,
)
from hicache.engine.build import make_pools, queue_bytes
from hicache.engine.deployment import deploy
from hicache.engine.ranks.lockstep import RankedEngine
from hicache.experiment import run
from hicache.models import GIB
from hicache.observe import invariants
from hicache.policies.checkpoints import PLACEMENTS
from hicache.policies.order import ORDERS
from hicache.policies.routing import ROUTERS
from hicache.policies.stop import STOPS
from hicache.policies.world import World
from hicache.results.metrics import Progress, Result, Row, Status, summarize
from hicache.results.verdict import is_overloaded
from hicache.runs import schema
from hicache.scheduler.request_state import RequestState
from hicache.workload.workload import Workload, load_workload

MODELS = ["tiny_hybrid", "llama3_8b", "gemma3_27b", "qwen3_next_80b"]


class ShortestFirst:
    """A policy somebody else wrote: short edges go first."""

    def rank(self, entry: Entry, tier: str, kind: str) -> float:
        return entry.count


class Weighted:
    """A policy with a knob of its own: the age of a leaf against its length."""

    def __init__(self, world: World, length_weight: float = 0.0) -> None:
        self._length_weight = length_weight

    def rank(self, entry: Entry, tier: str, kind: str) -> tuple[float, ...]:
        return (entry.used - self._length_weight * entry.count,)


class FirstPages:
    """A stop policy somebody else wrote: an eighth of the pages will do, or 0.2 s of waiting."""

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        is_enough = prefetch.completed_pages * 8 >= prefetch.asked_pages
        return is_enough or prefetch.is_complete or now_ns > self.deadline_ns(prefetch)

    def deadline_ns(self, prefetch: Prefetch) -> int:
        return prefetch.enqueued_ns + SECOND_NS // 5


class OldWay:
    """A policy of an earlier release."""

    def priority(self, node: object) -> tuple[float, ...]:
        return (1.0,)


class Deadline:
    """A deadline of no stop policy."""

    def deadline_ns(self, prefetch: Prefetch) -> int:
        return 0


def config_of(*overrides: str) -> ExperimentConfig:
    return schema.config_of("workload=builtin", "storage=memory", "workload.limit=60", *overrides)


def summary_of(result: Result) -> str:
    return json.dumps(summarize(result.records, result.measures), sort_keys=True)


def jumped_and_stepped(*overrides: str) -> list[tuple[str, object, list[Row]]]:
    """Summary, records and rows of a run whose decode steps are taken at once, and one by one."""
    outcomes = []
    for jump in ("true", "false"):
        rows: list[Row] = []

        def keep(progress: Progress, rows: list[Row] = rows) -> None:
            if progress.row is not None:
                rows.append(progress.row)

        result = run(config_of(*overrides, f"engine.jump={jump}"), progress=keep)
        outcomes.append((summary_of(result), result.records, rows))
    return outcomes


@pytest.mark.parametrize("model", MODELS)
def test_taking_decode_steps_one_by_one_leaves_the_same_summary(model: str) -> None:
    jumping, stepping = jumped_and_stepped(f"model={model}", "workload.limit=25")
    assert jumping == stepping


@pytest.mark.parametrize(
    "overrides",
    [
        ["workload.warm_up_s=30.5", "tracker.interval_s=0.37"],
        ["parallel.ranks=2", "storage.delay_s=0.05", "workload.start=warm_storage"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_it_does_so_whoever_looks_in_between(overrides: list[str]) -> None:
    small = ["model=tiny_hybrid", "cache.device_gib=0.02", "cache.host_gib=0.02"]
    jumping, stepping = jumped_and_stepped(*small, *overrides)
    assert jumping == stepping


def test_two_equal_runs_leave_the_same_summary() -> None:
    config = config_of("model=tiny_hybrid", "cache.device_gib=0.02", "cache.host_gib=0.02")
    assert summary_of(run(config)) == summary_of(run(config))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("router", ROUTERS)
def test_replicas_share_the_work_and_lose_none_of_it(router: str, ranks: int) -> None:
    result = run(
        config_of(
            "model=tiny_hybrid",
            "storage=memory",
            "parallel.replicas=3",
            f"parallel.ranks={ranks}",
            f"parallel.router={router}",
            "engine.check_invariants=true",
            "workload.limit=30",
        )
    )
    assert len(result.records) == 30
    assert {record.engine for record in result.records} >= {0, 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_those_who_give_up_are_counted_apart(ranks: int) -> None:
    overrides = [
        "model=tiny_hybrid",
        "workload.abort_share=0.8",
        "workload.patience_s=0.2",
        f"parallel.ranks={ranks}",
    ]
    result = run(config_of(*overrides))
    summary = summarize(result.records, result.measures)
    gone = {record.id: record for record in result.records if record.status is Status.aborted}
    first = [record for record in gone.values() if record.reason == "gave up"]
    followers = [record for record in gone.values() if record.reason != "gave up"]
    assert len(result.records) == 60
    assert len(gone) < 60
    assert summary["request/aborted_count"] == len(gone)
    assert summary["cache/aborted_tokens"] == sum(each.prompt_len for each in gone.values())
    assert any(record.output_len for record in first)
    assert followers
    for record in followers:
        assert gone[int(record.reason.removeprefix("follows aborted request "))] in first
    again = run(config_of(*overrides, "engine.jump=false"))
    assert summary_of(again) == summary_of(result)


def test_under_open_arrivals_nobody_is_taken_along_by_those_who_give_up() -> None:
    result = run(
        config_of(
            "model=tiny_hybrid",
            "workload.arrivals=open",
            "workload.abort_share=0.4",
            "workload.patience_s=0.5",
        )
    )
    gone = [record for record in result.records if record.status is Status.aborted]
    assert gone
    assert {record.reason for record in gone} == {"gave up"}


def test_a_policy_of_ones_own_is_named_by_module_and_class() -> None:
    small = ["model=tiny_hybrid", "cache.device_gib=0.01", "cache.host_gib=0.01"]
    own = run(config_of(*small, "cache.policy=tests.test_experiment:ShortestFirst"))
    lru = run(config_of(*small))
    assert len(own.records) == 60
    assert summary_of(own) != summary_of(lru)


@pytest.mark.parametrize("name", ["nonsense", "no.such:Thing", "tests.test_experiment:NoSuch"])
def test_a_policy_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"cache\.policy"):
        run(config_of("model=tiny_hybrid", f"cache.policy={name}"))


def test_a_policy_that_is_not_a_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache\.policy"):
        run(config_of("model=tiny_hybrid", "cache.policy=tests.test_experiment:MODELS"))


SLOW_STORAGE = (
    "model=tiny_hybrid",
    "cache.device_gib=0.02",
    "cache.host_gib=0.02",
    "workload.start=warm_storage",
    "storage.read_gbps=0.001",
    "storage.batch_pages=4",
    "prefetch.commit=usable",
    "engine.check_invariants=true",
)


@pytest.mark.parametrize(("ranks", "others"), [(1, STOP_POLICIES), (2, ["wait_complete"])])
def test_a_stop_policy_of_ones_own_is_named_by_module_and_class(
    ranks: int, others: Sequence[str]
) -> None:
    stops = [f"prefetch.stop={each}" for each in others]
    own, *ours = (
        run(config_of(*SLOW_STORAGE, f"parallel.ranks={ranks}", each))
        for each in ("cache.policy=tests.test_experiment:FirstPages", *stops)
    )
    assert own.measures["prefetch/terminated_count"] > 0
    assert summary_of(own) not in [summary_of(each) for each in ours]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "OldWay",
            r"OldWay: priority is now rank\(entry, tier, kind\); the methods are on_insert, ",
        ),
        ("Deadline", "Deadline has deadline_ns without may_stop"),
    ],
)
def test_a_policy_that_would_never_be_asked_is_refused(name: str, told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        run(config_of("model=tiny_hybrid", f"cache.policy={__name__}:{name}"))


class Named:
    """Ranks by a name and a number."""

    def rank(self, entry: Entry, tier: str, kind: str) -> tuple[str, tuple[int, int]]:
        return kind, (entry.created, entry.start)


class Mixed:
    """Ranks that have no order."""

    def rank(self, entry: Entry, tier: str, kind: str) -> tuple[int | str]:
        return ("first",) if entry.id % 2 else (1,)


def test_a_rank_may_be_any_tuple_that_python_can_compare() -> None:
    small = ("model=tiny_hybrid", "cache.device_gib=0.02", "workload.limit=60")
    assert run(config_of(*small, f"cache.policy={__name__}:Named")).records
    with pytest.raises(PolicyError, match="ranks on the device cannot be compared: '<' not"):
        run(config_of(*small, f"cache.policy={__name__}:Mixed"))


def test_a_policy_has_knobs_of_its_own() -> None:
    small = ("model=llama3_8b", "cache.device_gib=4", "cache.host_gib=8", "workload.limit=200")
    own = ("cache.policy=tests.test_experiment:Weighted", "cache.policy_args.length_weight=")
    lru, weighted = (run(config_of(*small, own[0], own[1] + weight)) for weight in ("0", "9"))
    assert summary_of(lru) == summary_of(run(config_of(*small)))
    assert summary_of(weighted) != summary_of(lru)


class LastFirst:
    """A service order somebody else wrote: who came last is served first."""

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        return -req.number


class Generous:
    """A window budget somebody else wrote: a page, whatever is asked for."""

    def window_charge(self, *, page: int, **_: object) -> int:
        return page


class Middle:
    """A placement somebody else wrote: half way, to the token."""

    def __init__(self, world: World, share: float = 0.5) -> None:
        self._share = share

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        return [start + round((end - start) * self._share)]


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("LastFirst", "model=llama3_8b workload.session_rate=5 parallel.tp=1"),
        ("Generous", "model=gemma3_27b cache.device.share.swa=0.02"),
        ("Generous", "model=gemma3_27b cache.device.share.swa=0.02 scheduler.chunk_tokens=512"),
        ("Middle", "model=qwen3_next_80b cache.policy_args.share=0.25"),
    ],
)
def test_what_the_scheduler_decides_may_be_a_class_of_ones_own(name: str, rest: str) -> None:
    overrides = [*rest.split(), "workload.limit=12"]
    checked = (*overrides, "engine.check_invariants=true")
    own = run(config_of(*checked, f"cache.policy=tests.test_experiment:{name}"))
    assert len(own.records) == 12
    defaults = [each for each in overrides if "_args" not in each]
    assert summary_of(own) != summary_of(run(config_of(*defaults)))


def pools_asked_for(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[dict[str, bool]]:
    """How the pools of each rank are to be made."""
    asked: list[dict[str, bool]] = []

    def watched(*told: Any, **named: bool) -> Pools:
        asked.append(named)
        return make_pools(*told, **named)

    monkeypatch.setattr("hicache.engine.build.make_pools", watched)
    run(config_of("model=tiny_hybrid", *overrides, "workload.limit=2"))
    return asked


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_pools_give_and_take_is_traced_where_ranks_are_compared(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pools_asked_for(monkeypatch, f"parallel.ranks={ranks}")
    assert [each["is_traced"] for each in asked] == [ranks > 1] * ranks


def test_pools_are_checked_where_it_is_asked_for_and_where_memory_is_real(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = ("executor=torch", "executor.device=cpu")
    for overrides, wanted in (((), False), (("engine.check_invariants=true",), True), (real, True)):
        (asked,) = pools_asked_for(monkeypatch, *overrides)
        assert asked["is_checked"] is wanted


@pytest.mark.parametrize("collects", [True, False])
def test_a_run_leaves_the_garbage_collector_as_it_was(*, collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        run(config_of("model=tiny_hybrid", "workload.limit=2"))
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_a_run_leaves_no_nodes_to_the_garbage_collector() -> None:
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        nodes = sum(type(each) is Node for each in gc.get_objects())
        run(config_of("model=tiny_hybrid", "workload.limit=20"))
        assert sum(type(each) is Node for each in gc.get_objects()) == nodes
    finally:
        (gc.enable if before else gc.disable)()


def test_laws_are_checked_after_every_step_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[int] = []
    monkeypatch.setattr(
        invariants, "check", lambda cache, prefetcher, held, *_: checked.append(len(held))
    )
    run(config_of("model=tiny_hybrid", "workload.limit=3"))
    assert checked == [0]  # at the end
    run(config_of("model=tiny_hybrid", "workload.limit=3", "engine.check_invariants=true"))
    assert len(checked) > 5
    assert max(checked) > 0


@pytest.mark.parametrize(("more", "declined"), [((), True), (("cache.unlimited=true",), False)])
def test_reads_are_held_back_by_their_share_of_a_host_that_has_an_end(
    more: tuple[str, ...], *, declined: bool
) -> None:
    told = ("workload.limit=9", "prefetch.occupied_share=0", "prefetch.threshold=64")
    measures = run(config_of("model=llama3_8b", *told, *more)).measures
    assert (measures.get("prefetch/started_count", 0) == 0) == declined


@pytest.mark.parametrize(
    ("knob", "ours"),
    [
        ("parallel.router", ", ".join(ROUTERS)),
        ("executor.kind", "simulated, torch"),
        ("executor.copy_path", "kernel, copy_engine, staged"),
        ("scheduler.swa_budget", "no_host_term, reports, double, sglang_0_5_23"),
    ],
)
def test_what_can_only_be_ours_is_named_right_or_refused(knob: str, ours: str) -> None:
    with pytest.raises(ValueError, match=f"{knob} must be one of {ours}, got 'mine'"):
        config_of(f"{knob}=mine")


def test_an_argument_that_a_policy_has_not_is_refused() -> None:
    own = f"cache.policy={__name__}:Weighted"
    with pytest.raises(ValueError, match=r"cache\.policy=.* cannot be built"):
        run(config_of("model=tiny_hybrid", own, "cache.policy_args={patience:2}"))


def test_a_queue_that_never_empties_is_overload_whatever_the_gpu_does() -> None:
    fast = ("workload.session_rate=2.85", "storage.write_gbps=100")  # so that storage is no queue
    alone, together = (
        summarize(result.records, result.measures)
        for most in (1, 256)
        for result in [run(config_of(*fast, f"scheduler.max_running={most}"))]
    )
    assert alone["load/rho_gpu"] == together["load/rho_gpu"] < 0.9
    assert alone["load/rho_queue"] > 0.9 > together["load/rho_queue"]
    assert is_overloaded(alone)
    assert not is_overloaded(together)


def test_what_was_hit_costs_next_to_no_gpu_time_in_prefill() -> None:
    fast = ("workload.start=warm_storage", "storage.read_gbps=500", "prefetch.stop=wait_complete")
    cold, warm = (
        summarize(result.records, result.measures)["gpu/prefill_seconds_per_request"]
        for result in (run(config_of()), run(config_of(*fast)))
    )
    assert 0 < warm < cold / 10


@pytest.mark.parametrize(("gbps", "like"), [(0.2, "best_effort"), (50, "wait_complete")])
def test_marginal_waits_where_storage_is_faster_than_computing(gbps: float, like: str) -> None:
    storage = ("workload.start=warm_storage", f"storage.read_gbps={gbps}")
    ttft_s = {
        stop: summarize(result.records, result.measures)["request/ttft_s_mean"]
        for stop in ("marginal", "best_effort", "wait_complete")
        for result in [run(config_of(*storage, f"prefetch.stop={stop}"))]
    }
    other = {"best_effort": "wait_complete", "wait_complete": "best_effort"}[like]
    assert ttft_s["marginal"] == pytest.approx(ttft_s[like], rel=0.1)
    assert ttft_s["marginal"] < 0.8 * ttft_s[other]


@pytest.mark.parametrize(
    ("names", "policies"),
    [
        (STOP_POLICIES, STOPS),
        (CHECKPOINT_PLACEMENTS, PLACEMENTS),
        (SERVICE_ORDERS, ORDERS),
    ],
)
def test_the_config_knows_the_names_of_the_policies_there_are(
    names: tuple[str, ...], policies: dict[str, object]
) -> None:
    assert tuple(policies) == names


def test_requests_that_come_whatever_the_engine_does_are_each_judged_by_themselves() -> None:
    config = config_of(
        "model=tiny_hybrid",
        "workload.limit=100",
        "workload.arrivals=open",
        "cache.device_gib=0.02",
        "engine.check_invariants=true",
    )
    records = run(config).records
    assert [record.id for record in records] == sorted({record.id for record in records})
    assert len(records) == 100
    assert {record.status.name for record in records} == {"finished", "rejected"}
    assert not any("follows" in record.reason for record in records)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["executor=torch"], r"ranks=2 needs executor\.kind=simulated \(.*\), got torch"),
        (["storage=none"], r"ranks=2 needs a storage engine, got storage\.kind=none"),
    ],
)
def test_ranks_without_what_they_need_are_refused_before_anything_is_built(
    overrides: list[str], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        config_of("model=tiny_hybrid", "parallel.ranks=2", *overrides)


def test_a_workload_that_is_too_long_for_the_model_is_told_before_its_numbers() -> None:
    overrides = ("workload=agents", "workload.num_sessions=5", "storage=none")
    (told,) = [
        note
        for note in run(config_of(*overrides, "model=phi4_mini_flash")).notes
        if "max_len" in note
    ]
    assert re.fullmatch(r"\d+ requests are longer than model.max_len=65,536: they are .*", told)
    assert not [note for note in run(config_of(*overrides)).notes if "max_len" in note]


def test_writes_may_pin_half_of_the_host_unless_told_otherwise() -> None:
    config = config_of("cache.host_gib=6")
    assert queue_bytes(config, deploy(config)) == 3 * GIB
    twice = config_of("cache.device_gib=6", "cache.host_gib=null")
    assert queue_bytes(twice, deploy(twice)) == 6 * GIB
    none = config_of("storage.write_queue_gib=0")
    assert queue_bytes(none, deploy(none)) == 0


def test_the_write_queue_of_unlimited_pools_does_not_depend_on_the_host() -> None:
    configs = [config_of("cache.unlimited=true", f"cache.host_gib={gib}") for gib in (1, 64)]
    small, large = (queue_bytes(config, deploy(config)) for config in configs)
    assert small == large > 1e6 * GIB


@pytest.mark.parametrize("asked", [0.003, 0.01])
def test_a_load_is_asked_and_reached(asked: float) -> None:
    knobs = ("workload=chat", "workload.num_sessions=40", "workload.limit=null")
    result = run(config_of(*knobs, f"workload.load={asked}"))
    (note,) = [note for note in result.notes if note.startswith("workload.load")]
    told = re.search(
        rf"target {asked:g}, reached ([0-9.]+) .* with ([0-9.]+) times the sessions", note
    )
    assert told is not None
    assert float(told[1]) == pytest.approx(asked, rel=0.5)
    num_sessions = len({record.session_id for record in result.records})
    assert num_sessions == pytest.approx(40 * float(told[2]), abs=1)
    assert (asked == 0.01) == (num_sessions > 40)


def test_the_first_note_says_what_was_served() -> None:
    result = run(config_of("workload=chat", "workload.num_sessions=2", "storage=none"))
    assert result.notes[0].startswith("chat: ")


def test_what_a_workload_says_of_itself_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_note(*told: object, **named: object) -> Workload:
        return replace(load_workload(*told, **named), notes=("half of it",))

    monkeypatch.setattr(experiment, "load_workload", with_a_note)
    assert "half of it" in run(config_of("model=llama3_8b", "workload.limit=3")).notes


def test_ranks_are_compared_once_more_when_all_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(RankedEngine, "check_equal", lambda engine: compared.append(engine))
    run(config_of("model=llama3_8b", "workload.limit=3", "parallel.ranks=2"))
    assert len(compared) == 1


def test_a_window_that_is_computed_again_is_freed_at_the_end_of_its_prompt() -> None:
    # freed with the first answer token, it would admit a waiting request in the middle of a run of
    # decode steps
    told = (
        "workload=shared_prefix",
        "model=tiny_hybrid",
        "model.window_len=512",
        "model.pattern=F S",
        "model.num_layers=4",
        "model.num_mamba_layers=0",
        "model.window_restarts=true",
        "workload.prefix_tokens=5000",
        "workload.own_tokens=2000",
        "workload.answer_tokens=2000",
        "workload.token_stride=4",
        "workload.time_scale=0.0005",
        "workload.limit=4",
        "storage=memory",
        "cache.page_size=512",
        "cache.window=replay",
        "cache.write_policy=write_through_selective",
        "cache.device_gib=0.003662109375",
        "cache.device.share.swa=0.2833333333333333",
    )
    assert summary_of(run(config_of(*told))) == summary_of(
        run(config_of(*told, "engine.jump=false"))
    )

"""Pipeline stages: sizes, batches in flight, late copies and shards of storage."""

from typing import Any

import pytest

from hicache import experiment
from hicache.cache.tiers.transfer import BackUp, Move
from hicache.cli.explain.segments import Steps, segments_of
from hicache.clock import NEVER, SimulatedClock, to_ns
from hicache.engine.deployment import Deployment, deploy
from hicache.engine.simulated_runtime import SimulatedRuntime
from hicache.executor.simulated.pipeline import PipelineExecutor, Shards
from hicache.executor.simulated.stores import EndlessStore
from hicache.memory import Capacity, smallest
from hicache.models.stages import layers_of_stages
from hicache.observe.timeline import Timeline
from hicache.request import Request
from hicache.results.metrics import summarize
from hicache.results.pipeline import unused_bytes
from hicache.runs.schema import config_of
from hicache.scheduler.batch import Batch
from hicache.workload.workload import Workload
from tests.executor.works import key
from tests.fuzz.scenario import choices_of
from tests.fuzz.trial import try_choices
from tests.scheduler.world import fresh

BASE = (
    *("model=llama3_8b", "workload=chat", "storage=none", "parallel.tp=1", "cache.host_gib=16"),
    *("workload.arrivals=open", "engine.check_invariants=true", "workload.start_jitter_s=0"),
)


def run(requests: list[Request], *words: str) -> tuple[dict[int, Any], dict[str, float]]:
    """The records of a run by request id, and its measures."""
    workload = Workload(name="own", requests=requests)
    result = experiment.run(config_of(*BASE, *words), workload=workload)
    summarize(result.records, result.measures)  # also checks all sums
    return {record.id: record for record in result.records}, result.measures


def stages_of(*words: str) -> tuple[Deployment, SimulatedRuntime, PipelineExecutor]:
    config = config_of(*BASE, *words)
    deployment = deploy(config)
    runtime = SimulatedRuntime(config, deployment)
    executor = runtime.executor(None)  # type: ignore[arg-type]  # not used
    assert isinstance(executor, PipelineExecutor)
    return deployment, runtime, executor


# -- sizes -------------------------------------------------------------------------------------


def test_all_stages_hold_as_many_tokens_as_the_smallest() -> None:
    # layers 3 and 4 of 1,000 bytes a token, 10 GB each: 3,333,333 and 2,500,000 tokens
    tiers = [Capacity(counts=(10**10 // size,), total_bytes=10**10) for size in (3000, 4000)]
    assert tiers[0].counts == (3_333_333,)
    assert smallest(tiers, [7000]).counts == (2_500_000,)


def test_layers_are_divided_as_sglang_does_or_as_given() -> None:
    assert layers_of_stages(61, 4) == [15, 15, 15, 16]
    assert layers_of_stages(61, 2, [20, 41]) == [20, 41]
    for pp, given in ((2, [20, 40]), (3, [20, 41]), (62, [])):
        with pytest.raises(ValueError, match="61 layers"):
            layers_of_stages(61, pp, given)


@pytest.mark.parametrize("host_format", ["plain", "fp8"])
def test_61_layers_in_four_stages_leave_a_sixteenth_of_three_hosts_unused(host_format) -> None:
    config = config_of(
        *("model=deepseek_v3", "hardware=h200", "parallel.tp=2", "parallel.pp=4"),
        *("cache.host_gib=512", "storage=none", f"cache.host_format={host_format}"),
    )
    deployment = deploy(config)
    assert deployment.num_devices == 8
    shares = [
        lost / stage.host.total_bytes
        for stage, lost in zip(deployment.stages, unused_bytes(deployment, "host"), strict=True)
    ]
    assert shares == pytest.approx([0.0625] * 3 + [0.0], abs=1e-4)


def test_more_devices_than_the_machine_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most the 8 devices of h100, got 4 times 4"):
        deploy(config_of(*BASE, "hardware=h100", "parallel.tp=4", "parallel.pp=4"))


@pytest.mark.parametrize(
    "setting",
    [
        *("speculation.drafts=1", "cache.pools=shared"),
        *("scheduler.batching=running_first", "cache.window=replay", "executor.capture=cut"),
    ],
)
def test_settings_that_pipeline_stages_do_not_support_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r"parallel.pp=2 does not support"):
        config_of(*BASE, "storage=memory", "parallel.pp=2", setting)


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [2, 4])
def test_chunks_of_a_prompt_follow_each_other_through_the_stages(pp: int) -> None:
    num_chunks, chunk = 6, 1000 // 64 * 64
    words = f"parallel.pp={pp}", f"scheduler.chunk_tokens={chunk}"
    records, measures = run([fresh(0, num_chunks * chunk, 1)], *words)
    stages = deploy(config_of(*BASE, *words)).stages
    free_ns, end_ns = [0] * pp, 0
    for start in range(0, num_chunks * chunk, chunk):
        end_ns = free_ns[0]
        for number, stage in enumerate(stages):
            cost = stage.cost.forward_ns([(start, start + chunk)], [])
            free_ns[number] = end_ns = max(end_ns, free_ns[number]) + cost.total_ns
    # (k + p - 1) times that of a stage, which the head and longer prefixes change a little
    alone_ns = end_ns / (num_chunks + pp - 1)
    assert alone_ns == pytest.approx(stages[0].cost.prefill_s(0, chunk) * 1e9, rel=0.2)
    assert records[0].ttft_ns == pytest.approx(end_ns, rel=0.05)  # copies slow it a little
    bubbles = (pp - 1) / (num_chunks + pp - 1)
    assert measures["pipeline/bubble_share"] == pytest.approx(bubbles, abs=0.05)


def test_stages_compute_batches_of_several_requests_at_the_same_time() -> None:
    requests = [fresh(number, 64, 50) for number in range(2)]
    spread = [fresh(0, 64, 50), fresh(1, 64, 50, 1)]
    alone, _ = run(requests[:1], "parallel.pp=2")
    both, measures = run(spread, "parallel.pp=2")
    assert both[1].finish_ns < alone[0].finish_ns * 1.1
    assert measures["pipeline/bubble_share"] < 0.2


@pytest.mark.parametrize(("layers", "is_at_deadline"), [("[2,30]", True), ("[30,2]", False)])
def test_only_stage_0_checks_the_deadline_of_a_prefetch(
    layers: str, *, is_at_deadline: bool
) -> None:
    # one stage is busy beyond the deadline, with a request that prefetches nothing
    words = (
        *("parallel.pp=2", f"parallel.stage_layers={layers}", "storage=memory"),
        *("workload.start=warm_storage", "storage.read_gbps=0.001", "prefetch.threshold=10000"),
        *("prefetch.timeout_base_s=0.05", "prefetch.timeout_per_ki_token_s=0"),
        "scheduler.chunk_tokens=16384",
    )
    busy, waiting = fresh(0, 9000, 1), fresh(1, 12_000, 1, 1)
    alone = run([waiting], *words)[0][1]
    behind = run([busy, waiting], *words)[0][1]
    deadline_ns, wait_ns = (each.queue_ns + each.storage_wait_ns for each in (alone, behind))
    assert deadline_ns >= to_ns(0.05)
    assert (wait_ns == deadline_ns) == is_at_deadline
    assert wait_ns >= deadline_ns


# -- copies and storage ------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "is_late"), [("[8,24]", True), ("[24,8]", False)])
def test_a_later_stage_waits_for_as_many_copies_as_stage_0_has_finished(
    layers: str, *, is_late: bool
) -> None:
    words = "parallel.pp=2", f"parallel.stage_layers={layers}"
    deployment, runtime, executor = stages_of(*words)
    num_bytes = deployment.kinds.page_bytes[0] * 100
    for _ in range(3):
        pages = [0] * 100
        copy = BackUp(
            moves=[Move(0, pages, pages)],
            num_bytes=num_bytes,
            node=None,  # type: ignore[arg-type]
            starts={},
            points=[],
            is_fence=False,
        )
        executor.submit(copy, 0)
    done = []
    while (now_ns := runtime.io.pass_by(NEVER, SimulatedClock())) < NEVER:
        done += runtime.io.advance(now_ns)
        last_ns = now_ns
    assert len(done) == 3  # the engine sees those of stage 0, and decides by them
    own = last_ns * (24 if is_late else 8) // (8 if is_late else 24)
    assert executor.stages[1].ready_ns == pytest.approx(own, rel=0.01)
    executor.forward(Batch(decodes=[]), last_ns)
    late_ns = runtime.counters["pipeline/late_copies_ns"]
    assert (late_ns > 0) == is_late


def test_a_page_is_in_storage_if_every_stage_has_its_part() -> None:
    stores = [EndlessStore() for _ in range(2)]
    store = Shards(stores)
    pages = list(map(key, range(8)))
    stores[0].write(pages)
    stores[1].write(pages[:6])
    assert store.read(pages) * 64 == 384
    states = [key(number, 2) for number in (3, 5, 7)]  # at 4, 6 and 8 pages
    stores[0].write([states[0], states[2]])
    stores[1].write(states[:2])
    assert store.contains(states) == [True, False, False]
    stores[0].delete(pages[:1])
    assert store.read(pages) == 0


# as SGLang's test of stages with a host tier: pages of 64 tokens, chunks of 256, a small host
RANKED = (
    *("model=qwen3_next_80b", "workload=agents", "workload.limit=30", "workload.session_rate=2"),
    *("storage=memory", "parallel.tp=2", "parallel.pp=2", "scheduler.chunk_tokens=256"),
    *("cache.page_size=64", "cache.device_gib=4", "cache.host.sglang_ratio=1.2"),
    *("cache.host_gib=null", "engine.check_invariants=true", "workload.token_stride=32"),
    *("prefetch.threshold=64", "storage.delay_s=0.01"),
)


def test_two_ranks_of_pipeline_stages_make_the_decisions_of_one_rank() -> None:
    hits = []
    for num_ranks in (1, 2):
        result = experiment.run(
            config_of(*RANKED, f"parallel.ranks={num_ranks}", "compat.rules.collective_s=0")
        )
        hits.append([each.computed_len for each in result.records])
        assert result.measures["pipeline/bubble_share"] > 0
    assert sum(each.storage_hit_len for each in result.records)
    assert hits[0] == hits[1]


def test_a_rank_without_its_part_of_a_stage_shortens_the_hit_for_all() -> None:
    words = *RANKED, "parallel.ranks=2", "storage.faults.full_rate=0.2"
    measures = experiment.run(config_of(*words)).measures
    assert measures["agreement/given_up_pages"] > 0
    assert measures["agreement/illegal_lengths_count"] == 0


# -- what an explanation shows -----------------------------------------------------------------


def test_parts_of_an_explanation_add_up_to_the_ttft_although_chunks_overlap() -> None:
    timeline = Timeline()
    words = "parallel.pp=4", "scheduler.chunk_tokens=512", "engine.jump=false"
    workload = Workload(name="own", requests=[fresh(0, 4000, 9), fresh(1, 3000, 9, 5)])
    result = experiment.run(config_of(*BASE, *words), workload=workload, timeline=timeline)
    for record in result.records:
        segments = segments_of(record, timeline, {0: Steps(timeline, 0)})
        assert min(each.length_ns for each in segments) > 0
        assert sum(each.length_ns for each in segments) == record.ttft_ns
    assert {step.number for step in timeline.steps} == set(range(4))


def test_batches_that_wait_for_pages_of_each_other_do_not_deadlock() -> None:
    words = "talk.gap_s=0.05 talk.giants=1 workload.start=warm_storage cache.page_size=1"
    choices = choices_of(["seed=870", "talk.longest_answer=300", "stages=two", *words.split()])
    try_choices(choices, 13)

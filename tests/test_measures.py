"""What a whole run says of itself, by workloads that one can work out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hicache import experiment
from hicache.clock import SECOND_NS
from hicache.experiment import _workload
from hicache.models import LayerKind
from hicache.models.cost import CostModel
from hicache.results.metrics import Result, summarize
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload, load_workload, repeat_sessions, sample_sessions
from tests.scheduler.world import request_of
from tests.validity import runs

PLAIN = ("model=llama3_8b", "parallel.tp=4", "storage=none", "cache.device_gib=8")


def run(*requests: tuple[float, int, int], more: tuple[str, ...] = ()) -> Result:
    """A run of requests that share nothing: (arrival in seconds, prompt, answer)."""
    arrivals, prompts, answers = zip(*requests, strict=True)
    made = runs.strangers([int(each * SECOND_NS) for each in arrivals], prompts, answers)
    return runs.run(made, *PLAIN, "cache.host_gib=2", "workload.arrivals=open", *more)


def test_devices_are_busy_from_the_arrival_of_a_request_that_is_alone_to_its_answer() -> None:
    result = run((0, 1024, 5))
    (record,) = result.records
    assert record.finish_ns is not None
    measures = result.measures
    assert measures["gpu/busy_s"] == pytest.approx(4 * record.finish_ns / SECOND_NS)
    assert measures["gpu/prefill_s"] == pytest.approx(4 * record.prefill_ns / SECOND_NS)
    assert measures["engine/span_s"] == pytest.approx(record.finish_ns / SECOND_NS)
    assert measures["engine/steps_count"] == 5


def test_the_load_is_what_is_asked_for_over_the_time_in_which_it_comes() -> None:
    config = config_of(*PLAIN, "cache.host_gib=2", "workload.arrivals=open")
    cost = CostModel(config.model, config.hardware, tp=4)
    alone_s = cost.offered_s(0, 1024, 1, 1)  # of one token: in any batch
    apart = run((0, 1024, 1), (10, 1024, 1)).measures
    assert apart["load/rho_gpu"] == pytest.approx(2 * alone_s / 10)
    together = run((0, 1024, 1), (0.5, 1024, 1)).measures  # a second at least
    assert together["load/rho_gpu"] == pytest.approx(2 * alone_s)


def test_what_reads_and_writes_share_is_as_busy_for_either() -> None:
    settings = ("storage=memory", "storage.shared_gbps=2")  # of 6 to read and 4 to write
    measures = run((0, 1024, 1), (10, 1024, 1), more=settings).measures
    assert measures["transfer/storage_read_bytes"] == 0
    busy = measures["transfer/storage_write_bytes"] / 10 / 2e9
    assert busy > 0
    for side in ("read", "write"):
        assert measures[f"load/rho_{side}"] == pytest.approx(busy)


def test_workers_are_busy_while_they_wait_for_storage() -> None:
    requests = tuple((2.5 * number, 1024, 1) for number in range(5))
    settings = ("storage=memory", "storage.write=selective", "storage.query_s=2")
    measures = run(*requests, more=settings).measures  # in 10 s, from the first to the last
    assert measures["storage/query_count"] > 0
    assert measures["load/rho_workers"] == pytest.approx(2 * measures["storage/query_count"] / 10)
    assert max(measures["load/rho_read"], measures["load/rho_write"]) < 0.1
    settings = ("storage=memory", "storage.operation_s=1", "storage.write_workers=2")
    few, more = (run(*requests, more=settings[:n]).measures["load/rho_workers"] for n in (2, 3))
    assert few > 0
    assert more == pytest.approx(few / 2, rel=1e-6)


def test_nobody_waits_for_room_where_there_is_enough() -> None:
    assert run((0, 1024, 1), (10, 1024, 1)).measures["load/rho_queue"] == 0


def test_the_working_set_counts_every_token_once() -> None:
    requests = []
    for number, answer in enumerate((9000, 0)):  # of all ids the last, and the first
        first = 5000 + 100 * number  # 50 tokens of what follows are both's
        prompt = [*range(10, 1010), *range(first, first + 150)]
        requests.append(request_of(number, prompt, [answer], number * SECOND_NS))
    config = (*PLAIN, "cache.host_gib=2", "workload.arrivals=open")
    measures = runs.run(runs.workload(requests), *config).measures
    assert measures["workload/distinct_tokens"] == 1000 + 250 + 2
    model = config_of(*config).model
    page_size = config_of(*config).cache.page_size
    page_bytes = model.page_bytes(LayerKind.full, page_size)
    host_tokens = 2 * 2**30 // page_bytes * page_size
    assert measures["load/host_over_working_set"] == pytest.approx(host_tokens / 1252, rel=0.01)


def test_the_working_set_holds_what_tenants_have_in_common_for_each_of_them() -> None:
    requests = [
        request_of(number, range(100), [100], number * SECOND_NS, namespace=namespace)
        for number, namespace in enumerate(("", "", "tenant"))
    ]
    config = (*PLAIN, "cache.host_gib=2", "workload.arrivals=open")
    measures = runs.run(runs.workload(requests), *config).measures
    assert measures["workload/distinct_tokens"] == 2 * 101


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (
            ("model=llama3_8b", "cache.device_gib=8", "cache.host_gib=0.999"),
            [
                "llama3_8b on 4 device(s), device: 8.0 GiB = 65,536 full tokens",
                "llama3_8b on 4 device(s), host: 1023.0 MiB = 8,128 full tokens",
            ],
        ),
        (
            ("model=tiny_hybrid", "cache.device_gib=1", "cache.host_gib=0.5"),
            [
                "tiny_hybrid on 1 device(s), device: 1.0 GiB = 1,048,576 full tokens + "
                "524,288 swa tokens + 10,485 states",
                "tiny_hybrid on 1 device(s), host: 512.0 MiB = 629,120 full tokens + "
                "209,664 swa tokens + 4,194 states",
            ],
        ),
        (
            ("model=tiny_hybrid", "cache.unlimited=true"),
            ["tiny_hybrid on 1 device(s): pools of unlimited size"],
        ),
    ],
)
def test_a_run_says_what_its_pools_hold(overrides: tuple[str, ...], notes: list[str]) -> None:
    made = runs.strangers([0], [64], [1])
    assert [each for each in runs.run(made, *overrides).notes if " device(s)" in each] == notes


def offered(workload: Workload) -> float:
    """Seconds of two machines' work, each of four devices, that it brings a second."""
    config = config_of(*PLAIN, "cache.host_gib=2")
    cost = CostModel(config.model, config.hardware, tp=4)
    lengths = [(0, each.prompt_len, each.output_len) for each in workload.requests]
    arrivals = [each.arrival_ns for each in workload.requests]
    span_s = max((max(arrivals) - min(arrivals)) / SECOND_NS, 1.0)
    return sum(cost.offered_s(*each, 32) for each in lengths) / span_s / 2


@pytest.mark.parametrize("share", [0.25, 1.0, 2.5])
def test_a_load_that_is_asked_for_takes_so_many_sessions_or_repeats_them(share: float) -> None:
    config = config_of("workload=builtin", "model=llama3_8b", "parallel.replicas=2")
    whole = load_workload(config.workload, data_dir=None, seed=config.seed)
    asked = share * offered(whole)
    notes: list[str] = []
    found = _workload(
        replace(config, workload=replace(config.workload, load=asked)),
        CostModel(config.model, config.hardware, tp=4),
        notes,
    )
    change = sample_sessions if share <= 1 else repeat_sessions
    wanted = change(whole, share, config.seed)
    ids = [[(each.id, each.arrival_ns) for each in one.requests] for one in (found, wanted)]
    assert ids[0] == ids[1]
    assert notes[:2] == [
        found.description,
        f"workload.load: target {asked:g}, reached {offered(wanted):.3g} (GPU utilization without "
        f"cache hits) with {share:.3g} times the sessions",
    ]


def test_storage_says_which_faults_it_was_given() -> None:
    faulty = ("storage=memory", "storage.faults.error_rate=1.0", "prefetch.threshold=64")
    measures = run((0, 2048, 1), (5, 2048, 1), more=faulty).measures
    assert measures["storage/injected_error_count"] > 0
    assert measures["load/rho_read"] == 0


def test_reads_and_writes_load_storage_by_their_bytes() -> None:
    stored = ("storage=memory", "storage.read_gbps=2", "storage.write_gbps=4")
    warm = (*stored, "workload.start=warm_storage", "prefetch.stop=wait_complete")
    measures = run((0, 2048, 1), (5, 2048, 1), more=warm).measures
    read = measures["transfer/storage_read_bytes"]
    assert read > 0
    assert measures["load/rho_read"] == pytest.approx(read / 5 / 2e9)
    cold = run((0, 2048, 1), (5, 2048, 1), more=stored).measures
    written = cold["transfer/storage_write_bytes"]
    assert written > 0
    assert cold["load/rho_write"] == pytest.approx(written / 5 / 4e9)


def test_several_engines_share_the_load() -> None:
    two = ("parallel.replicas=2", "parallel.router=round_robin")
    alone, shared = (run((0, 1024, 1), (10, 1024, 1), more=more) for more in ((), two))
    assert shared.measures["load/rho_gpu"] == pytest.approx(alone.measures["load/rho_gpu"] / 2)
    assert [record.engine for record in shared.records] == [0, 1]
    assert np.isclose(shared.measures["gpu/busy_s"], alone.measures["gpu/busy_s"])


@pytest.mark.parametrize("stop", ["best_effort", "timeout"])
def test_the_pages_read_are_the_bytes_read_and_their_fates_add_up(stop: str) -> None:
    more = ("model=llama3_8b", f"prefetch.stop={stop}", "storage.read_gbps=2", "cache.host_gib=8")
    result = experiment.run(
        config_of("workload.limit=60", "workload.start=warm_storage", "workload=builtin", *more)
    )
    summary = summarize(result.records, result.measures)
    page_bytes = config_of(*more).model.page_bytes(LayerKind.full, 64)
    read = summary["prefetch/read_pages"]
    assert read * page_bytes == summary["transfer/storage_read_bytes"] > 0
    assert summary["prefetch/useful_share"] == pytest.approx(summary["prefetch/used_pages"] / read)
    assert 0 < summary["prefetch/used_pages"] < read

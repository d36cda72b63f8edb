"""Measures of whole runs, of workloads whose numbers can be worked out by hand."""

from dataclasses import replace

import pytest

from hicache import experiment
from hicache.clock import SECOND_NS
from hicache.experiment import workload_of
from hicache.models import LayerKind
from hicache.models.cost import CostModel
from hicache.results.measures import _utilisation
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of
from hicache.workload.workload import load_workload, repeat_sessions, sample_sessions
from tests.scheduler.world import request_of
from tests.validity import runs

PLAIN = ("model=llama3_8b", "parallel.tp=4", "storage=none", "cache.device_gib=8")
OPEN = (*PLAIN, "cache.host_gib=2", "workload.arrivals=open")


def run(*requests, more=()):
    """Run requests that share nothing, each (arrival in s, prompt tokens, answer tokens)."""
    arrivals, prompts, answers = zip(*requests, strict=True)
    made = runs.strangers([int(each * SECOND_NS) for each in arrivals], prompts, answers)
    return runs.run(made, *OPEN, *more)


APART = ((0, 1024, 1), (10, 1024, 1))
LONG = ((0, 2048, 1), (5, 2048, 1))


def measures_of(requests, *more):
    return run(*requests, more=more).measures


def test_the_devices_are_busy_while_a_lone_request_is_served():
    result = run((0, 1024, 5))
    (record,) = result.records
    measures = result.measures
    assert measures["gpu/busy_s"] == pytest.approx(4 * record.finish_ns / SECOND_NS)
    assert measures["gpu/prefill_s"] == pytest.approx(4 * record.prefill_ns / SECOND_NS)
    assert measures["engine/span_s"] == pytest.approx(record.finish_ns / SECOND_NS)
    assert measures["engine/steps_count"] == 5


def test_the_load_of_the_gpu_is_the_offered_work_over_the_span_of_arrivals():
    config = config_of(*OPEN)
    cost = CostModel(config.model, config.hardware, tp=4)
    alone_s = cost.offered_s(0, 1024, 1, 1)  # of one token: in any batch
    apart = measures_of(APART)
    assert apart["load/rho_gpu"] == pytest.approx(2 * alone_s / 10)
    assert apart["load/rho_queue"] == 0
    together = measures_of([(0, 1024, 1), (0.5, 1024, 1)])  # a second at least
    assert together["load/rho_gpu"] == pytest.approx(2 * alone_s)


def test_a_link_that_reads_and_writes_share_has_one_load():
    # of 6 GB/s to read and 4 to write
    measures = measures_of(APART, "storage=memory", "storage.shared_gbps=2")
    assert measures["transfer/storage_read_bytes"] == 0
    busy = measures["transfer/storage_write_bytes"] / 10 / 2e9
    assert busy > 0
    for side in ("read", "write"):
        assert measures[f"load/rho_{side}"] == pytest.approx(busy)


def test_reads_and_writes_load_storage_by_their_bytes():
    stored = ("storage=memory", "storage.read_gbps=2", "storage.write_gbps=4")
    warm = ("workload.start=warm_storage", "prefetch.stop=wait_complete")
    for side, gbps, more in (("read", 2, warm), ("write", 4, ())):
        measures = measures_of(LONG, *stored, *more)
        num_bytes = measures[f"transfer/storage_{side}_bytes"]
        assert num_bytes > 0
        assert measures[f"load/rho_{side}"] == pytest.approx(num_bytes / 5 / gbps / 1e9)


def test_workers_are_busy_while_they_wait_for_storage():
    requests = [(2.5 * number, 1024, 1) for number in range(5)]  # 10 s, from the first to the last
    queries = ("storage=memory", "storage.write=selective", "storage.query_s=2")
    measures = measures_of(requests, *queries)
    assert measures["storage/query_count"] > 0
    assert measures["load/rho_workers"] == pytest.approx(2 * measures["storage/query_count"] / 10)
    assert max(measures["load/rho_read"], measures["load/rho_write"]) < 0.1
    settings = ("storage=memory", "storage.operation_s=1", "storage.write_workers=2")
    few, more = (measures_of(requests, *settings[:n])["load/rho_workers"] for n in (2, 3))
    assert few > 0
    assert more == pytest.approx(few / 2, rel=1e-6)


def test_the_working_set_counts_each_distinct_token_of_a_namespace_once():
    requests = []
    for number, (answer, namespace) in enumerate(((9000, ""), (0, ""), (9000, "tenant"))):
        first = 5000 + 100 * (number % 2)  # 50 of these 150 tokens are in both prompts
        prompt = [*range(10, 1010), *range(first, first + 150)]
        at_ns = number * SECOND_NS
        requests.append(request_of(number, prompt, [answer], at_ns, namespace=namespace))
    measures = runs.run(runs.workload(requests), *OPEN).measures
    distinct = (1000 + 250 + 2) + (1000 + 150 + 1)
    assert measures["workload/distinct_tokens"] == distinct
    config = config_of(*OPEN)
    page_size = config.cache.page_size
    host_tokens = 2 * 2**30 // config.model.page_bytes(LayerKind.full, page_size) * page_size
    host_share = pytest.approx(host_tokens / distinct, rel=0.01)
    assert measures["load/host_over_working_set"] == host_share


@pytest.mark.parametrize(
    ("overrides", "device", "host"),
    [
        (
            ("model=llama3_8b", "cache.device_gib=8", "cache.host_gib=0.999"),
            "4 device(s), device: 8.0 GiB = 65,536 full tokens",
            "4 device(s), host: 1023.0 MiB = 8,128 full tokens",
        ),
        (
            ("model=tiny_hybrid", "cache.device_gib=1", "cache.host_gib=0.5"),
            "1 device(s), device: 1.0 GiB = 1,048,576 full tokens + 524,288 swa tokens + 10,485 st",
            "1 device(s), host: 512.0 MiB = 629,120 full tokens + 209,664 swa tokens + 4,194 st",
        ),
        (("model=tiny_hybrid", "cache.unlimited=true"), "1 device(s): pools of unlimited size", ""),
    ],
)
def test_a_run_notes_the_sizes_of_its_pools(overrides, device, host):
    notes = runs.run(runs.strangers([0], [64], [1]), *overrides).notes
    told = [each.partition(" on ")[2] for each in notes if " device(s)" in each]
    assert told[0].startswith(device)
    assert "".join(told[1:]).startswith(host)


def offered(workload):
    """The load that a workload offers: its work in s per s, over two machines of 4 devices."""
    config = config_of(*PLAIN, "cache.host_gib=2")
    cost = CostModel(config.model, config.hardware, tp=4)
    arrivals = [each.arrival_ns for each in workload.requests]
    span_s = max((max(arrivals) - min(arrivals)) / SECOND_NS, 1.0)
    work = (cost.offered_s(0, each.prompt_len, each.output_len, 32) for each in workload.requests)
    return sum(work) / span_s / 2


@pytest.mark.parametrize("share", [0.25, 1.0, 2.5])
def test_a_target_load_samples_or_repeats_sessions(share):
    config = config_of("workload=builtin", "model=llama3_8b", "parallel.replicas=2")
    whole = load_workload(config.workload, data_dir=None, seed=config.seed)
    target = share * offered(whole)
    notes = []
    found = workload_of(
        replace(config, workload=replace(config.workload, load=target)),
        CostModel(config.model, config.hardware, tp=4),
        notes,
    )
    wanted = (sample_sessions if share <= 1 else repeat_sessions)(whole, share, config.seed)
    ids = [[(each.id, each.arrival_ns) for each in one.requests] for one in (found, wanted)]
    assert ids[0] == ids[1]
    assert notes[:2] == [
        found.description,
        f"workload.load: target {target:g}, reached {offered(wanted):.3g} (GPU utilization without "
        f"cache hits) with {share:.3g} times the sessions",
    ]


@pytest.mark.parametrize("stop", ["best_effort", "timeout"])
def test_pages_read_match_the_bytes_read(stop):
    more = ("model=llama3_8b", "storage.read_gbps=2", "cache.host_gib=8")
    warm = ("workload.limit=60", "workload=builtin", "workload.start=warm_storage")
    result = experiment.run(config_of(*more, *warm, f"prefetch.stop={stop}"))
    summary = summarize(result.records, result.measures)  # which adds up the fates of pages
    read, used = (summary[f"prefetch/{fate}_pages"] for fate in ("read", "used"))
    page_bytes = config_of(*more).model.page_bytes(LayerKind.full, 64)
    assert read * page_bytes == summary["transfer/storage_read_bytes"] > 0
    assert summary["prefetch/useful_share"] == pytest.approx(used / read)
    assert 0 < used < read


def test_the_load_of_the_gpu_does_not_depend_on_the_order_of_requests():
    # its sum is exact, and so the same in each version of Python
    config = config_of(*OPEN)
    cost = CostModel(config.model, config.hardware, tp=4)
    lengths = [(0, 100 + 37 * each, 1 + each) for each in range(60)]
    loads = {
        _utilisation(cost, sorted(lengths, key=lambda each: each[1] * step % 61), 7.0, 1)
        for step in range(1, 60)
    }
    assert len(loads) == 1

"""Tiering and write policies: when the cache writes pages to storage and deletes them."""

from functools import cache

import pytest

from hicache import experiment
from hicache.cache.tiers.transfer import StorageDelete, StorageWrite
from hicache.executor.simulated.executor import SimulatedExecutor
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload
from tests.scheduler.world import request_of

POLICIES = {
    "inclusive": (),
    "selective": ("storage.write=selective",),
    "late": ("storage.write=on_host_eviction",),
    "exclusive": ("storage.write=on_host_eviction", "storage.tiering=exclusive"),
}
MODELS = {
    "llama3_8b": ("cache.device_gib=8", "cache.host_gib=10"),
    "gemma3_27b": ("cache.device_gib=20", "cache.host_gib=22"),
    "qwen3_next_80b": ("cache.device_gib=8", "cache.host_gib=9"),
    "tiny_hybrid": ("cache.device_gib=0.12", "cache.host_gib=0.08"),
}
SMALL = (
    "workload=chat",
    "workload.num_sessions=16",
    "workload.session_rate=2",
    "cache.page_size=512",
    "prefetch.threshold=512",
    "engine.check_invariants=true",
)


class Watched:
    """A run, and all writes and deletes that its cache submits, in order."""

    def __init__(self, policy, model, *overrides):
        self.writes, self.deletes = [], []
        self.last = {}  # by key: the type of its last request
        submit = SimulatedExecutor.submit

        def watch(executor, work, now_ns):
            if isinstance(work, StorageWrite | StorageDelete):
                (self.writes if isinstance(work, StorageWrite) else self.deletes).append(work)
                self.last |= dict.fromkeys(work.keys, type(work))
                self.store = executor._io.storages[0]
            submit(executor, work, now_ns)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimulatedExecutor, "submit", watch)
            settings = (f"model={model}", *MODELS[model], *POLICIES[policy], *overrides)
            result = experiment.run(config_of(*SMALL, *settings))
        self.measures = result.measures
        self.fates = [(record.id, record.status.name) for record in result.records]
        self.written = {key for work in self.writes for key in work.keys}


@cache
def watched(policy, model="llama3_8b", *overrides):
    return Watched(policy, model, *overrides)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_all_requests_through_storage(policy, model):
    run = watched(policy, model)
    assert run.fates == watched("inclusive", model).fates
    assert [status for _, status in run.fates].count("finished") >= 19  # of 20
    assert run.measures["evict/host_full_pages"] > 0
    assert run.measures["transfer/storage_write_bytes"] > 0
    # nothing that comes back within so short a run was hit before it left the host
    assert (run.measures["transfer/storage_read_bytes"] > 0) == (policy != "selective")


def test_late_writes_are_those_of_pages_that_leave_the_host():
    run = watched("late")
    assert run.writes
    assert all(work.is_given_away for work in run.writes)
    assert len(run.written) <= run.measures["evict/host_full_pages"]
    assert not run.deletes
    assert all(run.store.contains(sorted(run.written)))


@pytest.mark.parametrize(
    ("override", "dropped"),
    [
        ("cache.host_gib=512", False),  # a host with room evicts nothing
        ("storage.write_queue_gib=0", True),
        ("storage.kind=none", False),
    ],
)
def test_no_late_write_is_made_without_an_eviction_a_buffer_or_a_storage(override, dropped):
    measures = watched("late", "llama3_8b", override).measures
    assert measures.get("transfer/storage_write_bytes", 0) == 0
    assert (measures["storage/dropped_write_pages"] > 0) == dropped


@pytest.mark.parametrize("words", [*((model,) for model in MODELS), ("llama3_8b", "parallel.pp=2")])
def test_pages_that_the_host_reads_leave_an_exclusive_store_until_they_are_written_again(words):
    run = watched("exclusive", *words)
    dropped = [key for work in run.deletes for key in work.keys]
    assert run.measures["storage/dropped_read_pages"] == len(dropped) > 0
    assert StorageDelete in run.last.values()
    for key, last in run.last.items():
        assert run.store.contains([key])[0] == (last is StorageWrite)


def test_selective_writes_are_made_once_and_are_fewer_for_more_hits():
    always, once = (watched(policy).written for policy in ("inclusive", "selective"))
    thrice = watched("selective", "llama3_8b", "storage.write_hits=3").written
    assert 0 < len(thrice) < len(once) < len(always)
    assert sum(len(work.keys) for work in watched("selective").writes) == len(once)


def test_an_exclusive_store_serves_real_memory_and_loses_the_pages_that_the_host_read(tmp_path):
    # each prompt twice, one request at a time; device and host together hold a part of them
    num_prompts, length, page = 12, 65, 16
    requests = [
        request_of(
            number,
            range(1000 * (number % num_prompts), 1000 * (number % num_prompts) + length),
            [500 + number],
            session_id=0,
            parent_id=number - 1 if number else None,
        )
        for number in range(2 * num_prompts)
    ]
    num_files = {}
    for policy in ("late", "exclusive"):
        root = tmp_path / policy
        config = config_of(
            *("executor=torch", "executor.device=cpu", "executor.verify=true", "model=tiny_hybrid"),
            *("cache.device_gib=0.0012", "cache.host_gib=0.0016", "cache.host.share.mamba=0.6"),
            *(f"cache.page_size={page}", f"prefetch.threshold={page}", "workload.arrivals=closed"),
            *("prefetch.stop=wait_complete", "storage=file", f"storage.root={root}"),
            *("engine.check_invariants=true", *POLICIES[policy]),
        )
        result = experiment.run(config, workload=Workload(name="own", requests=requests))
        again = [record.storage_hit_len for record in result.records[num_prompts:]]
        assert again == [length // page * page] * num_prompts
        assert result.measures["verify/checked_count"] == len(requests)
        assert result.measures["verify/wrong_count"] == 0
        num_files[policy] = sum(path.is_file() for path in root.rglob("*"))
    # of each prompt four pages and a state, beside the files of the store itself
    assert num_files["late"] > num_prompts * 5 > num_files["exclusive"]

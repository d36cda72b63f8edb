"""Tiering and write policies of storage: what is there, and when it comes and goes."""

from dataclasses import replace
from functools import cache

import pytest

from hicache import experiment
from hicache.cache.tiers.transfer import StorageDelete, StorageWrite
from hicache.cache.tree.keys import Key
from hicache.config import ExperimentConfig, StorageConfig, Tiering
from hicache.engine import simulated_runtime
from hicache.executor.simulated.stores import EndlessStore
from hicache.results.metrics import Result
from hicache.runs.schema import config_of

POLICIES = {
    "inclusive": {},
    "selective": {"write": "selective"},
    "late": {"write": "on_host_eviction"},
    "exclusive": {"write": "on_host_eviction", "tiering": Tiering.exclusive},
}
MODELS = {
    "llama3_8b": ("cache.device_gib=8", "cache.host_gib=10"),
    "gemma3_27b": ("cache.device_gib=20", "cache.host_gib=22"),
    "qwen3_next_80b": ("cache.device_gib=8", "cache.host_gib=9"),
    "tiny_hybrid": ("cache.device_gib=0.12", "cache.host_gib=0.08"),
}


def base_config(model: str) -> ExperimentConfig:
    overrides = (
        "workload=chat", "workload.num_sessions=16", "workload.session_rate=2",
        "cache.page_size=512", "prefetch.threshold=512", "engine.check_invariants=true",
        "tracker.wandb_mode=disabled", f"model={model}", *MODELS[model],
    )  # fmt: skip
    return config_of(*overrides)


def fates(result: Result) -> list[tuple[int, str]]:
    return [(record.id, record.status.name) for record in result.records]


def run(policy: str, model: str = "llama3_8b", **storage: object) -> Result:
    config = base_config(model)
    knobs = POLICIES[policy] | storage
    return experiment.run(replace(config, storage=replace(config.storage, **knobs)))  # type: ignore[arg-type]


@cache
def usual_run(policy: str, model: str) -> Result:
    return run(policy, model)


class Watched:
    """A run, and all that its cache asked of storage, in order."""

    def __init__(
        self,
        policy: str,
        monkeypatch: pytest.MonkeyPatch,
        model: str = "llama3_8b",
        **storage: object,
    ) -> None:
        self.writes: list[StorageWrite] = []
        self.deletes: list[StorageDelete] = []
        self.last: dict[Key, type] = {}  # what was last asked of a key
        self.stores: list[EndlessStore] = []
        submit = simulated_runtime.SimulatedExecutor.submit

        def watch(executor: object, work: object, now_ns: int) -> None:
            if isinstance(work, StorageWrite):
                self.writes.append(work)
            if isinstance(work, StorageDelete):
                self.deletes.append(work)
            if isinstance(work, StorageWrite | StorageDelete):
                self.last |= dict.fromkeys(work.keys, type(work))
            submit(executor, work, now_ns)  # type: ignore[arg-type]

        def open_watched() -> EndlessStore:
            self.stores.append(EndlessStore())
            return self.stores[-1]

        monkeypatch.setattr(simulated_runtime.SimulatedExecutor, "submit", watch)
        monkeypatch.setattr(simulated_runtime, "EndlessStore", open_watched)
        self.result = run(policy, model, **storage)

    @property
    def written(self) -> set[Key]:
        return {key for work in self.writes for key in work.keys}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_everyone_and_keeps_the_laws(policy: str, model: str) -> None:
    result = usual_run(policy, model)
    assert fates(result) == fates(usual_run("inclusive", model))
    assert [status for _, status in fates(result)].count("finished") >= 19  # of 20


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_fills_storage_and_all_but_the_choosy_one_read_it(
    policy: str, model: str
) -> None:
    measures = usual_run(policy, model).measures
    assert measures["evict/host_full_pages"] > 0
    assert measures["transfer/storage_write_bytes"] > 0
    # nothing that comes back within so short a run was hit before it left the host
    assert (measures["transfer/storage_read_bytes"] > 0) == (policy != "selective")


def test_late_writes_are_those_of_pages_that_left_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("late", monkeypatch)
    evicted = watched.result.measures["evict/host_full_pages"]
    assert watched.writes
    assert all(work.is_given_away for work in watched.writes)
    assert len(watched.written) <= evicted


def test_nothing_is_written_while_the_host_has_room() -> None:
    base = base_config("llama3_8b")
    roomy = replace(base, cache=replace(base.cache, host_gib=512))
    storage = replace(base.storage, write="on_host_eviction")
    measures = experiment.run(replace(roomy, storage=storage)).measures
    assert measures.get("transfer/storage_write_bytes", 0) == 0


@pytest.mark.parametrize("model", MODELS)
def test_what_the_host_has_read_leaves_an_exclusive_store_until_it_is_written_again(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    watched = Watched("exclusive", monkeypatch, model)
    dropped = [key for work in watched.deletes for key in work.keys]
    assert watched.result.measures["storage/dropped_read_pages"] == len(dropped) > 0
    assert StorageDelete in watched.last.values()
    for key, last in watched.last.items():
        assert watched.stores[0].contains([key])[0] == (last is StorageWrite)


def test_an_inclusive_store_loses_nothing_by_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("late", monkeypatch)
    assert not watched.deletes
    assert all(watched.stores[0].contains(sorted(watched.written)))


def test_a_page_is_given_to_an_inclusive_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("selective", monkeypatch)
    assert watched.writes
    assert sum(len(work.keys) for work in watched.writes) == len(watched.written)


def test_more_hits_wanted_are_fewer_pages_written(monkeypatch: pytest.MonkeyPatch) -> None:
    always = Watched("inclusive", monkeypatch).written
    monkeypatch.undo()
    once = Watched("selective", monkeypatch).written
    monkeypatch.undo()
    thrice = Watched("selective", monkeypatch, write_hits=3).written
    assert 0 < len(thrice) < len(once) < len(always)


def test_late_writes_beyond_the_buffer_are_dropped_and_counted() -> None:
    measures = run("late", write_queue_gib=0).measures
    assert measures["storage/dropped_write_pages"] > 0
    assert measures.get("transfer/storage_write_bytes", 0) == 0


def test_exclusive_with_early_writes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exclusive needs storage\.write=on_host_eviction"):
        StorageConfig(tiering=Tiering.exclusive)


def test_a_cache_without_storage_writes_nothing() -> None:
    config = base_config("llama3_8b")
    storage = replace(config.storage, kind="none", write="on_host_eviction")
    result = experiment.run(replace(config, storage=storage))
    assert result.measures["storage/dropped_write_pages"] == 0

"""Which events a user's own policy gets, what it decides, and which mistakes end the run."""

from functools import cache

import pytest

from hicache.cache.checked import PolicyError
from hicache.cache.kinds import FULL, MAMBA
from hicache.engine.build import world_of
from hicache.engine.deployment import deploy
from hicache.experiment import run
from hicache.results.metrics import Result, Status, summarize
from hicache.runs.schema import config_of
from tests.fuzz.policies import LEDGERS

SMALL = {
    "llama3_8b": ("cache.device_gib=6", "cache.host_gib=8", "workload.limit=30"),
    "gemma3_27b": ("cache.device_gib=8", "cache.host_gib=12", "workload.limit=30"),
    "qwen3_next_80b": ("cache.device_gib=4", "cache.host_gib=6", "workload.limit=30"),
}
LEDGER = ("cache.policy=tests.fuzz.policies:Ledger", "cache.policy_args.victims=1")


def run_of(model: str, *more: str) -> Result:
    checks = "engine.check_invariants=true"
    return run(config_of("workload=agents", f"model={model}", *SMALL[model], checks, *more))


def summary_of(result: Result) -> object:
    return summarize(result.records, result.measures)


@cache
def summary(*settings: str) -> object:
    """The summary of a run of the hybrid model."""
    return summary_of(run_of("qwen3_next_80b", "parallel.tp=8", *settings))


def test_the_world_of_a_policy_has_the_sizes_of_the_tiers_and_the_number_of_engines():
    config = config_of("model=qwen3_next_80b", *SMALL["qwen3_next_80b"], "parallel.replicas=3")
    deployment = deploy(config)
    world = world_of(config, deployment, lambda: 0)
    assert world.rates.num_engines == 3
    for tier, room in (("device", deployment.device), ("host", deployment.host)):
        full, mamba = (room.counts[kind] for kind in (FULL, MAMBA))
        assert world.capacity[tier] == {"full": full, "mamba": mamba}
    full, mamba = (world.unit_bytes["device"][kind] for kind in ("full", "mamba"))
    assert full == deployment.kinds.page_bytes[FULL] < mamba


@pytest.mark.parametrize(
    ("model", "write"),
    [
        ("llama3_8b", "write_back"),
        ("gemma3_27b", "write_through"),
        ("qwen3_next_80b", "write_back"),
    ],
)
def test_events_report_all_cached_pages_and_a_policy_of_last_uses_gives_the_results_of_lru(
    model, write
):
    more = (f"cache.write_policy={write}", "storage=memory", "parallel.tp=8")
    logged = run_of(model, *more, *LEDGER)
    assert summary_of(logged) == summary_of(run_of(model, *more))
    ledger = LEDGERS[-1]
    num_finished = sum(each.status is Status.finished for each in logged.records)
    assert ledger.ended["finished"] == num_finished
    assert sum(ledger.hits.values()) > 0
    assert any(not tiers for tiers in ledger.held.values())  # evicted from all tiers


class StatesLast:
    """Ranks states by hits, and leaves everything else to LRU."""

    def __init__(self, world, sign: float = 1.0) -> None:
        self.sign = sign

    def rank(self, entry, tier, kind):
        return (self.sign * entry.hits, entry.used, entry.end) if kind == "mamba" else None


@pytest.mark.parametrize(
    ("policy", "argument"), [(f"{__name__}:StatesLast", "sign"), ("marconi", "alpha")]
)
def test_a_policy_of_states_is_lru_if_its_weight_is_0(policy, argument):
    own = f"cache.policy={policy}"
    assert summary(own, f"cache.policy_args.{argument}=0") == summary() != summary(own)


class Stubborn:
    """Chooses the entry that it saw first, evictable or not."""

    first = None

    def on_insert(self, entry, tier):
        self.first = self.first or entry

    def victim(self, tier, kind, need, queue):
        return self.first


class Typo:
    def on_inserted(self, entry):
        pass


class Empty:
    pass


class Writes:
    def rank(self, entry, tier, kind):
        entry.bytes = 3


class Fails:
    def on_finish(self, request, outcome):
        raise KeyError(request.id)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Stubborn", r"victim\(device, full\) must return an entry of the queue or None"),
        ("Typo", "has an unknown event on_inserted: the methods are on_insert, "),
        ("Empty", "has no method of a policy: the methods are on_insert, "),
        ("Writes", r"rank\(<Entry 0: .*can't set|has no setter"),
        ("Fails", r"on_finish\(.*raised KeyError: "),
    ],
)
def test_a_class_that_is_no_valid_policy_ends_the_run(name, message):
    with pytest.raises(PolicyError, match=message):
        run_of("llama3_8b", f"cache.policy={__name__}:{name}", "parallel.tp=4")

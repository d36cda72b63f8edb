"""What a policy of the user's own is told, asked, and allowed."""

import pytest

from hicache.cache.checked import PolicyError
from hicache.cache.tree.entry import Entry, Evictable
from hicache.experiment import run
from hicache.policies.world import World
from hicache.results.metrics import Result, Status, summarize
from hicache.runs.schema import config_of
from tests.fuzz.policies import LEDGERS

SMALL = {
    "llama3_8b": ("cache.device_gib=6", "cache.host_gib=8", "workload.limit=30"),
    "gemma3_27b": ("cache.device_gib=8", "cache.host_gib=12", "workload.limit=30"),
    "qwen3_next_80b": ("cache.device_gib=4", "cache.host_gib=6", "workload.limit=30"),
}
LEDGER = "cache.policy=tests.fuzz.policies:Ledger"


def run_of(model: str, *more: str) -> Result:
    checks = "engine.check_invariants=true"
    return run(config_of("workload=agents", f"model={model}", *SMALL[model], checks, *more))


def summary_of(result: Result) -> object:
    return summarize(result.records, result.measures)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("model", SMALL)
def test_insertions_less_evictions_are_what_is_held_and_change_nothing(
    model: str, write: str
) -> None:
    more = (f"cache.write_policy={write}", "storage=memory", "parallel.tp=8")
    logged = run_of(model, *more, LEDGER)
    assert summary_of(logged) == summary_of(run_of(model, *more))
    ledger = LEDGERS[-1]
    assert ledger.ended["finished"] == sum(
        each.status is Status.finished for each in logged.records
    )
    assert sum(ledger.hits.values()) > 0
    assert any(not tiers for tiers in ledger.held.values())  # what was evicted for good


@pytest.mark.parametrize("model", SMALL)
def test_victims_by_last_use_are_those_of_lru(model: str) -> None:
    own = run_of(model, LEDGER, "cache.policy_args.victims=1", "parallel.tp=8")
    assert summary_of(own) == summary_of(run_of(model, "parallel.tp=8"))


class StatesLast:
    """Ranks states by hits, and leaves everything else as it is."""

    def __init__(self, world, sign: float = 1.0) -> None:
        self.sign = sign

    def rank(self, entry, tier, kind):
        return (self.sign * entry.hits, entry.used, entry.end) if kind == "mamba" else None


def test_states_have_an_order_of_their_own() -> None:
    name = f"cache.policy={__name__}:StatesLast"
    results = [
        run_of("qwen3_next_80b", "parallel.tp=8", *more)
        for more in ((), (name, "cache.policy_args.sign=0"), (name,))
    ]
    lru, same, other = map(summary_of, results)
    assert lru == same
    assert other != lru


class Stubborn:
    """Chooses what it saw first, evictable or not."""

    def __init__(self, world: World) -> None:
        self.first: Entry | None = None

    def on_insert(self, entry: Entry, tier: str) -> None:
        self.first = self.first or entry

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
        return self.first


class Typo:
    def on_inserted(self, entry: Entry) -> None:
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
    ("name", "sentence"),
    [
        (
            "Stubborn",
            r"victim\(device, full\) must return an entry of the queue or None",
        ),
        ("Typo", "has an unknown event on_inserted: the methods are on_insert, "),
        ("Empty", "has no method of a policy: the methods are on_insert, "),
        ("Writes", r"rank\(<Entry 0: .*can't set|has no setter"),
        ("Fails", r"on_finish\(.*raised KeyError: "),
    ],
)
def test_a_class_that_breaks_its_word_ends_the_run(name: str, sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        run_of("llama3_8b", f"cache.policy={__name__}:{name}", "parallel.tp=4")

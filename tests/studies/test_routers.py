"""Routers of the study that learn the contents of engines' caches from KV events."""

from types import SimpleNamespace

import pytest

from experiments.studies.routers import Reads
from hicache.clock import SimulatedClock
from hicache.experiment import run
from hicache.runs.schema import config_of

SMALL = (
    *("workload=chat", "workload.num_sessions=30", "model=llama3_8b", "storage=none"),
    *("parallel.tp=1", "parallel.replicas=3", "parallel.router=scored"),
    *("cache.device_gib=1", "cache.host_gib=3"),
)
POLICY = "cache.policy=experiments.studies.routers:Events"


def computed(*overrides: str) -> list[int]:
    records = run(config_of(*SMALL, *overrides)).records
    return [record.computed_len for record in records]


@pytest.mark.parametrize(
    ("events", "weights"),
    [("weight: 0.8", "device: 0.6, cache: 2.4"), ("tiers: 0", "device: 3, cache: 0")],
)
def test_routing_by_undelayed_events_equals_routing_by_the_caches_contents(events, weights):
    told = computed(POLICY, f"cache.policy_args={{{events}}}")
    assert told == computed(f"parallel.router_args={{{weights}}}")


def test_lost_kv_events_change_where_requests_are_routed():
    assert computed(POLICY, "cache.policy_args={lost: 0.9}") != computed(POLICY)


def test_an_engine_reads_what_its_own_host_has_had():
    world = SimpleNamespace(now_ns=SimulatedClock().now, page_size=16)
    first, second = Reads(world), Reads(world)
    entries = [SimpleNamespace(kind="full", keys=keys) for keys in ((1, 2), (3,))]
    first.on_insert(entries[0], "host")
    second.on_insert(entries[1], "host")
    request = SimpleNamespace(id=7, prompt_len=70)
    replica = SimpleNamespace(keys=lambda _: (1, 2, 3, 4), held_tokens=lambda *_, **__: 0)
    first.held_score(request, [replica, replica])
    read = [each.prefetch(request, 0, [], None) for each in (first, second)]
    assert read == [32, 0]
    assert second.prefetch(request, 32, [], None) == 16

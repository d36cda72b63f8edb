"""Routers of the study that learn the contents of engines' caches from KV events."""

import pytest

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

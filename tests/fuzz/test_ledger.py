"""A policy is notified of every insertion and eviction, in every scenario."""

from dataclasses import replace
from unittest import mock

import pytest

from hicache import experiment
from hicache.cache.tree.radix_tree import RadixTree
from tests.fuzz import policies
from tests.fuzz.scenario import draw, plan_of


def count_entries(number: int) -> int:
    """Run a scenario under `Ledger`, which checks each event; return the number of its entries.

    At the end, what the trees hold must be what the ledgers counted: insertions less evictions.
    """
    plan = plan_of(draw(0, number), None)
    logged = replace(plan.config.cache, policy="tests.fuzz.policies:Ledger")
    num_entries = 0

    def compare(tree: RadixTree) -> None:
        nonlocal num_entries
        ledger = policies.LEDGERS.popleft()  # as many as trees, in the same order
        nodes = list(tree.nodes())
        entries = [each for node in nodes for each in node.entries.values()]
        held = {entry: set(entry.tiers) for entry in entries if entry.tiers}
        assert held == {entry: tiers for entry, tiers in ledger.held.items() if tiers}
        data = [each for node in nodes for tier in node.held for each in tier if each is not None]
        assert len(data) == sum(map(len, held.values()))
        num_entries += len(ledger.held)

    policies.LEDGERS.clear()
    with mock.patch.object(RadixTree, "take_apart", compare):
        experiment.run(replace(plan.config, cache=logged), workload=plan.workload)
    assert not policies.LEDGERS
    return num_entries


@pytest.mark.parametrize("number", range(4))
def test_policy_is_notified_of_all_insertions_and_evictions(number: int) -> None:
    assert count_entries(number) > 0


@pytest.mark.soak
def test_policy_is_notified_of_all_insertions_and_evictions_in_many_scenarios() -> None:
    assert all(count_entries(number) >= 0 for number in range(2000))

"""A policy that only listens hears of everything that the tiers hold, in every scenario."""

from collections import deque
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
    ledgers: deque[policies.Ledger] = deque()
    num_entries = 0

    def compare(tree: RadixTree) -> None:
        nonlocal num_entries
        ledger = ledgers.popleft()  # as many as trees, in the same order
        nodes = list(tree.nodes())
        entries = [each for node in nodes for each in node.entries.values()]
        held = {entry: set(entry.tiers) for entry in entries if entry.tiers}
        assert held == {entry: tiers for entry, tiers in ledger.held.items() if tiers}
        data = [each for node in nodes for tier in node.held for each in tier if each is not None]
        assert len(data) == sum(map(len, held.values()))
        num_entries += len(ledger.held)

    with (
        mock.patch.object(RadixTree, "take_apart", compare),
        mock.patch.object(policies, "LEDGERS", ledgers),
    ):
        experiment.run(replace(plan.config, cache=logged), workload=plan.workload)
    assert not ledgers
    return num_entries


@pytest.mark.parametrize("number", range(4))
def test_insertions_less_evictions_are_what_is_held(number: int) -> None:
    assert count_entries(number) > 0


@pytest.mark.soak
def test_in_each_of_many_scenarios_insertions_less_evictions_are_what_is_held() -> None:
    assert all(count_entries(number) >= 0 for number in range(2000))

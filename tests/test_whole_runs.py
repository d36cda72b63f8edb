"""What the change reports claim, in whole runs; single decisions are tested where they are made."""

from collections.abc import Mapping
from typing import Any

import pytest

from hicache import experiment
from hicache.cache.kinds import SWA
from hicache.cache.pages import free
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.sequence import Sequence
from hicache.cli.tables.groups import StoredRun, differing_keys
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of
from tests.cache.small import complete_all, make_cache, run_request, tokens_of

SMALL = (
    "workload=agents",
    "workload.num_sessions=8",
    "workload.limit=40",
    "model=qwen3_next_80b",
    "cache.device_gib=16",
    "cache.host_gib=8",
    "engine.check_invariants=true",
    "tracker.wandb_mode=disabled",
)


def replay(*overrides: str) -> Mapping[str, Any]:
    """The summary of a small run in simulated time."""
    result = experiment.run(config_of(*SMALL, *overrides))
    return summarize(result.records, result.measures)


RANKED = (
    "storage.delay_s=0.01",
    "storage.faults.missing_rate=0.005",
    "workload.start=warm_storage",
)


@pytest.fixture(scope="module")
def three_ranks() -> Mapping[str, Any]:
    return replay("parallel.ranks=3", "workload.num_sessions=30", *RANKED)


def test_ranks_in_lockstep_answer_everything_and_keep_equal_trees(
    three_ranks: Mapping[str, Any],
) -> None:
    # trees are compared in every step, and whole at the end; the laws are checked on every rank
    assert three_ranks["request/finished_count"] == three_ranks["request/count"]
    assert three_ranks["agreement/query_collectives_count"] > 0


def test_every_step_has_its_collective(three_ranks: Mapping[str, Any]) -> None:
    collectives = three_ranks["agreement/step_collectives_count"]
    assert collectives >= three_ranks["engine/steps_count"]


def test_ranks_that_cannot_read_different_pages_publish_what_all_have_read(
    three_ranks: Mapping[str, Any],
) -> None:
    assert three_ranks["agreement/unequal_reads_count"] > 0
    assert three_ranks["agreement/illegal_lengths_count"] == 0


def test_ranks_that_share_pages_and_fate_serve_as_one() -> None:
    # no delays, nothing lost, no time for collectives: parts of pages take as long as pages
    plain = replay("workload.limit=12")
    ranked = replay("workload.limit=12", "parallel.ranks=2", "parallel.collective_s=0")
    for name in ("device_hit", "host_hit", "storage_hit", "computed"):
        assert ranked[f"cache/{name}_tokens"] == plain[f"cache/{name}_tokens"]


def test_equal_seeds_give_equal_delays_and_others_do_not() -> None:
    first, again, other = (
        replay("storage.delay_s=0.05", "workload.limit=25", f"seed={seed}") for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_without_the_sidecar_check_complete_pages_are_thrown_away() -> None:
    settings = ("prefetch.stop=timeout", "storage.sidecar_s=0.5", "workload.start=warm_storage")
    off, on = (
        replay(*settings, f"compat.quirks.await_sidecars={word}") for word in ("false", "true")
    )
    assert off["prefetch/terminated_without_sidecars_count"] > 0
    assert on["prefetch/terminated_without_sidecars_count"] == 0
    assert on["cache/storage_hit_tokens"] > off["cache/storage_hit_tokens"]


def test_a_cut_starts_prefetches_that_would_have_been_given_up() -> None:
    settings = ("cache.host_gib=2", "workload.start=warm_storage")
    off, on = (replay(*settings, f"arm={arm}") for arm in ("cut_off", "cut_on"))
    assert on["prefetch/cut_count"] > 0
    assert off["prefetch/cut_count"] == 0
    assert on["prefetch/abandoned_count"] < off["prefetch/abandoned_count"]


def test_a_window_on_the_host_alone_is_loaded_back() -> None:
    cache = make_cache(device=(20, 20, 0), host=(20, 20, 0), window_len=8)
    for length in (16, 32):  # so that the node that ends at 16 is no leaf
        run_request(cache, tokens_of(length), length)
    complete_all(cache)
    freed: list[Any] = []
    for node in list(cache.tree.nodes()):
        cache.tree.residency.drop(node, DEVICE, SWA, freed)
    free(freed, cache.pools)
    sequence = Sequence(tokens_of(17))
    found = cache.match(sequence, 17)
    assert (found.host_hit_length, found.swa_host_hit_length) == (0, 8)
    acquired = cache.acquire(sequence, found)
    assert acquired is not None
    assert acquired.load_back is not None
    assert acquired.load_back.counts == {SWA: 2}


def test_another_model_is_told_apart_by_its_name_alone(tmp_path: Any) -> None:
    runs = [
        StoredRun(
            path=tmp_path,
            config={"model.name": name, "model.num_layers": layers, "cache.host_gib": size},
            summary={},
        )
        for name, layers, size in (("a", 1, 8.0), ("b", 2, 32.0))
    ]
    assert differing_keys(runs) == ["model.name", "cache.host_gib"]

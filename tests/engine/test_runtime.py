"""What a simulated run takes place in: the speed of its links, and a storage for each rank."""

from dataclasses import replace
from pathlib import Path

import pytest

from hicache.config import ExperimentConfig
from hicache.engine.deployment import deploy
from hicache.engine.simulated_runtime import SimulatedRuntime
from hicache.models.copy_rates import CopyPath, pcie_rate
from hicache.runs.schema import config_of
from tests.cache.small import named_kinds

MB = 1_000_000


def runtime_of(config: ExperimentConfig, tp: int = 1, size: int = 5 * MB) -> SimulatedRuntime:
    deployment = deploy(replace(config, parallel=replace(config.parallel, tp=tp)))
    kinds = named_kinds(64, page_bytes=[size])
    sizes = dict.fromkeys(("kinds", "host_kinds", "storage_kinds"), kinds)
    return SimulatedRuntime(config, replace(deployment, **sizes))


def copy_ns(config: ExperimentConfig, tp: int, link: str, num_bytes: int) -> int:
    """How long it takes to move so much over a link alone."""
    io = runtime_of(config, tp).io
    io.links.start(0, num_bytes, (f"{link}0",), 0)
    return io.links.next_finish_ns


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    "path", [CopyPath.kernel, CopyPath.copy_engine], ids=lambda path: path.value
)
@pytest.mark.parametrize("link", ["to_device", "to_host"])
def test_devices_copy_their_parts_of_a_layers_page_side_by_side(
    link: str, path: CopyPath, tp: int
) -> None:
    config = config_of("model=llama3_8b", "cache.page_size=64", f"executor.copy_path={path.value}")
    piece = config.model.full_layer_token_bytes * 64 // tp
    rate = pcie_rate(config.hardware, piece, path, to_device=link == "to_device")
    assert copy_ns(config, tp, link, 10**9) == pytest.approx(1e18 / (tp * rate), rel=1e-6)


@pytest.mark.parametrize(("link", "num_layers"), [("to_device", 8), ("to_host", 32)])
def test_a_staged_copy_crosses_the_link_in_the_layers_that_it_moves_at_once(
    link: str, num_layers: int
) -> None:
    config = config_of(
        "model=llama3_8b", "cache.page_size=1", "parallel.tp=4", "executor.copy_path=staged"
    )
    piece = config.model.full_layer_token_bytes // 4
    across, narrow = (
        pcie_rate(config.hardware, size, CopyPath.copy_engine)
        for size in (piece * num_layers, piece)
    )
    assert across > narrow
    in_device_ns = 2e18 / config.hardware.state_bandwidth.value  # read and written there
    wanted = (1e18 / across + in_device_ns) / 4
    assert copy_ns(config, 4, link, 10**9) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("path", "slowdown"), [("kernel", 1.5), ("staged", 1.0)])
def test_a_staged_copy_slows_no_step_down(path: str, slowdown: float) -> None:
    config = config_of(
        "model=llama3_8b", "hardware.copy_slowdown.value=1.5", f"executor.copy_path={path}"
    )
    assert runtime_of(config, 1)._executor.keywords["slowdown"] == slowdown


@pytest.mark.parametrize(("model", "parts"), [("qwen3_next_80b", 2), ("kimi_linear_48b", 1)])
def test_a_device_copies_a_whole_head_or_all_of_a_latent(model: str, parts: int) -> None:
    config = config_of(f"model={model}", "executor.copy_path=copy_engine")
    piece = config.model.full_layer_token_bytes * config.cache.page_size // parts
    rate = pcie_rate(config.hardware, piece, CopyPath.copy_engine)
    assert copy_ns(config, 8, "to_device", 10**9) == pytest.approx(1e18 / (8 * rate), rel=1e-6)


@pytest.mark.parametrize(("tp", "hosts"), [(1, 1), (8, 1), (16, 2)])
def test_the_memory_of_each_host_is_as_fast_as_the_machine_says(tp: int, hosts: int) -> None:
    config = config_of("model=llama3_8b")
    wanted = 1e18 / (hosts * config.hardware.host_bandwidth.value)
    assert copy_ns(config, tp, "host_memory", 10**9) == pytest.approx(wanted, rel=1e-6)


def test_without_storage_there_is_none() -> None:
    assert not runtime_of(config_of("model=llama3_8b", "storage=none")).has_storage


def stored_pages(config: ExperimentConfig, num_pages: int) -> list[int]:
    """How many pages each rank's storage keeps of so many."""
    runtime = runtime_of(config)
    kept = []
    for each in runtime.stores:
        each.write(range(num_pages))
        kept.append(sum(each.contains(range(num_pages))))
    runtime.close()
    return kept


@pytest.mark.parametrize(("ranks", "kept"), [(1, [4]), (2, [4, 4]), (4, [4, 4, 4, 4])])
def test_every_rank_stores_its_part_of_each_page_in_its_part_of_the_room(
    ranks: int, kept: list[int]
) -> None:
    gib = 20 * MB / 2**30  # of pages of 5 MB
    config = config_of("model=llama3_8b", "storage=memory", f"storage.capacity_gib={gib}")
    ranked = replace(config, parallel=replace(config.parallel, ranks=ranks))
    assert stored_pages(ranked, 9) == kept


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_a_namespace_of_its_own_where_they_share_a_store(
    ranks: int, tmp_path: Path
) -> None:
    config = config_of("model=llama3_8b", "storage=file", f"storage.root={tmp_path}")
    runtime = runtime_of(replace(config, parallel=replace(config.parallel, ranks=ranks)))
    runtime.stores[0].write([4])
    found = [each.contains([4]) for each in runtime.stores]
    runtime.close()
    assert found == [[rank == 0] for rank in range(ranks)]

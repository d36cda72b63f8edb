"""The runtime of a simulated run: rates of its links, storage of each rank, and coded tiers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hicache.config import ExperimentConfig
from hicache.engine.deployment import deploy
from hicache.engine.simulated_runtime import SimulatedRuntime, link_rates, make_runtime
from hicache.experiment import run
from hicache.kernels.transcode import Format, coded_bytes
from hicache.models import FORMATS, LayerKind, coded_page_bytes
from hicache.models.copy_rates import CopyPath, pcie_rate
from hicache.results.metrics import summarize
from hicache.results.remarks import pool_remarks
from hicache.runs.schema import config_of
from tests.cache.small import named_kinds

PAGE_BYTES = 5_000_000


def runtime_of(config: ExperimentConfig, **parallel: int) -> SimulatedRuntime:
    """A runtime whose pages have `PAGE_BYTES` on every tier."""
    deployment = deploy(replace(config, parallel=replace(config.parallel, **parallel)))
    kinds = named_kinds(64, page_bytes=[PAGE_BYTES])
    sizes = dict.fromkeys(("kinds", "host_kinds", "storage_kinds"), kinds)
    config = replace(config, parallel=replace(config.parallel, **parallel))
    return SimulatedRuntime(config, replace(deployment, **sizes))


def copy_ns(config: ExperimentConfig, link: str, tp: int = 1) -> int:
    """The time in ns that a copy of 1 GB takes on a link without other copies."""
    io = runtime_of(config, tp=tp).io
    io.links.start(0, 10**9, (f"{link}0",), 0)
    return io.links.next_finish_ns


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("path", ["kernel", "copy_engine"])
@pytest.mark.parametrize("link", ["to_device", "to_host"])
def test_devices_copy_their_parts_of_a_page_of_each_layer_in_parallel(
    link: str, path: str, tp: int
) -> None:
    config = config_of("model=llama3_8b", "cache.page_size=64", f"executor.copy_path={path}")
    piece = config.model.full_layer_token_bytes * 64 // tp
    rate = pcie_rate(config.hardware, piece, CopyPath(path), to_device=link == "to_device")
    assert copy_ns(config, link, tp) == pytest.approx(1e18 / (tp * rate), rel=1e-6)


@pytest.mark.parametrize(("link", "num_layers"), [("to_device", 8), ("to_host", 32)])
def test_staged_copy_has_the_link_rate_of_all_the_layers_that_it_moves_at_once(
    link: str, num_layers: int
) -> None:
    config = config_of("model=llama3_8b", "cache.page_size=1", "executor.copy_path=staged")
    piece = config.model.full_layer_token_bytes // 4
    across, narrow = (
        pcie_rate(config.hardware, size, CopyPath.copy_engine)
        for size in (piece * num_layers, piece)
    )
    assert across > narrow
    in_device_ns = 2e18 / config.hardware.state_bandwidth.value  # read and written there
    wanted = (1e18 / across + in_device_ns) / 4
    assert copy_ns(config, link, 4) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("path", "slowdown"), [("kernel", 1.5), ("staged", 1.0)])
def test_staged_copy_slows_no_step_down(path: str, slowdown: float) -> None:
    config = config_of("hardware.copy_slowdown.value=1.5", f"executor.copy_path={path}")
    assert runtime_of(config).executor(None)._slowdown == slowdown


@pytest.mark.parametrize(("model", "parts"), [("qwen3_next_80b", 2), ("kimi_linear_48b", 1)])
def test_device_copies_a_whole_head_or_a_whole_latent(model: str, parts: int) -> None:
    config = config_of(f"model={model}", "executor.copy_path=copy_engine")
    piece = config.model.full_layer_token_bytes * config.cache.page_size // parts
    rate = pcie_rate(config.hardware, piece, CopyPath.copy_engine)
    assert copy_ns(config, "to_device", 8) == pytest.approx(1e18 / (8 * rate), rel=1e-6)


@pytest.mark.parametrize(("tp", "hosts"), [(1, 1), (8, 1), (16, 2)])
def test_each_host_has_the_memory_bandwidth_of_the_machine(tp: int, hosts: int) -> None:
    config = config_of("model=llama3_8b")
    wanted = 1e18 / (hosts * config.hardware.host_bandwidth.value)
    assert copy_ns(config, "host_memory", tp) == pytest.approx(wanted, rel=1e-6)


# -- storage -------------------------------------------------------------------------------------


def test_runtime_has_no_storage_if_none_is_configured() -> None:
    assert not runtime_of(config_of("storage=none")).has_storage


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_stores_its_part_of_a_page_in_its_part_of_the_capacity(ranks: int) -> None:
    gib = 4 * PAGE_BYTES / 2**30
    runtime = runtime_of(config_of("storage=memory", f"storage.capacity_gib={gib}"), ranks=ranks)
    kept = []
    for each in runtime.stores:
        each.write(range(9))
        kept.append(sum(each.contains(range(9))))
    runtime.close()
    assert kept == [4] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_its_own_namespace_in_a_shared_store(ranks: int, tmp_path: Path) -> None:
    runtime = runtime_of(config_of("storage=file", f"storage.root={tmp_path}"), ranks=ranks)
    runtime.stores[0].write([4])
    found = [each.contains([4]) for each in runtime.stores]
    runtime.close()
    assert found == [[rank == 0] for rank in range(ranks)]


# -- tiers in fewer bytes ------------------------------------------------------------------------

SMALL = ("model=llama3_8b", "workload=chat", "workload.limit=40")
SMALL = (*SMALL, "cache.device_gib=1", "cache.host_gib=2")
CODED = "cache.host_format=int8"
SHARE = 132 / 256  # of a head of 128 elements in int8, with its scale


@pytest.mark.parametrize(
    "name", ["llama3_8b", "gemma3_27b", "qwen3_next_80b", "gpt_oss_120b", "tiny_hybrid"]
)
def test_coded_pages_have_the_bytes_that_the_kernel_writes(name: str) -> None:
    model = config_of(f"model={name}").model
    full, mamba = LayerKind.full, LayerKind.mamba
    assert coded_page_bytes(model, full, 64, "plain") == model.page_bytes(full, 64)
    assert coded_page_bytes(model, mamba, 64, "plain") == model.mamba_slot_bytes
    heads = (64, model.num_kv_heads, model.head_dim)
    states = (model.recurrent_heads, model.recurrent_state_dim, model.recurrent_head_dim)
    num_layers = len([word for word in model.layer_words if "F" in word])
    plain = torch.Size(states).numel() * model.state_dtype_bytes
    for form in ("bf16", "int8", "fp8", "fp4"):
        page_bytes = 2 * num_layers * coded_bytes(heads, Format[form])
        assert coded_page_bytes(model, full, 64, form) == page_bytes
        if model.num_mamba_layers:
            saved = model.num_mamba_layers * (plain - coded_bytes(states, Format[form]))
            assert coded_page_bytes(model, mamba, 64, form) == model.mamba_slot_bytes - saved


def test_host_of_the_same_size_holds_more_coded_pages() -> None:
    plain, coded = (deploy(config_of(*SMALL, *form)) for form in ((), (CODED,)))
    assert plain.device == coded.device
    assert plain.host.total_bytes == coded.host.total_bytes
    (before, *_), (after, *_) = plain.host.counts, coded.host.counts
    assert before is not None
    assert after == int(before / SHARE)


def test_coded_tier_is_copied_in_fewer_bytes() -> None:
    written = [
        [float(result.measures[f"transfer/{name}_bytes"]) for name in ("back_up", "storage_write")]
        for result in (
            run(config_of(*SMALL, "storage=memory", *more))
            for more in ((), (CODED,), ("storage.format=int8",))
        )
    ]
    (back_up, write), on_host, in_storage = written
    assert on_host == pytest.approx([back_up * SHARE, write * SHARE], rel=0.05)
    assert in_storage == pytest.approx([back_up, write * SHARE], rel=0.05)


def test_wait_for_the_load_of_a_layer_is_timed_by_its_coded_bytes() -> None:
    config = config_of(*SMALL, CODED)
    runtime = make_runtime(config, deploy(config))
    assert isinstance(runtime, SimulatedRuntime)
    assert runtime.executor(None)._load_shares == [SHARE, 1.0, 1.0]


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("programs", [1, 4])
def test_few_programs_of_a_coding_kernel_limit_its_rate(programs: int, *, to_device: bool) -> None:
    config = config_of("model=llama3_8b", f"hardware.copy_kernel.link_programs={programs}")
    kernel = config.hardware.copy_kernel
    one = kernel.coded_to_device if to_device else kernel.coded_to_host
    plain, int8, fp4 = (
        pcie_rate(config.hardware, 1 << 16, CopyPath.kernel, to_device=to_device, form=form)
        for form in ("plain", "int8", "fp4")
    )
    assert int8 == min(plain, programs * one.value)
    assert fp4 == min(plain, programs * one.value / 2)  # as many elements


def test_pages_of_another_format_are_not_found_in_a_shared_store(tmp_path: Path) -> None:
    for number, form in enumerate(FORMATS):
        root = f"storage.root={tmp_path}"
        config = config_of(*SMALL, "storage=file", root, f"storage.format={form}")
        runtime = make_runtime(config, deploy(config))
        assert isinstance(runtime, SimulatedRuntime)
        assert runtime.stores[0].contains([4 * each for each in range(number)]) == [False] * number
        runtime.stores[0].write([4 * number])
        assert runtime.stores[0].contains([4 * number]) == [True]
        runtime.close()


@pytest.mark.parametrize(("more", "is_named"), [((), False), ((CODED,), True)])
def test_notes_of_a_run_name_a_lossy_tier(more: tuple[str, ...], *, is_named: bool) -> None:
    config = config_of(*SMALL, *more)
    notes = pool_remarks(config, deploy(config))
    assert any("lossy" in note and "host int8" in note for note in notes) == is_named


@pytest.mark.parametrize(
    ("pools", "joined"),
    [("split", ("+", "+")), ("shared", ("+", "or")), ("shared_both", ("or", "or"))],
)
def test_notes_of_a_run_say_which_tiers_share_their_memory(
    pools: str, joined: tuple[str, str]
) -> None:
    config = config_of("model=gemma3_27b", f"cache.pools={pools}")
    for note, word in zip(pool_remarks(config, deploy(config)), joined, strict=False):
        assert f" {word} " in note.partition(" = ")[2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cache.host_format=int4",), "must be one of plain, int8, fp8, bf16, fp4"),
        ((CODED, "storage.format=plain"), "storage.format must be"),
        ((CODED, "storage.format=fp8"), "storage.format must be"),
        ((CODED, "executor.copy_path=staged"), "executor.copy_path=kernel"),
        (
            (CODED, "hardware.copy_kernel.coded_to_device.value=0"),
            r"coded_to_device and coded_to_host of .* must be known",
        ),
    ],
)
def test_tier_that_cannot_be_coded_is_an_error(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):  # noqa: PT012 - the last one in the runtime
        config = config_of(*SMALL, *overrides)
        make_runtime(config, deploy(config))


def test_without_overlap_no_step_computes_while_pages_are_loaded():
    told = (
        *("model=llama3_8b", "hardware=h100", "parallel.tp=1", "storage=none", "seed=0"),
        *("workload=multi_turn", "workload.num_sessions=6", "workload.rounds=2"),
        *("workload.first_tokens=8000", "workload.turn_tokens=1000", "workload.in_flight=3"),
        *("workload.ready_queue=fifo", "workload.request_rate=1000"),
        *("cache.device.tokens.full=40000", "hardware.copy_slowdown.value=1"),
    )
    found = {}
    for overlaps in ("true", "false"):
        config = config_of(*told, f"compat.rules.overlaps_loads={overlaps}")
        result = run(config)
        found[overlaps] = summarize(result.records, result.measures)
    beside, after = found["true"], found["false"]
    loaded = beside["transfer/load_back_bytes"]
    assert loaded == after["transfer/load_back_bytes"] > 6e9
    rate = link_rates(config, deploy(config))["to_device"]
    # beside computing, nearly all of the loads is hidden
    more_s = after["engine/span_s"] - beside["engine/span_s"]
    assert more_s == pytest.approx(loaded / rate, rel=0.1)
    assert beside["request/prefill_fence_s_mean"] == 0 < after["request/prefill_fence_s_mean"]

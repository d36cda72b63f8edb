"""A host tier in fewer bytes, in simulated time: capacity, copies, storage, and what is refused."""

from pathlib import Path

import pytest
import torch

from hicache.engine.deployment import deploy
from hicache.engine.simulated_runtime import SimulatedRuntime, make_runtime
from hicache.experiment import run
from hicache.kernels.transcode import Format, coded_bytes
from hicache.models import FORMATS, LayerKind, ModelConfig, coded_page_bytes
from hicache.models.copy_rates import CopyPath, pcie_rate
from hicache.results.remarks import pool_remarks
from hicache.runs.schema import config_of

MODELS = ["llama3_8b", "gemma3_27b", "qwen3_next_80b", "gpt_oss_120b", "tiny_hybrid"]
SMALL = (
    "model=llama3_8b",
    "workload=chat",
    "workload.limit=40",
    "cache.device_gib=1",
    "cache.host_gib=2",
)


def model_of(name: str) -> ModelConfig:
    return config_of(f"model={name}").model


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_page_has_the_bytes_of_the_model(name: str) -> None:
    model = model_of(name)
    for kind in LayerKind:
        assert coded_page_bytes(model, kind, 64, "plain") == model.page_bytes(kind, 64)


@pytest.mark.parametrize("form", ["int8", "fp8", "fp4"])
@pytest.mark.parametrize("name", MODELS)
def test_coded_pages_have_the_bytes_that_the_kernel_writes(name: str, form: str) -> None:
    model = model_of(name)
    shape = (64, model.num_kv_heads, model.head_dim)
    wanted = 2 * len([w for w in model.layer_words if "F" in w])
    wanted *= coded_bytes(shape, Format[form])
    assert coded_page_bytes(model, LayerKind.full, 64, form) == wanted
    if model.num_mamba_layers:
        shape = (model.recurrent_heads, model.recurrent_state_dim, model.recurrent_head_dim)
        plain = torch.Size(shape).numel() * model.state_dtype_bytes
        saved = model.num_mamba_layers * (plain - coded_bytes(shape, Format[form]))
        got = coded_page_bytes(model, LayerKind.mamba, 64, form)
        assert got == model.mamba_slot_bytes - saved


def test_bf16_leaves_pages_of_bf16_alone_and_halves_states() -> None:
    model = model_of("qwen3_next_80b")
    full, mamba = LayerKind.full, LayerKind.mamba
    assert coded_page_bytes(model, full, 64, "bf16") == model.page_bytes(full, 64)
    assert coded_page_bytes(model, mamba, 64, "bf16") < 0.6 * model.mamba_slot_bytes


def test_the_same_memory_holds_more_pages() -> None:
    plain, coded = (
        deploy(config_of(*SMALL, f"cache.host_format={form}")) for form in ("plain", "int8")
    )
    assert plain.device == coded.device
    assert plain.host.total_bytes == coded.host.total_bytes
    (before, *_), (after, *_) = plain.host.counts, coded.host.counts
    assert before is not None
    assert after == int(before * 256 / 132)


def test_coded_copies_move_fewer_bytes_and_keep_the_results_of_others_exact() -> None:
    plain, coded, stored = (
        run(config_of(*SMALL, "storage=memory", *more))
        for more in ((), ("cache.host_format=int8",), ("storage.format=int8",))
    )
    share = 132 / 256

    def written(result: object, name: str) -> float:
        return float(result.measures[name])  # type: ignore[attr-defined]

    names = ["transfer/back_up_bytes", "transfer/storage_write_bytes"]
    before, after, only_storage = (
        [written(each, name) for name in names] for each in (plain, coded, stored)
    )
    assert after[0] == pytest.approx(before[0] * share, rel=0.05)
    assert after[1] == pytest.approx(before[1] * share, rel=0.05)
    assert only_storage[0] == pytest.approx(before[0], rel=0.05)
    assert only_storage[1] == pytest.approx(before[1] * share, rel=0.05)


def test_a_loaded_layer_is_waited_for_by_its_coded_bytes() -> None:
    config = config_of(*SMALL, "cache.host_format=int8")
    runtime = make_runtime(config, deploy(config))
    assert isinstance(runtime, SimulatedRuntime)
    shares = runtime._executor.keywords["load_shares"]
    assert shares == [132 / 256, 1.0, 1.0]


@pytest.mark.parametrize("to_device", [True, False])
def test_few_programs_of_a_coding_kernel_cap_the_rate(*, to_device: bool) -> None:
    for programs in (1, 4):
        config = config_of("model=llama3_8b", f"hardware.copy_kernel.link_programs={programs}")
        kernel = config.hardware.copy_kernel
        one = kernel.coded_to_device if to_device else kernel.coded_to_host
        plain, int8, fp4 = (
            pcie_rate(config.hardware, 1 << 16, CopyPath.kernel, to_device=to_device, form=form)
            for form in ("plain", "int8", "fp4")
        )
        assert int8 == min(plain, programs * one.value)
        assert fp4 == min(plain, programs * one.value / 2)  # as many elements


def test_a_machine_without_a_rate_of_coded_copies_is_refused() -> None:
    unknown = "hardware.copy_kernel.coded_to_device.value=0"
    config = config_of(*SMALL, "cache.host_format=int8", unknown)
    with pytest.raises(ValueError, match=r"coded_to_device and coded_to_host of .* must be known"):
        make_runtime(config, deploy(config))


def test_a_format_does_not_find_the_pages_of_another(tmp_path: Path) -> None:
    shared = (*SMALL, "storage=file", f"storage.root={tmp_path}")
    for number, form in enumerate(FORMATS):
        config = config_of(*shared, f"storage.format={form}")
        runtime = make_runtime(config, deploy(config))
        assert isinstance(runtime, SimulatedRuntime)
        assert runtime.stores[0].contains([4 * each for each in range(number)]) == [False] * number
        runtime.stores[0].write([4 * number])
        assert runtime.stores[0].contains([4 * number]) == [True]
        runtime.close()


def test_a_lossy_tier_is_named_in_the_notes() -> None:
    config = config_of(*SMALL, "cache.host_format=int8")
    notes = pool_remarks(config, deploy(config))
    assert any("lossy" in note and "host int8" in note for note in notes)
    plain = config_of(*SMALL)
    assert not any("lossy" in note for note in pool_remarks(plain, deploy(plain)))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("cache.host_format=int4",), "must be one of plain, int8, fp8, bf16, fp4"),
        (("cache.host_format=int8", "storage.format=plain"), "storage.format must be"),
        (("cache.host_format=int8", "storage.format=fp8"), "storage.format must be"),
        (("cache.host_format=int8", "executor.copy_path=staged"), "executor.copy_path=kernel"),
    ],
)
def test_what_cannot_be_coded_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config_of("model=llama3_8b", *overrides)

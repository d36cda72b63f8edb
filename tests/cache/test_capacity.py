"""How memory is dealt out to pools, to the page."""

from dataclasses import replace

import pytest

from hicache.cache.kinds import FULL, MAMBA, Kinds
from hicache.cache.pages import PageAllocator
from hicache.config import CacheConfig, DeviceSizes, HostSizes
from hicache.engine.build import make_pools
from hicache.engine.deployment import deploy
from hicache.engine.ranks.agreement import TracedAllocator
from hicache.memory import Capacity, capacities, engine_rule, model_kinds
from hicache.models import GIB, Figure, HardwareConfig, ModelConfig
from hicache.runs.schema import config_of
from tests.cache.small import named_kinds

MIB = 1 << 20
MODEL = ModelConfig(
    name="small",
    pattern="F S M",
    num_layers=3,
    num_full_layers=1,
    num_swa_layers=1,
    num_mamba_layers=1,
    window_len=30,  # two pages of 16, and two more for what is computed
    max_len=64,
    num_kv_heads=2,
    head_dim=8,
    recurrent_heads=2,
    recurrent_head_dim=4,
    recurrent_state_dim=4,
    swa_device_share=0.25,
    mamba_device_share=0.25,
    swa_host_share=0.125,
    mamba_host_share=0.5,
)
SIZES = (1000, 300, 7000)


def kinds_of(sizes: tuple[int, int, int]) -> Kinds:
    """Those whose pages weigh something."""
    window_len = MODEL.window_len if sizes[1] else 0
    return named_kinds(16, window_len=window_len, has_states=sizes[2] > 0, page_bytes=sizes)


def shared(sizes: tuple[int, int, int] = SIZES, **knobs: object) -> tuple[Capacity, Capacity]:
    """Of a mebibyte on the device, and two on the host."""
    told = {"page_size": 16, "device_gib": MIB / GIB, "host_gib": 2 * MIB / GIB, **knobs}
    return capacities(CacheConfig(**told), MODEL, kinds_of(sizes), 4 * MIB)  # type: ignore[arg-type]


def test_memory_is_dealt_out_in_whole_pages_by_the_shares_of_the_model() -> None:
    device, host = shared()
    assert device == Capacity(counts=(524, 873, 37), total_bytes=MIB)
    assert host == Capacity(counts=(786, 873, 149), total_bytes=2 * MIB)


def test_shares_that_are_asked_for_go_before_those_of_the_model() -> None:
    device, host = shared(device=DeviceSizes(share={"swa": 0.5, "mamba": 0.125}))
    assert device.counts == (393, 1747, 18)
    assert host == shared()[1]
    device, host = shared(host=HostSizes(share={"swa": 0.0, "mamba": 0.25}))
    assert host.counts == (1572, 0, 74)
    assert device == shared()[0]


def test_pools_in_tokens_and_states_go_before_memory() -> None:
    device, host = shared(device=DeviceSizes(tokens={"full": 1610, "swa": 160}, states=9))
    assert device == Capacity(counts=(100, 10, 9), total_bytes=100 * 1000 + 10 * 300 + 9 * 7000)
    assert host == shared()[1]
    device, host = shared(host=HostSizes(tokens={"full": 0}, states=3))
    assert host.counts == (0, 873, 3)
    assert device == shared()[0]


def test_a_kind_that_a_model_lacks_takes_nothing_of_its_share() -> None:
    device, host = shared((1000, 0, 0))
    assert (device.counts, host.counts) == ((1048, 0, 0), (2097, 0, 0))


@pytest.mark.parametrize(
    ("sizes", "refusal"),
    [
        ((MIB // 2, 300, 7000), None),
        (
            (MIB // 2 + 1, 300, 7000),
            "too small for one page of full KV: 0.000 GiB hold 0, and .* needs at least 1",
        ),
        ((1000, MIB // 16, 7000), None),
        (
            (1000, MIB // 16 + 1, 7000),
            "window of 4 pages: .* hold 3, .* needs at least 4; .* or cache.device.share.swa=0.25",
        ),
        ((1000, 300, MIB // 16), None),
        (
            (1000, 300, MIB // 16 + 1),
            "4 state slots: .* hold 3, .* needs at least 4; .* or cache.device.share.mamba=0.25",
        ),
    ],
)
def test_the_device_has_room_for_what_one_request_needs_or_is_refused(
    sizes: tuple[int, int, int], refusal: str | None
) -> None:
    if refusal is None:
        assert 0 < min(shared(sizes)[0].counts) <= 4  # type: ignore[type-var, operator]
        return
    with pytest.raises(ValueError, match=refusal):
        shared(sizes)


def test_the_host_may_have_room_for_nothing() -> None:
    assert shared(host_gib=0.0)[1] == Capacity(counts=(0, 0, 0), total_bytes=0)
    assert shared(host=HostSizes(share={"swa": 0.5}))[1].counts[0] == 0


@pytest.mark.parametrize("tier", ["device", "host"])
def test_shares_that_leave_less_than_nothing_to_full_are_refused(tier: str) -> None:
    sizes = {"device": DeviceSizes, "host": HostSizes}[tier](share={"swa": 0.75, "mamba": 0.5})
    with pytest.raises(ValueError, match=f"{tier}.share.mamba must add up .* got 0.75 and 0.5"):
        shared(**{tier: sizes})


def test_a_device_has_what_weights_leave_and_no_more() -> None:
    assert shared(device_gib=None)[0].total_bytes == 4 * MIB
    assert shared(device_gib=4 * MIB / GIB)[0].total_bytes == 4 * MIB
    with pytest.raises(ValueError, match=r"more than the 0.0 GiB of device memory"):
        shared(device_gib=5 * MIB / GIB)


def test_a_page_may_be_as_long_as_a_request_and_no_longer() -> None:
    assert shared(page_size=64)
    with pytest.raises(
        ValueError, match=r"page_size=128 must not exceed model.max_len=64 of small"
    ):
        shared(page_size=128)


def test_memory_without_an_end_gives_pools_without_one() -> None:
    device, host = shared(unlimited=True)
    assert device == host == Capacity(counts=(None, None, None), total_bytes=0)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_kv_weighs_more_where_devices_hold_the_same_heads(tp: int) -> None:
    copies = max(tp // 2, 1)
    token_bytes = 2 * (8 + 8) * MODEL.kv_dtype_bytes
    slot_bytes = MODEL.mamba_slot_bytes
    assert model_kinds(MODEL, 16, tp).page_bytes == [*[16 * token_bytes * copies] * 2, slot_bytes]


@pytest.mark.parametrize("is_traced", [False, True])
def test_pools_are_as_large_as_that_and_empty_where_the_model_keeps_nothing(
    *, is_traced: bool
) -> None:
    device, host = shared()
    pools = make_pools(device, host, is_traced=is_traced, is_checked=True)
    assert [[pool.capacity for pool in tier] for tier in pools] == [[524, 873, 37], [786, 873, 149]]
    sort = TracedAllocator if is_traced else PageAllocator
    assert {type(pool) for tier in pools for pool in tier} == {sort}
    no_states = replace(MODEL, pattern="F S", num_layers=2, num_mamba_layers=0)
    kinds = model_kinds(no_states, 16, 1)
    endless = capacities(CacheConfig(page_size=16, unlimited=True), no_states, kinds, 0)
    kept = make_pools(*endless, is_traced=is_traced, is_checked=True)
    assert [[pool.capacity for pool in tier] for tier in kept] == [[None, None, 0]] * 2


MACHINE = HardwareConfig(name="m", device_memory_bytes=Figure(value=80 * GIB))
WEIGHTS = ModelConfig(name="w", num_full_layers=1, num_layers=1, dense_params=8 * GIB)


def test_sglang_s_rule_keeps_a_fraction_of_what_is_available_before_the_weights() -> None:
    cache = CacheConfig(device=DeviceSizes(sglang_fraction=0.5))
    assert engine_rule(cache, WEIGHTS, MACHINE, 1) == (79 * GIB) // 2 - 16 * GIB
    assert engine_rule(cache, WEIGHTS, MACHINE, 2) == 79 * GIB - 16 * GIB


def test_vllm_s_rule_leaves_what_weights_and_activations_do_not_take_of_its_fraction() -> None:
    cache = CacheConfig(device=DeviceSizes(vllm_fraction=0.75))
    assert engine_rule(cache, WEIGHTS, MACHINE, 1) == (60 - 2 - 16) * GIB
    assert engine_rule(CacheConfig(), WEIGHTS, MACHINE, 1) is None


def test_a_ratio_sizes_each_host_pool_by_its_device_pool() -> None:
    model = ("model=hymba_1b5", "parallel.tp=1", "cache.device.sglang_fraction=0.6")
    deployment = deploy(config_of(*model, "cache.host.sglang_ratio=2.5"))
    device = deployment.device.counts
    assert deployment.host.counts == tuple(int(2.5 * (count or 0)) for count in device)
    assert all(device)


def test_host_memory_may_be_given_for_each_device() -> None:
    sizes = [
        deploy(config_of("model=llama3_8b", "parallel.tp=4", each)).host
        for each in ("cache.host.sglang_gib=16", "cache.host_gib=64")
    ]
    assert sizes[0] == sizes[1]


def test_two_rules_for_one_pool_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sglang_fraction and .*vllm_fraction"):
        DeviceSizes(sglang_fraction=0.8, vllm_fraction=0.9)


def test_window_layers_that_read_the_kv_of_other_layers_are_no_kind() -> None:
    sharing = replace(MODEL, pattern="F s M")
    assert model_kinds(sharing, 16, 1).numbers == (FULL, MAMBA)


def test_a_pool_of_a_given_size_that_is_too_small_names_its_own_setting() -> None:
    with pytest.raises(
        ValueError, match=r"device\.states=2 gives 2, .* raise cache\.device\.states$"
    ):
        shared(device=DeviceSizes(states=2))

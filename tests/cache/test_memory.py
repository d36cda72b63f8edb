"""How many pages of each kind fit in the memory of a tier."""

from dataclasses import replace

import pytest

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.pages import PageAllocator
from hicache.config import CacheConfig, DeviceSizes, HostSizes
from hicache.engine.build import make_pools
from hicache.engine.deployment import deploy
from hicache.engine.ranks.agreement import TracedAllocator
from hicache.memory import Capacity, capacities, engine_rule, model_kinds, shared_capacity
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
GIVEN = DeviceSizes(tokens={"full": 1610, "swa": 160}, states=9)
TOO_MUCH = {"swa": 0.75, "mamba": 0.5}
DEVICE, HOST = (524, 873, 37), (786, 873, 149)  # by the shares of the model


def capacities_of(
    sizes: tuple[int, int, int] = SIZES, **knobs: object
) -> tuple[Capacity, Capacity]:
    """Capacities of 1 MiB of device and 2 MiB of host; `sizes`: bytes per page, 0: no such kind."""
    window_len = MODEL.window_len if sizes[1] else 0
    kinds = named_kinds(16, window_len=window_len, has_states=sizes[2] > 0, page_bytes=sizes)
    cache = {"page_size": 16, "device_gib": MIB / GIB, "host_gib": 2 * MIB / GIB, **knobs}
    return capacities(CacheConfig(**cache), MODEL, kinds, 4 * MIB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "knobs", "device", "host"),
    [
        (SIZES, {}, DEVICE, HOST),
        (SIZES, {"device": DeviceSizes(share={"swa": 0.5, "mamba": 0.125})}, (393, 1747, 18), HOST),
        (SIZES, {"host": HostSizes(share={"swa": 0.0, "mamba": 0.25})}, DEVICE, (1572, 0, 74)),
        (SIZES, {"host": HostSizes(share={"swa": 0.5})}, DEVICE, (0, 3495, 149)),
        (SIZES, {"device": GIVEN}, (100, 10, 9), HOST),
        (SIZES, {"host": HostSizes(tokens={"full": 0}, states=3)}, DEVICE, (0, 873, 3)),
        (SIZES, {"host_gib": 0.0}, DEVICE, (0, 0, 0)),
        (SIZES, {"unlimited": True}, (None, None, None), (None, None, None)),
        ((1000, 0, 0), {}, (1048, 0, 0), (2097, 0, 0)),
        ((1000, 0, 0), {"unlimited": True}, (None, 0, 0), (None, 0, 0)),
        ((MIB // 2, 300, 7000), {}, (1, 873, 37), (1, 873, 149)),
        ((1000, MIB // 16, 7000), {}, (524, 4, 37), (786, 4, 149)),
        ((1000, 300, MIB // 16), {}, (524, 873, 4), (786, 873, 16)),
        (SIZES, {"page_size": 64}, DEVICE, HOST),
    ],
)
def test_memory_is_divided_into_whole_pages_by_the_settings_or_the_models_default_shares(
    sizes, knobs, device, host
):
    found = capacities_of(sizes, **knobs)
    assert (found[0].counts, found[1].counts) == (device, host)


@pytest.mark.parametrize(
    ("knobs", "num_bytes"),
    [
        ({}, MIB),
        ({"device": GIVEN}, 100 * 1000 + 10 * 300 + 9 * 7000),
        ({"device_gib": None}, 4 * MIB),
        ({"device_gib": 4 * MIB / GIB}, 4 * MIB),
        ({"unlimited": True}, 0),
    ],
)
def test_a_tier_has_the_bytes_of_its_memory_or_the_sum_of_pools_with_a_set_size(knobs, num_bytes):
    assert capacities_of(**knobs)[0].total_bytes == num_bytes


@pytest.mark.parametrize(
    ("sizes", "knobs", "message"),
    [
        ((MIB // 2 + 1, 300, 7000), {}, "one page of full KV: 0.000 GiB hold 0, .* at least 1"),
        ((1000, MIB // 16 + 1, 7000), {}, "4 pages: .* hold 3, .* at least 4; .*share.swa=0.25"),
        ((1000, 300, MIB // 16 + 1), {}, "4 state .* hold 3, .* at least 4; .*share.mamba=0.25"),
        (SIZES, {"device": DeviceSizes(states=2)}, r"states=2 gives 2, .* raise .*device\.states$"),
        (SIZES, {"device": DeviceSizes(share=TOO_MUCH)}, "device.share.mamba must .* 0.75 and 0.5"),
        (SIZES, {"host": HostSizes(share=TOO_MUCH)}, "host.share.mamba must .* 0.75 and 0.5"),
        (SIZES, {"device_gib": 5 * MIB / GIB}, "more than the 0.0 GiB of device memory"),
        (SIZES, {"page_size": 128}, "page_size=128 must not exceed model.max_len=64 of small"),
    ],
)
def test_sizes_that_cannot_hold_one_request_or_contradict_each_other_are_rejected(
    sizes, knobs, message
):
    with pytest.raises(ValueError, match=message):
        capacities_of(sizes, **knobs)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_kv_takes_more_bytes_where_several_devices_hold_the_same_heads(tp):
    copies = max(tp // 2, 1)
    page_bytes = 16 * 2 * (8 + 8) * MODEL.kv_dtype_bytes * copies
    assert model_kinds(MODEL, 16, tp).page_bytes == [page_bytes] * 2 + [MODEL.mamba_slot_bytes]


def test_window_layers_that_share_the_kv_of_other_layers_get_no_pages_of_their_own():
    assert model_kinds(replace(MODEL, pattern="F s M"), 16, 1).numbers == (FULL, MAMBA)


@pytest.mark.parametrize("is_traced", [False, True])
def test_pools_have_the_computed_sizes(*, is_traced):
    endless = capacities_of((1000, 300, 0), unlimited=True)
    for tiers, wanted in (
        (capacities_of(), [[*DEVICE], [*HOST]]),
        (endless, [[None, None, 0]] * 2),
    ):
        pools = make_pools(*tiers, is_traced=is_traced, is_checked=True)
        assert [[pool.capacity for pool in tier] for tier in pools] == wanted
        sort = TracedAllocator if is_traced else PageAllocator
        assert {type(pool) for tier in pools for pool in tier} == {sort}


@pytest.mark.parametrize(
    ("sizes", "tp", "gib"),
    [
        (DeviceSizes(sglang_fraction=0.5), 1, 79 / 2 - 16),
        (DeviceSizes(sglang_fraction=0.5), 2, 79 - 16),
        (DeviceSizes(vllm_fraction=0.75), 1, 60 - 2 - 16),
        (DeviceSizes(), 1, None),
    ],
)
def test_sglangs_and_vllms_memory_fractions_give_the_bytes_of_the_cache(sizes, tp, gib):
    machine = HardwareConfig(name="m", device_memory_bytes=Figure(value=80 * GIB))
    weights = ModelConfig(name="w", num_full_layers=1, num_layers=1, dense_params=8 * GIB)
    reserved = engine_rule(CacheConfig(device=sizes), weights, machine, tp)
    assert reserved == (None if gib is None else gib * GIB)
    with pytest.raises(ValueError, match=r"sglang_fraction and .*vllm_fraction"):
        replace(sizes, sglang_fraction=0.8, vllm_fraction=0.9)


def test_sglangs_host_size_is_a_ratio_to_the_device_or_gib_per_device():
    model = ("model=hymba_1b5", "parallel.tp=1", "cache.device.sglang_fraction=0.6")
    deployment = deploy(config_of(*model, "cache.host.sglang_ratio=2.5"))
    device = deployment.device.counts
    assert all(device)
    assert deployment.host.counts == tuple(int(2.5 * (count or 0)) for count in device)
    each_and_all = [
        deploy(config_of("model=llama3_8b", "parallel.tp=4", size)).host
        for size in ("cache.host.sglang_gib=16", "cache.host_gib=64")
    ]
    assert each_and_all[0] == each_and_all[1]


def test_a_pool_of_a_shared_tier_may_take_all_bytes_of_the_tier():
    tier = Capacity(counts=(10, None, 3), total_bytes=1000)
    assert shared_capacity(tier, (4, 5, 100)) == replace(tier, counts=(250, None, 10))

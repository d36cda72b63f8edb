"""Pools whose host, or whose storage, keeps numbers in fewer bytes."""

import os

if "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is imported

from dataclasses import replace

import numpy as np
import pytest
import torch

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import Move
from hicache.executor.real.plane import REFERENCE, interpreted
from hicache.executor.real.pools import Arrival, TorchPools
from hicache.kernels.transcode import Format, coded_of, wide_of
from hicache.models import ModelConfig
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import run_mix, tiny

FORMS = ("int8", "fp8", "bf16", "fp4")
IDS, OTHERS = np.array([1, 3], np.int32), np.array([2, 0], np.int32)


def model() -> ModelConfig:
    return replace(tiny("F S M D", 4), head_dim=64, recurrent_head_dim=64)


def filled(**formats: object) -> TorchPools:
    pools = cpu_pools(model(), 4, (4, 4, 4), (4, 4, 4), tp=2, **formats)
    generator = torch.Generator().manual_seed(0)
    for tensor in device_tensors(pools):
        tensor.normal_(generator=generator)
    return pools


def device_tensors(pools: TorchPools) -> list[torch.Tensor]:
    ranks = pools.ranks
    return [each for rank in ranks for each in (*rank.kv.values(), *rank.taps, *rank.states)]


def there_and_back(pools: TorchPools) -> None:
    """Items 1 and 3 of the device to items 2 and 0 of the host, and back to where they were."""
    kinds = (FULL, SWA, MAMBA)
    pools.save([Move(kind, IDS, OTHERS) for kind in kinds])
    for kind in kinds:
        pools.poison(0, kind, IDS)
    pools.load([Arrival(is_within=False, moves=[Move(kind, OTHERS, IDS) for kind in kinds])])


def coded(values: torch.Tensor, form: str) -> torch.Tensor:
    return wide_of(coded_of(values, Format[form]), values.shape[1:], Format[form])


@pytest.mark.parametrize("plane", [REFERENCE, interpreted()], ids=["torch", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_pages_and_states_come_back_coded_and_taps_as_they_were(form, plane):
    pools = filled(host_format=form, storage_format=form, plane=plane)
    before = [each.clone() for each in device_tensors(pools)]
    there_and_back(pools)
    for rank, first in zip(pools.ranks, (0, len(before) // 2), strict=True):
        num_kv, num_taps = len(rank.kv), len(rank.taps)
        wanted = [each.clone() for each in before[first : first + num_kv + 2 * num_taps]]
        for kv in wanted[:num_kv]:
            pages = kv[:, :, IDS].flatten(0, 2)
            kv[:, :, IDS] = coded(pages, form).view(kv[:, :, IDS].shape)
        for state in wanted[num_kv + num_taps :]:
            state[IDS] = coded(state[IDS], form)
        got = [*rank.kv.values(), *rank.taps, *rank.states]
        assert all(map(torch.equal, got, wanted))


def test_ten_moves_equal_one():
    pools = filled(host_format="int8", storage_format="int8")
    there_and_back(pools)
    once = [each.clone() for each in device_tensors(pools)]
    for _ in range(9):
        there_and_back(pools)
    assert all(map(torch.equal, device_tensors(pools), once))


@pytest.mark.parametrize("form", FORMS)
def test_storage_of_its_own_format_keeps_what_a_coded_host_keeps(form):
    plain, coded_host = (filled(host_format=host, storage_format=form) for host in ("plain", form))
    for pools in (plain, coded_host):
        there_and_back(pools)
    for ours, theirs in zip(plain.ranks, coded_host.ranks, strict=True):
        assert ours.layout == theirs.layout
        for kind in (FULL, SWA, MAMBA):
            stored, checksum = ours.stored.packed(kind, ours.payload(kind, 2))
            assert bytes(stored) == bytes(theirs.payload(kind, 2))
            assert [checksum] == theirs.sums([(kind, 2)])
            assert ours.stored.page_bytes(kind) == len(stored) < len(ours.payload(kind, 2))
            landing = ours.landing(kind, 2)
            landing[:] = stored
            assert ours.landed([(kind, 1)], [landing]) == [checksum]
            again, _ = ours.stored.packed(kind, ours.payload(kind, 1))
            assert bytes(again) == bytes(stored)


def test_a_page_of_another_format_has_another_name():
    layouts = [filled(storage_format=form).ranks[0].layout for form in ("plain", *FORMS)]
    assert len(set(layouts)) == 5


def test_whole_runs_on_kernels_and_on_torch_are_equally_far_from_a_cold_start():
    one, other = (
        run_mix(3, form="int8", plane=plane, most=3).verdict for plane in (REFERENCE, interpreted())
    )
    assert one.num_equal == other.num_equal < one.num_checked  # a request was given coded pages
    assert one.error == pytest.approx(other.error, rel=0.01)
    assert 0 < one.error < 0.1

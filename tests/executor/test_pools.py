"""Real pools: coded pages on the host and in storage, checksums, and launches of copies."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported

import numpy as np
import pytest
import torch

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import Move
from hicache.executor.real.plane import REFERENCE, Plane, interpreted
from hicache.executor.real.pools import Arrival
from hicache.kernels.transcode import Format, coded_of, wide_of
from tests.executor.cpu_pools import cpu_pools
from tests.executor.kernels_only import kernels_only
from tests.executor.mixes import run_mix, tiny

FORMS = ("int8", "fp8", "bf16", "fp4")
IDS, OTHERS = np.array([1, 3], np.int32), np.array([2, 0], np.int32)
KINDS = (FULL, SWA, MAMBA)


def filled(tp=2, **more):
    """Pools whose device tensors hold random numbers."""
    model = tiny("F S M D", 4, head_dim=64, recurrent_head_dim=64)
    pools = cpu_pools(model, 4, (4, 4, 4), (4, 4, 4), tp=tp, **more)
    generator = torch.Generator().manual_seed(0)
    for tensor in device_tensors(pools):
        tensor.normal_(generator=generator)
    return pools


def device_tensors(pools):
    ranks = pools.ranks
    return [each for rank in ranks for each in (*rank.kv.values(), *rank.taps, *rank.states)]


def there_and_back(pools):
    """Back up items 1 and 3 of the device to items 2 and 0 of the host, and load them back."""
    pools.save([Move(kind, IDS, OTHERS) for kind in KINDS])
    for kind in KINDS:
        pools.poison(0, kind, IDS)
    pools.load([Arrival(is_within=False, moves=[Move(kind, OTHERS, IDS) for kind in KINDS])])


def coded(values, form):
    return wide_of(coded_of(values, Format[form]), values.shape[1:], Format[form])


@pytest.mark.parametrize(
    ("form", "plane"),
    [*((form, REFERENCE) for form in FORMS), ("int8", interpreted()), ("fp4", interpreted())],
)
def test_pages_and_states_come_back_rounded_by_their_code_and_taps_unchanged(form, plane):
    pools = filled(host_format=form, storage_format=form, plane=plane)
    wanted = [each.clone() for each in device_tensors(pools)]
    there_and_back(pools)
    for each in wanted:
        if each.dim() > 4:  # pages: [..., page, token, head, dim]
            pages = each[:, :, IDS]
            each[:, :, IDS] = coded(pages.flatten(0, 2), form).view(pages.shape)
        elif not any(each.shape == taps.shape for taps in pools.ranks[0].taps):
            each[IDS] = coded(each[IDS], form)
    assert all(map(torch.equal, device_tensors(pools), wanted))
    there_and_back(pools)  # moves add no error
    assert all(map(torch.equal, device_tensors(pools), wanted))


@pytest.mark.parametrize("form", FORMS)
def test_a_plain_host_stores_the_same_coded_bytes_as_a_coded_host(form):
    plain, coded_host = (filled(host_format=host, storage_format=form) for host in ("plain", form))
    for pools in (plain, coded_host):
        there_and_back(pools)
    for ours, theirs in zip(plain.ranks, coded_host.ranks, strict=True):
        assert ours.layout == theirs.layout
        for kind in KINDS:
            stored, checksum = ours.stored.packed(kind, ours.payload(kind, 2))
            assert bytes(stored) == bytes(theirs.payload(kind, 2))
            assert [checksum] == theirs.sums([(kind, 2)])
            assert ours.stored.page_bytes(kind) == len(stored) < len(ours.payload(kind, 2))
            landing = ours.landing(kind, 2)
            landing[:] = stored
            assert ours.landed([(kind, 1)], [landing]) == [checksum]
            again, _ = ours.stored.packed(kind, ours.payload(kind, 1))
            assert bytes(again) == bytes(stored)


def test_pages_of_each_storage_format_have_their_own_layout():
    layouts = [filled(storage_format=form).ranks[0].layout for form in ("plain", *FORMS)]
    assert len(set(layouts)) == 5


def test_coded_pages_cause_the_same_logit_error_on_kernels_and_on_torch():
    other = run_mix(3, form="int8", plane=REFERENCE, most=2).verdict
    with kernels_only() as mode:
        mix = run_mix(3, form="int8", plane=interpreted().wrapped(mode.paused()), most=2)
    assert mix.seen["storage hit"]
    one = mix.verdict
    assert one.num_equal == other.num_equal < one.num_checked  # a request was given coded pages
    assert one.error == pytest.approx(other.error, rel=0.01)
    assert 0 < one.error < 0.1


def test_the_host_computes_the_same_checksums_of_stored_pages_as_the_kernel():
    pools = filled(tp=1)
    rank = pools.ranks[0]
    pools.save([Move(FULL, IDS, IDS), Move(MAMBA, IDS, IDS)])
    items = [(FULL, 3), (MAMBA, 1), (FULL, 1), (MAMBA, 3)]
    saved = rank.sums(items)
    assert len(set(saved)) == 4
    for sums in rank._sums.values():
        sums.zero_()
    assert rank.new_sums(items) == rank.sums(items) == saved
    rank.host[FULL][3, 5] ^= 1
    assert rank.new_sums(items[:2]) == [rank.sums(items)[0], saved[1]]
    assert rank.sums(items)[0] != saved[0]


@pytest.mark.parametrize("link_programs", [None, 3])
def test_a_load_back_launches_as_many_programs_as_the_profile_says(link_programs):
    launched = []

    def seen(copy):
        def launch(*arguments, num_programs=None):
            launched.append(num_programs)
            return copy(*arguments, num_programs=num_programs)

        return launch

    pools = filled(tp=1, link_programs=link_programs, plane=Plane(*map(seen, REFERENCE)))
    one, two = IDS[:1], OTHERS[:1]
    within = Arrival(is_within=True, moves=[Move(MAMBA, one, two)])
    pools.save([Move(FULL, one, two)])
    pools.load([Arrival(is_within=False, moves=[Move(FULL, two, one)]), within])
    pools.copy_states(two, one)
    assert launched == [None, link_programs, None, None]  # others: the kernel's choice

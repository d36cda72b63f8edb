"""A step queues all its work before it waits for the GPU."""

import warnings

import numpy as np
import pytest
import torch

from experiments.gpu.steps import PAGE, decodes, runner_of, shape_of
from hicache.executor.real import reference_model
from hicache.executor.real.plane import TRITON
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import PoolSpec
from hicache.executor.real.reference_model import ReferenceModel
from tests.executor.one_sequence import OneSequence

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_size", [16, 32])
def test_more_ranks_than_kv_heads_give_the_same_logits(page_size, monkeypatch):
    monkeypatch.setattr(reference_model, "TOGETHER", 2)
    model = ReferenceModel(shape_of("F", 1), page_size=page_size, device="cuda")
    assert model.config.num_kv_heads == 2
    tokens, logits = np.arange(40, dtype=np.int32).tobytes(), []
    for tp in (1, 4):
        spec = PoolSpec(
            model=model.config,
            page_size=page_size,
            device_counts=(3, 0, 0),
            host_counts=(1, 0, 0),
            device=model.device,
            tp=tp,
            plane=TRITON,
        )
        its = OneSequence(model, TorchPools(spec), tokens, [[2, 0, 1]])
        logits.append(its.in_cuts([39, 40]))
    assert torch.equal(*logits)


def test_no_layer_of_a_step_waits_for_the_gpu(monkeypatch):
    monkeypatch.setattr(reference_model, "TOGETHER", 2)  # an interpreter pays for each tile
    model = ReferenceModel(shape_of("F S M D", 4), page_size=PAGE, device="cuda")
    runner = runner_of(model, 3)
    runner.warm_up()
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        runner._forward(decodes(3))
    finally:
        torch.cuda.set_sync_debug_mode("default")

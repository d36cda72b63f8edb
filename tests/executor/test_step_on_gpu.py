"""A step queues all its work before it waits for the GPU."""

import warnings

import pytest
import torch

from experiments.gpu.steps import PAGE, decodes, runner_of, shape_of
from hicache.executor.real import reference_model
from hicache.executor.real.reference_model import ReferenceModel

pytestmark = pytest.mark.gpu


def test_no_layer_of_a_step_waits_for_the_gpu(monkeypatch):
    monkeypatch.setattr(reference_model, "TOGETHER", 2)  # an interpreter pays for each tile
    model = ReferenceModel(shape_of("F S M D", 4), page_size=PAGE, device="cuda")
    runner = runner_of(model, 3)
    runner.compute(decodes(3))  # compiles
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        runner._forward(decodes(3))
    finally:
        torch.cuda.set_sync_debug_mode("default")

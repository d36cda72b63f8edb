"""Copies on CUDA streams begin behind the work that was queued before them."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hicache.executor.real.copy_streams import CudaStream


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a stand-in for CUDA was asked to do, in order."""
    calls: list[str] = []

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            self.name = {-1: "urgent", 0: "side"}[priority]

        def wait_stream(self, other: "Stream") -> None:
            calls.append(f"{self.name} waits for {other.name}")

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.is_timed = enable_timing

        def record(self, stream: Stream) -> None:
            calls.append(f"event on {stream.name}")

    @contextmanager
    def on(stream: Stream) -> Any:
        calls.append(f"on {stream.name}")
        yield

    compute = Stream()
    compute.name = "compute"
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "current_stream": lambda device: compute,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls


@pytest.mark.parametrize("name", ["urgent", "side"])
def test_a_copy_begins_behind_what_the_step_has_queued(name: str, queued: list[str]) -> None:
    stream = CudaStream(torch.device("cuda", 0), is_urgent=name == "urgent")
    stream.run(lambda: queued.append("copy"))
    wait, *rest = queued
    assert wait == f"{name} waits for compute"
    assert rest == [f"on {name}", f"event on {name}", "copy", f"event on {name}"]

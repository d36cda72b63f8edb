"""Copies on CUDA streams begin behind the work that was queued before them."""

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hicache.executor.real.copy_streams import CudaStream, ThreadStream


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


def test_a_layer_is_ready_while_later_layers_are_on_their_way() -> None:
    landed, goes_on = torch.zeros(2, 2, dtype=torch.int32), threading.Event()

    def copy() -> None:
        landed[0, 1] += 1
        goes_on.wait()
        landed[1, 1] += 1

    stream = ThreadStream("load")
    event = stream.run(copy)
    event.wait_for_layer(landed, 0, 1)
    assert not event.is_done()
    goes_on.set()
    event.wait_for_layer(landed, 1, 1)
    assert landed.tolist() == [[0, 1], [0, 1]]
    stream.close()


def test_a_copy_that_fails_fails_the_layer_that_waits_for_it() -> None:
    stream = ThreadStream("load")
    event = stream.run(lambda: (_ for _ in ()).throw(ValueError("no such page")))
    with pytest.raises(ValueError, match="no such page"):
        event.wait_for_layer(torch.zeros(1, 2, dtype=torch.int32), 0, 1)
    stream.close()

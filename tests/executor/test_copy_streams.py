"""Copies on CUDA streams start after the work that was queued before them."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hicache.executor.real.copy_streams import CudaStream, ThreadStream


@pytest.mark.parametrize(("is_urgent", "name"), [(True, "urgent"), (False, "side")])
def test_a_copy_starts_after_the_work_that_the_step_has_queued(is_urgent, name, monkeypatch):
    calls = []

    class Stream:
        def __init__(self, device, priority=0):
            self.name = "urgent" if priority else "side"

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            calls.append(f"event on {stream.name}")

    @contextmanager
    def on(stream):
        calls.append(f"on {stream.name}")
        yield

    compute = SimpleNamespace(name="compute")
    cuda = {"Stream": Stream, "Event": Event, "stream": on, "current_stream": lambda _: compute}
    for attribute, value in cuda.items():
        monkeypatch.setattr(torch.cuda, attribute, value)
    stream = CudaStream(torch.device("cuda", 0), is_urgent=is_urgent)
    stream.run(lambda: calls.append("copy"))
    event = f"event on {name}"
    assert calls == [f"{name} waits for compute", f"on {name}", event, "copy", event]


def test_a_layer_is_ready_while_later_layers_are_still_being_copied() -> None:
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


def test_an_error_of_a_copy_is_raised_where_a_layer_waits_for_it() -> None:
    stream = ThreadStream("load")
    event = stream.run(lambda: (_ for _ in ()).throw(ValueError("no such page")))
    with pytest.raises(ValueError, match="no such page"):
        event.wait_for_layer(torch.zeros(1, 2, dtype=torch.int32), 0, 1)
    stream.close()

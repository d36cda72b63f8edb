"""A pytest plugin that imitates a GPU, so that code for a GPU runs without one.

    python -m pytest -p tests.imitated_gpu -m "gpu and not soak" tests/kernels

All tensors stay in host memory; the plugin records which storages are on the device, and which
are pinned. It refuses what a GPU refuses: operations on tensors of both sides, numpy and
generators of the other side, kernels that would read host memory that is not pinned. Kernels are
interpreted. The plugin counts launches and waits of the host for the device: a synchronization, a
number read from the device, a copy that is blocking or whose host memory is not pinned. After
`torch.cuda.set_sync_debug_mode("error")` it refuses waits.

Streams run their work at once or, if `Stream.are_late`, all but the default one launch kernels as
late as is allowed: when another stream or the host waits for them, or an operation of torch
follows on the same stream. Times between events are made up.
"""

import os
import threading
from collections import Counter, deque
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import WeakSet

os.environ["TRITON_INTERPRET"] = "1"  # read when a module with kernels is imported

import torch
import torch._dynamo  # whatever asks for an annotated class of torch does so before it is replaced
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

from hicache.workbench.bench import copy_engine
from tests.kernels.test_copy_engine import HostDriver

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
WAITING = "_wait_kernel"  # spins until a copy on another stream has landed
MOVES = {"to": None, "cpu": HOST, "pin_memory": HOST, "cuda": GPU}
CROSSING = {"copy_", "__getitem__", "__setitem__"}  # take tensors of both sides
# the host waits for what they return
READS = {"item", "tolist", "nonzero", "equal", "masked_select", "unique", "allclose"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "__contains__"}
MADE_OF_DATA = {"tensor", "as_tensor", "asarray"}
# look at no element
SHAPES = {"__get__", "__len__", "size", "stride", "dim", "numel", "data_ptr", "untyped_storage"}
SHAPES |= {"is_pinned", "is_contiguous", "element_size", "storage_offset"}


class Storages(WeakSet):
    """Storages of tensors with something in common, for as long as they live."""

    def add(self, tensor: Tensor) -> None:
        super().add(tensor.untyped_storage())

    def __contains__(self, tensor: Tensor) -> bool:
        return super().__contains__(tensor.untyped_storage())


ON_GPU, PINNED = Storages(), Storages()
LAUNCHES: Counter[str] = Counter()  # by kernel
WAITS: Counter[str] = Counter()  # by what the host called


class Generator(torch.Generator):
    """A generator that draws on the host and records for which device it was made."""

    def __new__(cls, device: Any = HOST) -> "Generator":
        made = super().__new__(cls, HOST)
        made.place = torch.device(device).type
        return made


class ImitatedGpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        for kind in set(types) - {Tensor, torch.nn.Parameter}:  # has a way of its own
            with self:
                return kind.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            return _called(func, args, dict(kwargs or {}))


def _called(func, args, kwargs):
    name, getter = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    if getter is Tensor.device or getter is Tensor.is_cuda:
        is_on = args[0] in ON_GPU
        return is_on if getter is Tensor.is_cuda else GPU if is_on else HOST
    if name == "is_pinned":
        return _is_pinned(args[0])
    if name in SHAPES:  # a view has the storage of its tensor, and so its side
        return func(*args, **kwargs)
    _current_stream().run()
    if _waits(name, args, kwargs):
        wait(name)
    if name in MOVES:
        return _moved(args[0], name, args[1:], kwargs)
    if "device" in kwargs:
        is_on = torch.device(kwargs["device"] or HOST).type == "cuda"
        kwargs["device"] = HOST
    else:
        is_on = _side(name, args, kwargs)
    if is_on and name in ("numpy", "__array__"):
        raise TypeError("a tensor of the device is no numpy array")
    generator = kwargs.get("generator")
    place = getattr(generator, "place", "cpu")
    if generator is not None and (place == "cuda") != is_on:
        raise RuntimeError(f"{name}: the generator is one of the {place}")
    is_pinned = kwargs.pop("pin_memory", False)
    result = func(*args, **kwargs)
    for tensor in _tensors(result) if is_on or is_pinned else ():
        (ON_GPU if is_on else PINNED).add(tensor)
    return result


def wait(what):
    """Count a wait of the host for the device; refuse it if waits are to be errors."""
    WAITS[what] += 1
    if Runtime.refuses_waits:
        raise RuntimeError(f"{what}: the host would wait for the device")


def _waits(name, args, kwargs):
    if name in READS:
        return any(each in ON_GPU for each in _tensors([args, kwargs]))
    if name in MADE_OF_DATA:
        return torch.device(kwargs.get("device") or HOST).type == "cuda"
    if name in ("__getitem__", "__setitem__") and args[0] in ON_GPU:
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        # a mask is counted, and indices in host memory are sent
        return any(isinstance(each, list) for each in indices) or any(
            each.dtype == torch.bool or (each.dim() and each not in ON_GPU)
            for each in _tensors(indices)
        )
    if name == "copy_":
        return _is_blocking(args[1], args[0], True in args[2:] or kwargs.get("non_blocking"))
    return False


def _is_blocking(source, target, non_blocking):
    sides = [each in ON_GPU for each in (source, target)]
    host = target if sides[0] else source
    return sides[0] != sides[1] and not (non_blocking and _is_pinned(host))


def _side(name, args, kwargs):
    """True if an operation takes place on the device."""
    if name in CROSSING:
        is_on = args[0] in ON_GPU
        if name != "copy_" and not is_on and any(each in ON_GPU for each in _tensors(args[1])):
            raise RuntimeError("a tensor of the host cannot be indexed by one of the device")
        return is_on
    tensors = _tensors([args, kwargs])
    sides = {each in ON_GPU for each in tensors if each.dim()}  # numbers go anywhere
    if len(sides) == 2:
        raise RuntimeError(f"{name}: all tensors must be on the same device")
    return True in (sides or {each in ON_GPU for each in tensors})


def _moved(tensor, name, args, kwargs):
    given = (*args, *kwargs.values())
    wanted = [torch.device(each) for each in given if isinstance(each, str | torch.device)]
    wanted.append(MOVES[name] or (GPU if tensor in ON_GPU else HOST))
    is_on = wanted[0].type == "cuda"
    if name == "pin_memory" or is_on != (tensor in ON_GPU):
        may_wait = name != "pin_memory" and not (kwargs.get("non_blocking") and _is_pinned(tensor))
        if may_wait:
            wait(name)
        tensor = tensor.clone()
        if is_on or name == "pin_memory":
            (ON_GPU if is_on else PINNED).add(tensor)
    dtypes = [each for each in given if isinstance(each, torch.dtype)]
    if dtypes and dtypes[0] != tensor.dtype:
        tensor = tensor.to(dtypes[0])
        if is_on:
            ON_GPU.add(tensor)
    return tensor


def _is_pinned(tensor):
    with torch._C.DisableTorchFunction():
        address = tensor.data_ptr()
    return tensor in PINNED or any(address in each for each in Runtime.registered.values())


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for each in value for tensor in _tensors(each)]


# -- torch.cuda ----------------------------------------------------------------------------------


class Stream:
    """A stream that runs its work at once or, if `are_late`, as late as is allowed."""

    are_late: ClassVar = False
    every: ClassVar = WeakSet()

    def __init__(self, device=None, priority=0, handle=7):
        self.cuda_stream = handle
        self._queue, self.num_queued = deque(), 0
        Stream.every.add(self)

    def submit(self, action):
        self._queue.append(action)
        self.num_queued += 1
        if self is _default or not Stream.are_late:
            self.run()

    def run(self, number=None):
        """Run all work, or until the first `number` of all that were ever queued have run."""
        while self._queue and (number is None or not self.has_run(number)):
            self._queue.popleft()()

    def has_run(self, number):
        return self.num_queued - len(self._queue) >= number

    def wait_event(self, event):
        self.submit(event.happen)

    def wait_stream(self, stream):
        self.submit(partial(stream.run, stream.num_queued))

    def synchronize(self):
        wait("Stream.synchronize")
        self.run()


class Event:
    """An event happens when its stream has run earlier work, one second after the event before it.

    A late stream runs that work only after a query.
    """

    num_recorded = 0

    def __init__(self, *, enable_timing=False):
        self._is_timed = enable_timing
        self._stream, self._number = _default, 0

    def record(self, stream=None):
        Event.num_recorded += 1
        self.second = Event.num_recorded
        self._stream = stream or _current_stream()
        self._number = self._stream.num_queued

    def happen(self):
        self._stream.run(self._number)

    def query(self):
        has_happened = self._stream.has_run(self._number)
        self.happen()
        return has_happened

    def synchronize(self):
        wait("Event.synchronize")
        self.happen()

    def elapsed_time(self, other):
        for event in (self, other):
            assert event._is_timed, "an event that was not asked to be timed"
        return (other.second - self.second) * 1e3


class Graph:
    """A CUDA graph: launches that are recorded in a capture and made by each replay."""

    def __init__(self):
        self.launches = []

    def replay(self):
        for launch in self.launches:
            launch()


_default, _now = Stream(handle=0), threading.local()


def _synchronize(device=None):
    wait("torch.cuda.synchronize")
    for stream in list(Stream.every):
        stream.run()


def _current_stream(device=None):
    return getattr(_now, "stream", _default)


def _launched(self, *args, **kwargs):
    for tensor in _tensors(args):
        if tensor not in ON_GPU and not _is_pinned(tensor):
            raise ValueError("a kernel was given host memory that is not pinned")

    def launch():
        if self.fn.__name__ == WAITING:
            for stream in list(Stream.every):
                stream.run()
        with torch._C.DisableTorchFunction():
            _interpreted(self, *args, **kwargs)

    LAUNCHES[self.fn.__name__] += 1
    graph = getattr(_now, "graph", None)
    if graph is None:
        _current_stream().submit(launch)
    else:
        graph.launches.append(launch)


def _run_thread(self):
    with ImitatedGpu():
        _thread_run(self)


class Runtime:
    """Pins mapped memory and refuses waits, as the CUDA runtime does."""

    refuses_waits: ClassVar = False

    registered: ClassVar[dict[int, range]] = {}  # by address

    def cudaHostRegister(self, address, num_bytes, flags):
        self.registered[address] = range(address, address + num_bytes)
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


_interpreted, _thread_run = interpreter.GridExecutor.__call__, threading.Thread.run
interpreter.GridExecutor.__call__ = _launched
interpreter.InterpretedFunction.warmup = lambda self, *args, **kwargs: None
threading.Thread.run = _run_thread
copy_engine._driver = lambda: HostDriver("cuMemcpyBatchAsync_v2")
torch.Generator = Generator
torch.Tensor.record_stream = lambda self, stream: None
for _name, _value in {
    "is_available": lambda: True,
    "cudart": Runtime,
    "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
    "get_device_name": lambda device=None: "an imitated GPU",
    "synchronize": _synchronize,
    "set_sync_debug_mode": lambda mode: setattr(Runtime, "refuses_waits", mode == "error"),
    "device": lambda device: nullcontext(),
    "default_stream": lambda device=None: _default,
    "current_stream": _current_stream,
    "stream": lambda stream: patch.dict(vars(_now), stream=stream or _current_stream()),
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "graph": lambda graph: patch.dict(vars(_now), graph=graph),
    "_sleep": lambda cycles: None,
}.items():
    setattr(torch.cuda, _name, _value)
ImitatedGpu().__enter__()

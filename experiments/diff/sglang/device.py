"""Stand-ins for the GPU, installed on import, which must precede any import of SGLang.

Streams and events follow `clock.Clock`. Memory is never pinned. Byte copies are counted and not
made. Page keys, which the package computes in an extension compiled on first use, are computed
here with the same result.
"""

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from transformers.models.auto import auto_factory, configuration_auto

from experiments.diff.sglang.clock import Event


def _again(register: Callable[..., None]) -> Callable[..., None]:
    return lambda mapping, key, value, exist_ok=True: register(mapping, key, value, exist_ok=True)


warnings.filterwarnings("ignore")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "0")
# the package needs two torchvision operators that only its CUDA build defines
_LIBRARY = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    schema = f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
# releases register models that newer transformers already have
for _mapping in (configuration_auto._LazyConfigMapping, auto_factory._LazyAutoMapping):
    _mapping.register = _again(_mapping.register)
logging.disable(logging.WARNING)
torch.set_num_threads(1)
torch.Tensor.pin_memory = lambda self: self  # type: ignore[assignment, method-assign, misc]


DEVICE = SimpleNamespace(
    __name__="cpu",
    Event=Event,
    Stream=Event,
    current_stream=Event,
    default_stream=Event,
    stream=lambda _: nullcontext(),
    synchronize=lambda *_: None,
    current_device=lambda: "cpu",
    empty_cache=lambda: None,
    set_device=lambda *_: None,
)


def _replace(values: Mapping[str, object], *modules: str) -> None:
    for module in modules:
        there = import_module(f"sglang.srt.{module}")
        for name, value in values.items():
            setattr(there, name, value)


class PageKeys:
    """Computes SGLang's page hashes (a SHA-256 chain) in place of SGLang's compiled extension."""

    def get_hash(
        self,
        tokens: Sequence[int],
        count: int,
        width: int,
        is_bigram: bool,  # noqa: FBT001  # as the package calls it
        prior: bytes | None,
        page_size: int | None,
    ) -> str | list[str]:
        assert width == 1 + is_bigram
        ids = np.array(tokens[: count + is_bigram], "<u4")
        if is_bigram:  # each token with the next one
            ids = np.stack((ids[:-1], ids[1:]), axis=1)
        text = ids.tobytes()
        chain = prior or b""
        if page_size is None:
            return hashlib.sha256(chain + text).hexdigest()
        step = 4 * width * page_size
        keys = []
        for start in range(0, len(text), step):
            chain = hashlib.sha256(chain + text[start : start + step]).digest()
            keys.append(chain.hex())
        return keys


def count_copies(count: Callable[[object, str, int], None]) -> None:
    """Make SGLang call `count` in place of each copy between host and device.

    The arguments of `count` are the host pool, `back_up` or `load_back`, and the number of indices.
    """

    def counted(how: str) -> Callable[..., None]:
        return lambda pool, device_pool, host, *_, **__: count(pool, how, len(host))

    for pool in HOST_POOLS:
        pool.backup_from_device_all_layer = counted("back_up")
        pool.load_to_device_per_layer = counted("load_back")


_replace({"get_device_module": lambda: DEVICE}, "utils", "utils.common")
_replace({"device_module": DEVICE}, "managers.cache_controller", "mem_cache.l2_transfer")
_replace(
    dict.fromkeys(("_cuda_host_register", "_cuda_host_unregister"), lambda *_, **__: None),
    "mem_cache.pool_host.common",
)
_replace({"_load_native_hash_module": PageKeys}, "mem_cache.cpp_utils.native_hash")
# the package asks for 10 GB of free memory; the pools here take a few bytes per token
psutil.virtual_memory = lambda: SimpleNamespace(available=1 << 60)
_replace({"available_host_memory_bytes": lambda **_: 1 << 60}, "mem_cache.pool_host.base")

from sglang.srt.mem_cache.pool_host.base import HostKVCache  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402

HOST_POOLS = (HostKVCache, MHATokenToKVPoolHost, MambaPoolHost)
for _pool in HOST_POOLS:
    _pool.pin_memory = property(lambda _: False, lambda *_: None)

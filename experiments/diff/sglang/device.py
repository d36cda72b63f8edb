"""Stand-ins for the GPU, installed on import, which must precede any import of SGLang.

Streams and events follow `clock.Clock`. Memory is never pinned. Byte copies are counted and not
made. Page keys, which the package computes in an extension compiled on first use, are computed
here with the same result.
"""

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
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


def stand_in() -> None:
    from sglang.srt import utils
    from sglang.srt.utils import common

    common.get_device_module = utils.get_device_module = lambda: DEVICE
    # names that a release may have, for the device or for pinning memory
    for module in ("managers.cache_controller", "mem_cache.l2_transfer"):
        _replace(module, {"device_module": DEVICE})
    # until 0.5.15 the controller reads the ranks here, later in the runtime's context
    alone = {}
    for parallel in ("tensor", "pipeline"):
        alone[f"get_{parallel}_model_parallel_rank"] = lambda: 0
        alone[f"get_{parallel}_model_parallel_world_size"] = lambda: 1
    _replace("managers.cache_controller", alone)
    registering = dict.fromkeys(
        ("_cuda_host_register", "_cuda_host_unregister"), lambda *_, **__: None
    )
    for module in ("mem_cache.pool_host.common", "mem_cache.memory_pool_host"):
        _replace(module, registering)
    _replace("mem_cache.cpp_utils.native_hash", {"_load_native_hash_module": PageKeys})
    for pool in host_pools():
        pool.pin_memory = property(lambda _: False, lambda *_: None)


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
        assert width == 1
        assert not is_bigram
        text = np.array(tokens[:count], "<u4").tobytes()
        chain = prior or b""
        if page_size is None:
            return hashlib.sha256(chain + text).hexdigest()
        step = 4 * page_size
        keys = []
        for start in range(0, len(text), step):
            chain = hashlib.sha256(chain + text[start : start + step]).digest()
            keys.append(chain.hex())
        return keys


def host_pools() -> Iterable[Any]:
    old = "memory_pool_host"
    yield first_of("pool_host.base:HostKVCache", f"{old}:HostKVCache")
    yield first_of("pool_host.mha:MHATokenToKVPoolHost", f"{old}:MHATokenToKVPoolHost")
    yield first_of("pool_host.mamba:MambaPoolHost", f"{old}:MambaPoolHost")


def first_of(*places: str) -> Any:
    for place in places:
        module, _, name = place.partition(":")
        with suppress(ImportError, AttributeError):
            return getattr(import_module(f"sglang.srt.mem_cache.{module}"), name)
    raise ImportError(f"this SGLang release has none of {', '.join(places)}")


def component_type() -> Any:
    return first_of(
        "unified_cache.component_type:ComponentType", "unified_cache_components:ComponentType"
    )


def count_copies(count: Callable[[object, str, int], None]) -> None:
    """Make SGLang call `count` in place of each copy between host and device.

    The arguments of `count` are the host pool, `back_up` or `load_back`, and the number of indices.
    """

    def counted(how: str) -> Callable[..., None]:
        return lambda pool, device_pool, host, *_, **__: count(pool, how, len(host))

    for pool in host_pools():
        pool.backup_from_device_all_layer = counted("back_up")
        pool.load_to_device_per_layer = counted("load_back")


def _replace(module: str, values: Mapping[str, object]) -> None:
    with suppress(ImportError):
        there = import_module(f"sglang.srt.{module}")
        for name, value in values.items():
            if hasattr(there, name):
                setattr(there, name, value)


stand_in()

"""Two policies that run in SGLang's cache and in this one; `test_engines.py` names them."""

from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from platformdirs import user_cache_path

from hicache.policies.adapters import FromSGLang, ToSGLang
from hicache.policies.eviction import Lfu
from hicache.policies.world import World

RELEASE = user_cache_path("hicache") / "diff" / "sglang" / "0.5.23"


class OurLfu(ToSGLang):
    def __init__(self) -> None:
        super().__init__(Lfu())


def sglang_slru(world: World) -> FromSGLang:
    # loaded alone: importing the package needs its environment
    path = RELEASE / "sglang" / "srt" / "mem_cache" / "evict_policy.py"
    spec = spec_from_file_location("evict_policy", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    return FromSGLang(module.SLRUStrategy, world)

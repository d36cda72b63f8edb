import functools
import gc
import os
import pickle
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from operator import attrgetter

import pytest
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

from hicache.cache.tiers.transfer import FATES
from hicache.clock import SECOND_NS
from hicache.config import AgentsConfig, GeneratedConfig
from hicache.request import Request
from hicache.results.metrics import REQUIRED_MEASURES, RequestRecord, Row, Status
from hicache.results.recorder import TIER_TOKENS
from hicache.runs.schema import CONF
from hicache.workload import workload

HAS_GPU = shutil.which("nvidia-smi") is not None or "tests.imitated_gpu" in sys.modules

if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported
# read when torch is imported: tensors of tests are small, and its threads would only wait actively
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when a process imports numpy
# every full collection of garbage looks through all imported objects: a ninth of a run's time
gc.set_threshold(50_000, 20, 100)
KEPT = {str(CONF), "hydra.conf"}  # sources of settings that no test changes
DRAWN = ("builtin", "chat", "agents")
DRAWN_FROM = ("num_sessions", "session_rate", "think_cap_s")  # and a seed
DrawnFrom = namedtuple("DrawnFrom", (*DRAWN_FROM, "limit"), defaults=[None])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a GPU if there is none, and long tests unless `-m` names them."""
    asked = config.getoption("markexpr")
    unwanted = {mark for mark in ("soak",) if mark not in asked}
    if not HAS_GPU:
        unwanted.add("gpu")
    left_out = [item for item in items if any(item.get_closest_marker(m) for m in unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests an empty cache directory of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """Draw equal workloads once: a run of few requests would spend most of its time on that."""

    def once(generate: Callable[..., list[Request]]) -> Callable[..., list[Request]]:
        drawn = functools.lru_cache(maxsize=6)(generate)
        knobs_of = attrgetter(*DRAWN_FROM)

        def draw(config: GeneratedConfig, *, seed: int) -> list[Request]:
            if isinstance(config, AgentsConfig) and (config.structure or config.tools):
                return generate(config, seed=seed)
            # a generator that reads any other knob fails
            return drawn(DrawnFrom(*knobs_of(config)), seed=seed)

        return draw

    with pytest.MonkeyPatch.context() as patch:
        for kind in DRAWN:
            patch.setitem(workload.GENERATORS, kind, once(workload.GENERATORS[kind]))
        yield


def copied(node: DictConfig, memo: object) -> DictConfig:
    """Return a deep copy; its parent is that of the node."""
    parent, node.__dict__["_parent"] = node.__dict__["_parent"], None
    try:
        copy = pickle.loads(pickle.dumps(node))
    finally:
        node.__dict__["_parent"] = parent
    copy.__dict__["_parent"] = parent
    return copy


def keep_parsed(replace: Callable[[type, str, object], None]) -> None:
    """Parse the files of Hydra and of conf/ once, and copy settings by pickling them.

    Composing spends half of its time on both.
    """
    replace(DictConfig, "__deepcopy__", copied)
    parsed: dict[tuple[str, str], bytes] = {}
    Plugins.instance()  # imports the modules of the sources anew

    def once(load: Callable[..., ConfigResult]) -> Callable[..., ConfigResult]:
        def from_memory(self: ConfigSource, config_path: str) -> ConfigResult:
            if self.path not in KEPT:  # a folder of a test, whose files may change
                return load(self, config_path)
            key = self.path, config_path
            if key not in parsed:
                parsed[key] = pickle.dumps(load(self, config_path))
            return pickle.loads(parsed[key])

        return from_memory

    sources = SourcesRegistry.instance().types
    for name in ("file", "pkg"):
        replace(sources[name], "load_config", once(sources[name].load_config))


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        keep_parsed(patch.setattr)
        yield


def finished_request(number: int, **changes: object) -> RequestRecord:
    """A request whose tokens and times add up, unless `changes` break that."""
    arrival_ns = number * SECOND_NS
    values = {
        "id": number,
        "session_id": number // 2,
        "status": Status.finished,
        "arrival_ns": arrival_ns,
        "first_token_ns": arrival_ns + 100 + 20 + 3 + 400,
        "finish_ns": arrival_ns + 523 + 9 * 50,
        "prompt_len": 1000,
        "output_len": 10,
        "device_hit_len": 400,
        "host_hit_len": 200,
        "storage_hit_len": 100,
        "computed_len": 300,
        "queue_ns": 100,
        "storage_wait_ns": 20,
        "load_back_ns": 3,
        "prefill_ns": 400,
    }
    return RequestRecord(**{**values, **changes})


@pytest.fixture
def make_record() -> Callable[..., RequestRecord]:
    return finished_request


@pytest.fixture
def measures() -> dict[str, float]:
    """Every required measure with a different value; the fates of pages add up."""
    numbers = {key: float(index) for index, key in enumerate(REQUIRED_MEASURES)}
    return numbers | {
        "prefetch/read_pages": sum(numbers[f"prefetch/{fate}_pages"] for fate in FATES)
    }


def row_at(time_s: float, **tokens: float) -> dict[str, float]:
    """A row of an interval with hits and computed tokens only."""
    counts = dict.fromkeys(TIER_TOKENS, 0.0) | tokens
    return {
        "time_s": time_s,
        **{f"interval/{name}_tokens": count for name, count in counts.items()},
        "interval/finished_count": 0,
        "queue/waiting_count": 0,
        "queue/running_count": 0,
    }


@pytest.fixture
def rows() -> list[Row]:
    return [
        row_at(10.0 * (i + 1), device_hit=100 * i, host_hit=50, storage_hit=20, computed=300)
        | {"queue/waiting_count": i, "pool/full_device_used_share": 0.5}
        for i in range(5)
    ]

"""One prefill and one decode engine on real memory: pages and states move between their pools."""

import pytest

from hicache import experiment
from hicache.executor.real.pools import TorchPools
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload
from tests.scheduler.world import request_of

WORDS = (
    *("executor=torch", "model=tiny_hybrid", "workload=chat", "workload.arrivals=causal"),
    *("executor.verify=true", "engine.check_invariants=true", "storage=none", "cache.page_size=16"),
    *("cache.device.tokens.full=640", "cache.device.tokens.swa=640", "cache.device.states=16"),
    *("cache.host_gib=0", "scheduler.chunk_tokens=64", "compat.rules.decode_reserved_tokens=16"),
    *("parallel.prefill=1", "parallel.decode=1", "parallel.decode_cache=device"),
)


def measures_of(*words):
    prompt = list(range(1, 101))
    turns = [(prompt, list(range(101, 141))), ([*prompt, *range(101, 150)], [1, 2, 3])]
    # the second is sent when the first has its answer, however long that takes
    requests = [request_of(0, *turns[0]), request_of(1, *turns[1], session_id=0, parent_id=0)]
    config = config_of(*WORDS, *words)
    return experiment.run(config, workload=Workload(name="own", requests=requests)).measures


FULL = ("model.pattern=F", "model.num_layers=2", "model.num_full_layers=2", "model.window_len=0")
FULL += ("model.num_swa_layers=0", "model.num_mamba_layers=0")


@pytest.mark.parametrize("words", [(), FULL])
def test_logits_equal_those_of_one_engine_without_a_cache(words):
    measures = measures_of(*words)
    assert (measures["verify/checked_count"], measures["verify/unequal_count"]) == (2, 0)
    assert measures["decode/device_reused_tokens"] > 0


def test_kv_that_does_not_arrive_makes_logits_unequal(monkeypatch):
    monkeypatch.setattr(TorchPools, "receive", lambda self, source, moves: None)
    assert measures_of()["verify/unequal_count"] == 2

"""Runs of transformers models on three tiers, with hits of every kind from every tier."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

from hicache import experiment
from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import LoadBack
from hicache.config import ExperimentConfig
from hicache.executor.real.io import TorchIo
from hicache.executor.real.model_runner import ModelRunner
from hicache.results.metrics import Result
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload
from tests.scheduler.world import request_of

FOLDER = Path(__file__).parents[2] / "examples" / "hugging_face"
KINDS = {
    "llama": {FULL},
    "deepseek_v3": {FULL},
    "gemma3": {FULL, SWA},
    "gpt_oss": {FULL, SWA},
    "qwen3_next": {FULL, MAMBA},
    "falcon_h1": {FULL, MAMBA},
}
PAGE, DOCUMENTS, ANSWER = 8, 8, 4
BASE = (
    *("executor=torch", "executor.device=cpu", "executor.model=hf", "executor.verify=true"),
    *("workload.arrivals=closed", "workload.concurrency=2"),
    *(f"cache.page_size={PAGE}", "engine.check_invariants=true"),
    *("prefetch.threshold=8", "prefetch.stop=wait_complete", "tracker.wandb_mode=disabled"),
)


def documents(num_requests: int) -> Workload:
    """Requests about a few documents; each second one continues the last answer about its own."""
    rng = Random(1)
    texts = [[rng.randrange(256) for _ in range(44)] for _ in range(DOCUMENTS)]
    requests = []
    for number in range(num_requests):
        place = rng.randrange(DOCUMENTS)
        question, answer = ([rng.randrange(256) for _ in range(count)] for count in (7, ANSWER))
        prompt = texts[place] + question
        requests.append(request_of(number, prompt, answer))
        texts[place] = prompt + answer if len(prompt) < 60 else texts[place]
    return Workload(name="documents", requests=requests)


def config(family: str, *overrides: str) -> ExperimentConfig:
    """The config of a verified run of `family`, whose pools hold only a part of the documents."""
    sizes = {"device": "full:200", "host": "full:320"}
    if SWA in KINDS[family]:
        sizes = {"device": "full:200,swa:120", "host": "full:320,swa:200"}
    return config_of(
        *BASE,
        f"model.from_hf={FOLDER / family}",
        *(f"cache.{tier}.tokens={{{tokens}}}" for tier, tokens in sizes.items()),
        *(["cache.device.states=10", "cache.host.states=12"] if MAMBA in KINDS[family] else []),
        *overrides,
    )


def run(family: str, *overrides: str, num_requests: int = 40) -> Result:
    return experiment.run(config(family, *overrides), workload=documents(num_requests))


@contextmanager
def arrivals() -> Iterator[Counter[tuple[str, int]]]:
    """Count the pages and slots that are loaded, by source (host or storage) and kind."""
    seen: Counter[tuple[str, int]] = Counter()
    submit, load = ModelRunner.submit, TorchIo._load

    def submitting(self, work):
        if isinstance(work, LoadBack):
            seen.update({("host", kind): count for kind, count in work.counts.items()})
        submit(self, work)

    def loading(self, engine, keys, items):
        found = load(self, engine, keys, items)
        seen.update(("storage", kind) for kind, _ in items[:found])
        return found

    with patch.object(ModelRunner, "submit", submitting), patch.object(TorchIo, "_load", loading):
        yield seen

"""Speculation on real memory: the KV of the draft moves with that of the model."""

from pathlib import Path

import pytest

from hicache.experiment import run
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of

FULL = (
    *("model.pattern=F", "model.num_layers=2", "model.num_full_layers=2", "model.window_len=0"),
    *("model.num_swa_layers=0", "model.num_mamba_layers=0"),
)


@pytest.mark.parametrize(
    ("key", "shape"), [("bigram", FULL), ("drop_block", FULL), ("drop_block", ())]
)
def test_logits_do_not_depend_on_the_cache(key: str, shape: tuple[str, ...]) -> None:
    config = config_of(
        *("executor=torch", "executor.verify=true", "model=tiny_hybrid", "workload=agents"),
        *("workload.limit=12", "storage=memory", "tracker.wandb_mode=disabled", *shape),
        *("speculation.drafts=3", f"speculation.key={key}", "speculation.acceptance=0.8"),
    )
    result = run(config)
    summary = summarize(result.records, result.measures)
    assert summary["verify/checked_count"] == 12
    assert summary["verify/unequal_count"] == 0
    assert summary["cache/device_hit_tokens"] > 0
    assert summary["speculation/tokens_per_step"] > 1.5


def test_pages_stored_under_one_key_rule_are_not_hit_under_another(tmp_path: Path) -> None:
    # replicas with different rules share one directory
    def storage_hits(key: str) -> float:
        config = config_of(
            *("executor=torch", "model=tiny_hybrid", "workload=agents", "workload.limit=6", *FULL),
            *("storage=file", f"storage.root={tmp_path}", "tracker.wandb_mode=disabled"),
            *("speculation.drafts=3", f"speculation.key={key}", "prefetch.stop=wait_complete"),
        )
        result = run(config)
        return summarize(result.records, result.measures)["cache/storage_hit_tokens"]

    assert [storage_hits(key) for key in ("bigram", "token")] == [0, 0]
    assert all(storage_hits(key) > 0 for key in ("bigram", "token"))

"""What speculative decoding gains and costs in a run, in one sentence."""

from collections.abc import Mapping

from hicache.cache.prefix_cache import HIT_TIERS
from hicache.config import ExperimentConfig
from hicache.scheduler.drafts import expected_tokens

COUNTS = ("dropped_tokens", "draft_cold_tokens", "verified_count", "gained_tokens")
KEYS = (*COUNTS, "tokens_per_step")


def speculation_measures(counters: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a run with speculation, from its counters."""
    counts = {f"speculation/{name}": counters.get(f"speculation/{name}", 0) for name in COUNTS}
    steps = counts["speculation/verified_count"]
    gained = counts["speculation/gained_tokens"]
    return counts | {"speculation/tokens_per_step": gained / steps if steps else 0.0}


def measures_of(summary: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of speculation in a summary, by name; empty without speculation."""
    keys = {name: f"speculation/{name}" for name in KEYS if name not in COUNTS[2:]}
    return {name: summary[key] for name, key in keys.items() if key in summary}


def expectation(config: ExperimentConfig) -> str:
    """Return how many tokens a decode step is expected to gain, and by which settings."""
    speculation = config.speculation
    warm, cold = (
        expected_tokens(rate, speculation.drafts)
        for rate in (speculation.acceptance, speculation.cold_acceptance)
    )
    return (
        f"speculation: {speculation.drafts} drafts by {speculation.layers} layers, "
        f"keys {config.draft_key}, draft KV {speculation.draft_kv}; a decode step is expected to "
        f"gain {warm:.2f} tokens, {cold:.2f} where the draft has no KV (both are settings)"
    )


def outcome(summary: Mapping[str, float]) -> str | None:
    """Return what a run measured, or None if it had no speculation."""
    told = measures_of(summary)
    if not told:
        return None
    hits = sum(summary.get(f"cache/{tier}_hit_tokens", 0) for tier in HIT_TIERS)
    cold = told["draft_cold_tokens"]
    return (
        f"{told['tokens_per_step']:.2f} tokens gained per request and decode step; "
        f"{cold:,} hit tokens draft cold ({cold / hits if hits else 0:.1%}); "
        f"{told['dropped_tokens']:,} cached tokens dropped for the draft"
    )

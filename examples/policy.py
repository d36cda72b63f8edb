"""Evicts first what was never hit, and compares that with LRU. python examples/policy.py"""

from hicache.experiment import run
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of


class NeverHitFirst:
    def rank(self, entry, tier, kind):
        return entry.hits > 0, entry.used


if __name__ == "__main__":
    small = ("model=llama3_8b", "workload=agents", "workload.limit=100", "cache.host_gib=8")
    for policy in ("lru", f"__main__:{NeverHitFirst.__name__}"):
        result = run(config_of(*small, "cache.device_gib=8", f"cache.policy={policy}"))
        rate = summarize(result.records, result.measures)["cache/token_hit_rate"]
        print(f"{policy}: token hit rate {rate:.3f}")

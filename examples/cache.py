"""Where do prompt tokens come from as the host grows? python examples/cache.py"""

from hicache.experiment import run
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of

for host_gib in (8, 64):
    result = run(config_of("model=llama3_8b", "workload.limit=200", f"cache.host_gib={host_gib}"))
    summary = summarize(result.records, result.measures)
    print(f"host of {host_gib} GiB: token hit rate {summary['cache/token_hit_rate']:.3f}")

"""Is it faster to serve the shortest prompt first? python examples/scheduler.py"""

from hicache.experiment import run
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of

for order in ("fcfs", "shortest_remaining", "longest_prefix"):
    result = run(
        config_of("workload.limit=200", "workload.time_scale=0.3", f"scheduler.order={order}")
    )
    summary = summarize(result.records, result.measures)
    print(f"{order}: mean TTFT {summary['request/ttft_s_mean']:.2f} s")

"""The highest request rate at which a joint objective still holds: a bisection over sessions.

python -m experiments.studies.max_rate workload=mooncake_conversation workload.limit=2000
python -m experiments.studies.max_rate --ttft-s 1 --tpot-s 0.03 prefetch.stop=best_effort

A request meets the objective if its first token and its mean time per output token are both in
time; the rate counts if `--share` of all requests do. Load is changed by sampling sessions, not by
stretching time, so what is found lies between nothing and the trace's own rate; more devices or
replicas make room above it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.launch.schema import config_of
from hicache import experiment
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.results.metrics import RequestRecord, Status, summarize
from hicache.results.verdict import in_short, objections
from hicache.workload.build import Workload, load_workload, sample_sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is promised, in seconds, to which share of requests."""

    ttft_s: float
    tpot_s: float
    share: float

    def is_met_by(self, record: RequestRecord) -> bool:
        """Whether one request was served as promised."""
        ttft_ns = record.ttft_ns
        if record.status is not Status.finished or ttft_ns is None or record.finish_ns is None:
            return False
        assert record.first_token_ns is not None
        later = record.output_len - 1
        tpot_ns = (record.finish_ns - record.first_token_ns) / later if later else 0.0
        return ttft_ns <= self.ttft_s * SECOND_NS and tpot_ns <= self.tpot_s * SECOND_NS

    def met_share(self, records: Sequence[RequestRecord]) -> float:
        """Share of requests served as promised."""
        return sum(map(self.is_met_by, records)) / max(len(records), 1)


def bisect(holds: Callable[[float], bool], *, tolerance: float) -> float:
    """The largest share of sessions in [0, 1], within `tolerance`, for which `holds` is true.

    `holds` must be true up to some share and false above it.
    """
    if holds(1.0):
        return 1.0
    low, high = 0.0, 1.0
    while high - low > tolerance:
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def request_rate(workload: Workload) -> float:
    """Requests a second over the span in which sessions begin."""
    arrivals = [request.arrival_ns for request in workload.requests]
    return len(arrivals) / max((max(arrivals) - min(arrivals)) / SECOND_NS, 1.0)


def max_rate(
    config: ExperimentConfig,
    objective: Objective,
    *,
    tolerance: float,
    told: Callable[[str], None] = lambda _: None,
) -> tuple[float, float]:
    """The highest rate that keeps the objective, and the share of sessions that has it."""
    whole = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)

    def holds(share: float) -> bool:
        part = sample_sessions(whole, share, config.seed)
        result = experiment.run(config, workload=part)
        met = objective.met_share(result.records)
        verdict = in_short(objections([summarize(result.records, result.measures)]))
        told(f"{request_rate(part):8.3f} requests/s: {met:.3f} in time; {verdict}")
        return met >= objective.share

    share = bisect(holds, tolerance=tolerance)
    if share == 0.0:
        return 0.0, 0.0
    return request_rate(sample_sessions(whole, share, config.seed)), share


def main() -> None:
    """Find the rate of the config that the command line composes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ttft-s", type=float, default=2.0)
    parser.add_argument("--tpot-s", type=float, default=0.05)
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the share of sessions")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    config = config_of(*options.overrides)
    objective = Objective(ttft_s=options.ttft_s, tpot_s=options.tpot_s, share=options.share)
    rate, share = max_rate(config, objective, tolerance=options.tolerance, told=print)
    bound = "at least " if share == 1.0 else ""
    print(
        f"{bound}{rate:.3f} requests/s ({share:.0%} of the sessions): {objective.share:.0%} of the "
        f"requests have a first token within {objective.ttft_s:g} s and "
        f"{objective.tpot_s:g} s a token"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()

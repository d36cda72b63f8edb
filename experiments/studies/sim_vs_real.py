"""Simulated time against real time: one workload slice in both executors, part by part (rung V3).

python -m experiments.studies.sim_vs_real

A profile is fitted on the slices of `experiments.studies.calibrate`; others are then run for real
and simulated with it, and every request's time to first token is compared. Both run on the clock of
`experiments.studies.measured`.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median

from rich import box
from rich.table import Table

from experiments.studies.calibrate import SLICES, fit_to
from experiments.studies.command import run_study
from experiments.studies.measured import Log, measured
from hicache import experiment
from hicache.cli.console import console
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.results.metrics import TTFT_PARTS, RequestRecord, Result, summarize
from hicache.results.tracking import write_json
from hicache.results.verdict import Summary, in_short, objections

HELD_OUT = (0, 1, 2)  # seeds of the slices compared
TIERS = ("device", "host", "storage")


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Calibrate, compare, write `summary.json` and print the residuals."""
    config = replace(config, executor=replace(config.executor, kind="torch"))
    log = Log()
    runs: list[Sequence[RequestRecord]] = []
    summaries: list[Summary] = []
    for other, seed in zip(SLICES, HELD_OUT, strict=True):
        # in turn, so that a machine that is busier now than later is so for both
        with measured() as part:
            experiment.run(replace(config, seed=other))
        log.add(part)
        with measured():
            runs.append(judged(experiment.run(replace(config, seed=seed)), summaries))
    fit = fit_to(log, config)
    pairs: list[tuple[RequestRecord, RequestRecord]] = []
    for records, seed in zip(runs, HELD_OUT, strict=True):
        result = experiment.run(fit.onto(replace(config, seed=seed)))
        pairs += paired(records, judged(result, summaries))
    real, simulated = zip(*pairs, strict=True)
    summary = compare(real, simulated)
    summary |= {
        "calibration/steps_count": fit.num_steps,
        "calibration/step_error_p50": fit.median_step_error,
    }
    write_json(out_dir / "summary.json", summary)
    console().print(table(summary))
    console().print(f"verdict: {in_short(objections(summaries))}", markup=False)


def judged(result: Result, summaries: list[Summary]) -> Sequence[RequestRecord]:
    """The records of a run, whose summary joins those that are judged together."""
    summaries.append(summarize(result.records, result.measures))
    return result.records


def paired(
    real: Sequence[RequestRecord], simulated: Sequence[RequestRecord]
) -> list[tuple[RequestRecord, RequestRecord]]:
    """The records of requests that both have answered."""
    kept = {each.id: each for each in real if each.ttft_ns is not None}
    return [
        (kept[each.id], each) for each in simulated if each.id in kept and each.ttft_ns is not None
    ]


def compare(
    real: Sequence[RequestRecord], simulated: Sequence[RequestRecord]
) -> dict[str, float | int]:
    """Errors of the times to first token, and each part's share of them."""
    times = [(each.ttft_ns or 0) / SECOND_NS for each in real]
    modelled = [(each.ttft_ns or 0) / SECOND_NS for each in simulated]
    total = sum(times)
    summary: dict[str, float | int] = {
        "request/count": len(real),
        "real/ttft_s_p50": median(times),
        "simulated/ttft_s_p50": median(modelled),
        "real/ttft_s_mean": fmean(times),
        "simulated/ttft_s_mean": fmean(modelled),
        "error/ttft_p50": abs(median(modelled) / median(times) - 1),
        "error/request_ttft_p50": median(
            abs(theirs - ours) / ours for ours, theirs in zip(times, modelled, strict=True)
        ),
    }
    for part in TTFT_PARTS:
        ours = sum(getattr(each, f"{part}_ns") for each in real) / SECOND_NS
        theirs = sum(getattr(each, f"{part}_ns") for each in simulated) / SECOND_NS
        summary[f"real/{part}_share"] = ours / total
        summary[f"residual/{part}_share"] = (theirs - ours) / total
    hits = attrgetter(*(f"{tier}_hit_len" for tier in TIERS))
    for side, records in (("real", real), ("simulated", simulated)):
        for tier, lens in zip(TIERS, zip(*map(hits, records), strict=True), strict=True):
            summary[f"{side}/{tier}_hit_tokens"] = sum(lens)
    equal = sum(hits(one) == hits(other) for one, other in zip(real, simulated, strict=True))
    summary["request/equal_hits_share"] = equal / len(real)
    return summary


def table(summary: dict[str, float | int]) -> Table:
    """Parts of the time to first token, as shares of its real total."""
    made = Table(box=box.SIMPLE_HEAD)
    for column in ("part", "share of real TTFT", "residual"):
        made.add_column(column, justify="left" if column == "part" else "right")
    for part in TTFT_PARTS:
        share, residual = summary[f"real/{part}_share"], summary[f"residual/{part}_share"]
        made.add_row(part, f"{share:.1%}", f"{residual:+.1%}")
    made.caption = (
        f"{summary['request/count']} requests; median TTFT {summary['real/ttft_s_p50']:.3f} s, "
        f"{summary['simulated/ttft_s_p50']:.3f} s simulated ({summary['error/ttft_p50']:.1%}); "
        f"median error of a request {summary['error/request_ttft_p50']:.1%}"
    )
    return made


if __name__ == "__main__":
    run_study("sim_vs_real", carry_out)

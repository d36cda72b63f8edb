"""Stop policies beside each other, every stock one tuned: what a claim about ours is held against.

python -m experiments.studies.stop_arms

In each cell (here: a model) only what says when to stop waiting changes. Of `timeout` the best of a
printed grid counts, by each metric anew; `marginal` is not tuned. Goodput is sought for `timeout`
as it comes and at its best by TTFT. Leaves `rows.csv` with all runs and `table.md`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.studies.command import run_study
from hicache import experiment
from hicache.cli.goodput import climb
from hicache.cli.schema import config_of
from hicache.config import ExperimentConfig
from hicache.results.metrics import summarize
from hicache.results.tracking import write_json
from hicache.results.verdict import is_overloaded

OURS, TIMEOUT = "marginal", "timeout"
STOCK = ("best_effort", "wait_complete", TIMEOUT)
BASES_S = (0.0, 0.1, 1.0)
PER_KI_TOKEN_S = (0.005, 0.03, 0.25)
AS_IT_COMES = (1.0, 0.25)
MODELS = ("llama3_8b", "qwen3_next_80b", "gemma3_27b")


class Arm(NamedTuple):
    """A policy, and of a timeout what it is made of: a base, and so much for 1,024 tokens."""

    policy: str
    timeout_s: tuple[float, float] | None = None

    def applied(self, config: ExperimentConfig) -> ExperimentConfig:
        """The same run, stopped by this."""
        base_s, per_ki_token_s = self.timeout_s or AS_IT_COMES
        return replace(
            config,
            prefetch=replace(
                config.prefetch,
                stop=self.policy,
                timeout_base_s=base_s,
                timeout_per_ki_token_s=per_ki_token_s,
            ),
        )

    def __str__(self) -> str:
        return (
            self.policy if self.timeout_s is None else "timeout {:g} + {:g}".format(*self.timeout_s)
        )


TIMEOUTS = tuple(Arm(TIMEOUT, (base, rate)) for base in BASES_S for rate in PER_KI_TOKEN_S)
ARMS = (Arm("best_effort"), Arm("wait_complete"), *TIMEOUTS, Arm(OURS))


class Row(NamedTuple):
    """One arm in one cell; some have no goodput."""

    cell: str
    arm: Arm
    ttft_s: float
    gpu_s: float  # prefill GPU-seconds a request
    rho_gpu: float
    rho_read: float
    is_overloaded: bool
    goodput: float | None = None  # requests a second
    tried: float | None = None  # the highest rate


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Measure three models, leave the tables, and print them."""
    models = {name: replace(config, model=config_of(f"model={name}").model) for name in MODELS}
    rows = [row for name, each in models.items() for row in measure(name, each)]
    pd.DataFrame(rows).to_csv(out_dir / "rows.csv", index=False)
    text = f"{table(rows)}\n\n{tuning_table(rows)}\n"
    (out_dir / "table.md").write_text(text)
    write_json(out_dir / "summary.json", summary_of(rows))
    print(text)


def measure(cell: str, config: ExperimentConfig) -> list[Row]:
    """All arms of one cell."""
    rows = [_row(cell, arm, arm.applied(config)) for arm in ARMS]
    best = {best_of(rows, [policy], "ttft_s").arm for policy in (*STOCK, OURS)}
    sought = {*best, Arm(TIMEOUT, AS_IT_COMES)} if config.goodput.num_rates else set()
    return [_with_goodput(row, config) if row.arm in sought else row for row in rows]


def _row(cell: str, arm: Arm, config: ExperimentConfig) -> Row:
    result = experiment.run(config)
    summary = summarize(result.records, result.measures)
    return Row(
        cell=cell,
        arm=arm,
        ttft_s=summary["request/ttft_s_mean"],
        gpu_s=summary["gpu/prefill_seconds_per_request"],
        rho_gpu=summary["load/rho_gpu"],
        rho_read=summary["load/rho_read"],
        is_overloaded=is_overloaded(summary),
    )


def _with_goodput(row: Row, config: ExperimentConfig) -> Row:
    ladder = climb(row.arm.applied(config))
    return row._replace(goodput=ladder.goodput(config.goodput.share), tried=float(ladder.rates[-1]))


def best_of(rows: Sequence[Row], policies: Collection[str], metric: str) -> Row:
    """The arm of these policies that is best by a metric: the least seconds, or most requests."""

    def merit(row: Row) -> float:
        if metric == "goodput":
            return -1.0 if row.goodput is None else row.goodput
        return -float(getattr(row, metric))

    return max((row for row in rows if row.arm.policy in policies), key=merit)


def table(rows: Sequence[Row]) -> str:
    """Every policy at its best by TTFT in every cell, as Markdown."""
    lines = [
        "| cell | best arm by TTFT | TTFT mean, s | prefill GPU-s per request | goodput, req/s "
        "| ρ GPU | ρ read |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in dict.fromkeys(row.cell for row in rows):
        here = [row for row in rows if row.cell == cell]
        arms = [best_of(here, [policy], "ttft_s").arm for policy in (*STOCK, OURS)]
        for row in here:
            if row.arm in arms or row.arm.timeout_s == AS_IT_COMES:
                mark = " !" if row.is_overloaded else ""
                lines.append(
                    f"| {cell} | {row.arm}{mark} | {row.ttft_s:.3g} | {row.gpu_s:.3g} "
                    f"| {goodput_text(row)} | {row.rho_gpu:.2f} | {row.rho_read:.2f} |"
                )
    return "\n".join([*lines, "", "`!`: overloaded, no latency claim."])


def tuning_table(rows: Sequence[Row]) -> str:
    """Mean TTFT of every timeout of the grid, as Markdown."""
    cells = list(dict.fromkeys(row.cell for row in rows))
    lines = [
        f"| TTFT mean, s | {' | '.join(str(arm) for arm in TIMEOUTS)} |",
        "| --- |" + " ---: |" * len(TIMEOUTS),
    ]
    for cell in cells:
        ttft_s = {row.arm: row.ttft_s for row in rows if row.cell == cell}
        lines.append(f"| {cell} | {' | '.join(f'{ttft_s[arm]:.3g}' for arm in TIMEOUTS)} |")
    return "\n".join(lines)


def goodput_text(row: Row) -> str:
    """A rate; a bound if nothing higher was tried."""
    if row.goodput is None:
        return ""
    return f"{'≥ ' if row.goodput == row.tried else ''}{row.goodput:.2f}"


def summary_of(rows: Sequence[Row]) -> dict[str, float]:
    """Ours over the best stock arm of the cell, by goodput or else by TTFT."""
    summary: dict[str, float] = {}
    for cell in dict.fromkeys(row.cell for row in rows):
        here = [row for row in rows if row.cell == cell]
        ours = best_of(here, [OURS], "ttft_s")
        for metric in ("ttft_s", "gpu_s", "goodput"):
            best = best_of(here, STOCK, "goodput" if metric == "goodput" else "ttft_s")
            stock = getattr(best, metric)
            over = getattr(ours, metric) / stock if stock else 0.0
            summary[f"{cell}/{metric}_over_stock"] = over
    return summary


if __name__ == "__main__":
    run_study("stop_baselines", carry_out)

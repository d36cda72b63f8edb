"""Do the claims of docs/ keep their sign elsewhere: on other machines, orders, windows and traces?

hicache run experiment=signs

`docs/claims.yaml` has every claim as the sign of a difference between two runs. Each is asked under
every condition below; a run that several claims need is made once. A claim *stands* if its sign is
kept as made and turned nowhere, and *falls* if it is turned as made; otherwise it is *bound* to the
conditions that keep it. A dot: both runs have the same value, as where a pool is too large for the
window to fill it; a claim that is so as made was *not asked*. Leaves `signs.csv` with all values
and `table.md`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from hicache import experiment
from hicache.cli.schema import config_of
from hicache.config import ExperimentConfig
from hicache.models.machines import Figure
from hicache.results.metrics import summarize
from hicache.results.tracking import write_json

CLAIMS = Path(__file__).parents[2] / "docs" / "claims.yaml"
EVEN = 0.05  # of the larger: no difference
COMPUTE = ("gemm", "moe", "attention", "delta", "mamba", "conv")  # how names of rates begin
CONVERSATION = "mooncake_conversation"
NUM_WINDOWS = 3
AGENTIC = 0.4  # of as many requests, which are longer
KEPT, TURNED, MUTE = "✓", "✗", "·"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`arm` has less, more or as much (`is_`) of a metric as `other`; all three are overrides."""

    where: str
    says: str
    setting: str
    metric: str
    arm: str
    is_: str
    other: str

    def holds(self, value: float, other: float) -> str:
        """Whether two values have the sign; mute if they are the same: what differs did not act."""
        if value == other:
            return MUTE
        if self.is_ == "even":
            return KEPT if abs(value - other) <= EVEN * max(abs(value), abs(other)) else TURNED
        return KEPT if (value < other) == (self.is_ == "less") else TURNED


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Where a claim is asked: more overrides, and what cannot be said by any."""

    overrides: tuple[str, ...] = ()
    trace: str = CONVERSATION
    window: int = 0
    change: Callable[[ExperimentConfig], ExperimentConfig] = lambda config: config


def faster(factor: float) -> Callable[[ExperimentConfig], ExperimentConfig]:
    """Devices that compute so many times as fast, and move bytes as before."""

    def change(config: ExperimentConfig) -> ExperimentConfig:
        scaled: dict[str, Any] = {}
        for name in (each.name for each in fields(config.hardware)):
            known = getattr(config.hardware, name)
            if name.startswith(COMPUTE):
                scaled[name] = (
                    replace(known, value=known.value * factor)
                    if isinstance(known, Figure)
                    else replace(known, rate=tuple(rate * factor for rate in known.rate))
                )
        return replace(config, hardware=replace(config.hardware, **scaled))

    return change


def storage_of(factor: float) -> Callable[[ExperimentConfig], ExperimentConfig]:
    """Storage that is so many times as fast, both ways."""

    def change(config: ExperimentConfig) -> ExperimentConfig:
        storage = config.storage
        rates = {name: factor * getattr(storage, name) for name in ("read_gbps", "write_gbps")}
        return replace(config, storage=replace(storage, **rates))

    return change


# knobs that workload=weka_agentic brings, as the other conditions have them
POOLS = (
    "parallel.tp=null",
    "cache.device_gib=40",
    "cache.host_gib=256",
    "workload.concurrency=32",
    "workload.max_context=null",
)
CONDITIONS = {
    "as made": Condition(),
    "compute −30 %": Condition(change=faster(0.7)),
    "compute +30 %": Condition(change=faster(1.3)),
    "storage −50 %": Condition(change=storage_of(0.5)),
    "storage +50 %": Condition(change=storage_of(1.5)),
    "all first come": Condition(overrides=("scheduler.order=fcfs",)),
    "all shortest first": Condition(overrides=("scheduler.order=shortest_remaining",)),
    "second window": Condition(window=1),
    "third window": Condition(window=2),
    "agentic trace": Condition(trace="weka_agentic"),
}


def read_claims(path: Path = CLAIMS) -> list[Claim]:
    """All claims of the file.

    Raises:
        ValueError: a sign that is none.
    """
    stored: Any = OmegaConf.to_container(OmegaConf.load(path))
    claims = []
    for told in stored["claims"]:
        if told["is"] not in ("less", "more", "even"):
            raise ValueError(f"{path}: `is` must be less, more or even, got {told['is']!r}")
        claims.append(Claim(is_=told.pop("is"), **told))
    return claims


class Runs:
    """Summaries of runs, each made once."""

    def __init__(self, config: ExperimentConfig) -> None:
        """`config`: of how many requests a window is, and where the traces lie."""
        self._limit = config.workload.limit or 1000
        self._shared = [] if config.data_dir is None else [f"data_dir={config.data_dir}"]
        self._summaries: dict[str, Mapping[str, float]] = {}

    def summary(self, overrides: str, condition: Condition) -> Mapping[str, float]:
        """What a run says of itself under a condition."""
        config = self.config(overrides, condition)
        if repr(config) not in self._summaries:
            result = experiment.run(config)
            self._summaries[repr(config)] = summarize(result.records, result.measures)
        return self._summaries[repr(config)]

    def config(self, overrides: str, condition: Condition) -> ExperimentConfig:
        """The run of these overrides under a condition."""
        if condition.trace == CONVERSATION:
            part = [
                f"workload.window={condition.window}",
                f"workload.limit={NUM_WINDOWS * self._limit}",
                f"workload.windows={NUM_WINDOWS}",
            ]
        else:
            part = [f"workload.limit={round(AGENTIC * self._limit)}"]
        return condition.change(
            config_of(
                f"workload={condition.trace}",
                "storage=memory",
                *([] if condition.trace == CONVERSATION else POOLS),
                *overrides.split(),
                *part,
                *self._shared,
                *condition.overrides,
            )
        )


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Ask every claim under every condition, leave the table and print it."""
    runs, claims = Runs(config), read_claims()
    rows = {claim: ask(claim, runs) for claim in claims}
    told = [
        {"where": claim.where, "says": claim.says, "metric": claim.metric, "condition": name}
        | {"arm": value, "other": other, "kept": claim.holds(value, other)}
        for claim, found in rows.items()
        for name, (value, other) in found.items()
    ]
    pd.DataFrame(told).to_csv(out_dir / "signs.csv", index=False)
    text = table(rows)
    (out_dir / "table.md").write_text(text)
    standing = sum(stands(claim, found) for claim, found in rows.items())
    write_json(
        out_dir / "summary.json",
        {"signs/claims_count": len(rows), "signs/standing_count": standing},
    )
    print(text)


def ask(claim: Claim, runs: Runs) -> dict[str, tuple[float, float]]:
    """The metric of both arms under every condition."""
    return {
        name: (
            runs.summary(f"{claim.setting} {claim.arm}", condition)[claim.metric],
            runs.summary(f"{claim.setting} {claim.other}", condition)[claim.metric],
        )
        for name, condition in CONDITIONS.items()
    }


def stands(claim: Claim, found: Mapping[str, tuple[float, float]]) -> bool:
    """Whether the sign is kept where it was made, and turned nowhere."""
    signs = {name: claim.holds(*values) for name, values in found.items()}
    return signs["as made"] == KEPT and TURNED not in signs.values()


def table(rows: Mapping[Claim, Mapping[str, tuple[float, float]]]) -> str:
    """One row a claim, as Markdown, and how many stand."""
    lines = [
        f"| where | claim | {' | '.join(CONDITIONS)} | verdict |",
        "| --- | --- |" + " :-: |" * len(CONDITIONS) + " --- |",
    ]
    for claim, found in rows.items():
        signs = [claim.holds(*values) for values in found.values()]
        verdict = {KEPT: "bound", TURNED: "falls", MUTE: "not asked"}[signs[0]]
        if stands(claim, found):
            verdict = "stands"
        lines.append(f"| {claim.where} | {claim.says} | {' | '.join(signs)} | {verdict} |")
    standing = sum(stands(claim, found) for claim, found in rows.items())
    lines += ["", f"{standing} of {len(rows)} claims stand."]
    return "\n".join(lines) + "\n"

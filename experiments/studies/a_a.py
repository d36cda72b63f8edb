"""Whether intervals keep their promise: identical policies compared, and effects that are planted.

hicache run experiment=a_a

Every window is served under `NUM_SEEDS` seeds, which move arrivals and draw storage's delays. Arms
are made of these runs, at random and `NUM_COMPARISONS` times, and their means compared by the draws
and the ends that `hicache compare --paired` has:

- unpaired: windows are dealt into two hands, as odd and even ones are one way to do, each window
  under one of its seeds; one hand against the other, each drawn anew by itself;
- paired: all windows, each under two of its seeds; the same windows and sessions drawn for both.

What is planted scales all of one arm's numbers. Leaves `table.md` and `summary.json`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed

from hicache import experiment
from hicache.cli.tables.intervals import CONFIDENCE, LEAST_WINDOWS, Places, draws, ends
from hicache.cli.tables.request_metrics import Numbers, Ratio
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.results.metrics import Status
from hicache.results.tracking import write_json

NUM_SEEDS = 4
NUM_COMPARISONS = 200
PLANTED = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)  # the share by which one arm's numbers are smaller
METRICS = ("request/ttft_s_mean", "cache/token_hit_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Sums over the requests of each session, of each metric: above its fraction line, and below.

    `above`, `below`: [seeds, sessions, metrics]. `window_of`: [sessions], ascending from 0.
    """

    above: Numbers
    below: Numbers
    window_of: Places

    @property
    def num_windows(self) -> int:
        """Windows, of which each has a session."""
        return int(self.window_of[-1]) + 1

    def arms(self, seeds: Places) -> Ratio:
        """`seeds` [comparisons, windows] as what they served: [sessions, comparisons × metrics]."""
        of_session = seeds[:, self.window_of].T
        sessions = np.arange(len(self.window_of))[:, None]
        above, below = (sums[of_session, sessions] for sums in (self.above, self.below))
        return Ratio(above.reshape(len(sessions), -1), below.reshape(len(sessions), -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of comparisons with one planted effect, all as shares.

    `zero_left_out`, `effect_left_out`: of the intervals. `half_width`: of the metric, the mean.
    """

    metric: str
    kind: str
    planted: float
    zero_left_out: float
    effect_left_out: float
    half_width: float


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Run all windows under all seeds, compare, write and print the table."""
    num_windows = config.workload.windows
    if num_windows is None or num_windows < 2 * LEAST_WINDOWS:
        raise ValueError(
            f"workload.windows must be at least {2 * LEAST_WINDOWS}, so that each of two sides has "
            f"{LEAST_WINDOWS}, got {num_windows}"
        )
    jobs = list(product(range(num_windows), range(config.seed, config.seed + NUM_SEEDS)))
    served = Parallel(n_jobs=-1)(delayed(serve)(config, *job) for job in jobs)
    found = list(compared(gathered(jobs, served), NUM_COMPARISONS))
    text = table(found)
    (out_dir / "table.md").write_text(text)
    write_json(out_dir / "summary.json", summary_of(found))
    print(text)


def serve(config: ExperimentConfig, window: int, seed: int) -> Numbers:
    """Of each request of one window under one seed: session, TTFT, prompt, and hit tokens."""
    workload = replace(config.workload, window=window)
    result = experiment.run(replace(config, workload=workload, seed=seed))
    rows = [
        (each.session_id, each.ttft_ns / SECOND_NS, each.prompt_len, each.computed_len)
        for each in result.records
        if each.status is Status.finished and each.ttft_ns is not None
    ]
    return np.array(rows, float).T


def gathered(jobs: Sequence[tuple[int, int]], served: Sequence[Numbers]) -> Runs:
    """The sums of all runs, `METRICS` as they come."""
    windows, seeds = np.repeat(jobs, [each.shape[1] for each in served], axis=0).T
    names, ttft_s, prompt_len, computed_len = np.concatenate(served, axis=1)
    sessions, session_of = np.unique(np.stack([windows, names]), axis=1, return_inverse=True)
    _, seed_of = np.unique(seeds, return_inverse=True)

    def summed(*columns: Numbers) -> Numbers:
        sums = np.zeros((seed_of.max() + 1, sessions.shape[1], len(columns)))
        np.add.at(sums, (seed_of, session_of), np.stack(columns, axis=1))
        return sums

    return Runs(
        above=summed(ttft_s, prompt_len - computed_len),
        below=summed(np.ones_like(ttft_s), prompt_len),
        window_of=sessions[0].astype(np.int64),
    )


def compared(runs: Runs, num_comparisons: int) -> Iterator[Found]:
    """What came of comparing arms that differ in nothing but what is planted."""
    means = (runs.above.sum(axis=(0, 1)) / runs.below.sum(axis=(0, 1))).tolist()
    kinds = {"unpaired": (unpaired, runs.num_windows // 2), "paired": (paired, runs.num_windows)}
    for kind, (compare, num_windows) in kinds.items():
        drawn = compare(runs, num_comparisons, np.random.default_rng(0))
        base, other = (arm.reshape(len(arm), num_comparisons, len(METRICS)) for arm in drawn)
        for (place, metric), planted in product(enumerate(METRICS), PLANTED):
            differences = (1 - planted) * other[:, :, place] - base[:, :, place]
            lows, highs = np.array([ends(each, num_windows) for each in differences.T]).T
            effect = -planted * means[place]
            yield Found(
                metric=metric,
                kind=kind,
                planted=planted,
                zero_left_out=float(np.mean((lows > 0) | (highs < 0))),
                effect_left_out=float(np.mean((lows > effect) | (highs < effect))),
                half_width=float(np.mean(highs - lows) / 2 / means[place]),
            )


def paired(
    runs: Runs, num_comparisons: int, random: np.random.Generator
) -> tuple[Numbers, Numbers]:
    """Both arms' metrics, drawn anew: [draws, comparisons × metrics] each."""
    shape = (num_comparisons, runs.num_windows)
    num_seeds = len(runs.above)
    first = random.integers(num_seeds, size=shape)
    second = (first + random.integers(1, num_seeds, size=shape)) % num_seeds
    arms = [runs.arms(seeds) for seeds in (first, second)]
    drawn = [[arm.under(weights) for arm in arms] for weights in draws(runs.window_of)]
    base, other = zip(*drawn, strict=True)
    return np.concatenate(base), np.concatenate(other)


def unpaired(
    runs: Runs, num_comparisons: int, random: np.random.Generator
) -> tuple[Numbers, Numbers]:
    """Both arms' metrics, drawn anew: [draws, comparisons × metrics] each."""
    hand = runs.num_windows // 2
    columns: list[list[Numbers]] = [[], []]
    for number in range(num_comparisons):
        dealt = random.permutation(runs.num_windows)
        arm = runs.arms(random.integers(len(runs.above), size=(1, runs.num_windows)))
        for side, windows in enumerate((dealt[:hand], dealt[hand : 2 * hand])):
            held = np.isin(runs.window_of, windows)
            part = Ratio(arm.above[held], arm.below[held])
            _, window_of = np.unique(runs.window_of[held], return_inverse=True)
            drawn = [part.under(weights) for weights in draws(window_of, 2 * number + side)]
            columns[side].append(np.concatenate(drawn))
    base, other = columns
    return np.concatenate(base, axis=1), np.concatenate(other, axis=1)


def table(found: Sequence[Found]) -> str:
    """Markdown: what was left out by how many of the intervals."""
    lines = [
        "| metric | comparison | planted effect | intervals without 0 | ... without the effect "
        "| half width |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {each.metric} | {each.kind} | {f'-{each.planted:.0%}' if each.planted else 'none'} "
        f"| {each.zero_left_out:.1%} | {each.effect_left_out:.1%} | {each.half_width:.1%} |"
        for each in found
    ]
    return "\n".join(lines) + f"\n\n{CONFIDENCE:.0%} intervals.\n"


def summary_of(found: Sequence[Found]) -> dict[str, float]:
    """The same for programs."""
    return {
        f"{each.metric}/{each.kind}/planted_{each.planted:g}/{what}": getattr(each, what)
        for each in found
        for what in ("zero_left_out", "effect_left_out", "half_width")
    }

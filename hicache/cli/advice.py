"""The search for the changes of a server that are worth most, and its answer as text and JSON."""

import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path

from hicache import experiment
from hicache.cache.kinds import MAMBA, SWA
from hicache.cli.engine_flags import (
    COMPAT,
    TODAY,
    Arm,
    Choice,
    Grid,
    grid_of,
    is_possible,
    neighbors,
    todays,
)
from hicache.cli.tables.comparison import NO_CLAIM, makes_claim, number
from hicache.cli.tables.groups import Group, load_runs
from hicache.cli.tables.paired import RATES, Difference, Pairs
from hicache.cli.tables.paired_table import STAR, in_words
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.engine.deployment import deploy
from hicache.experiment import workload_of
from hicache.models import GIB
from hicache.request import Request
from hicache.results.verdict import objections
from hicache.runs.checks import locked
from hicache.runs.errors import BAD_INPUT, sentence
from hicache.runs.grid import name_of
from hicache.runs.job import run_job
from hicache.runs.schema import config_of
from hicache.runs.stored import Value
from hicache.workload.reuse import reuse

TTFT, COST, HITS = "request/ttft_s_mean", "gpu/prefill_seconds_per_request", "cache/token_hit_rate"
TITLES = {TTFT: "mean TTFT", HITS: "token hit rate", COST: "prefill GPU-seconds per request"}
WARM_UP = 0.5  # share of the log that fills the cache before the first window
MOST_CHANGES = 3
ROUNDS = 2.5  # of trials that the time must suffice for
PROBE = 200  # requests whose replay shows how long others take
OVERHEAD_S = 0.5  # of a run, for its files
USED = 0.8  # share of the time that is planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a change does, with 95 % intervals over windows of the log.

    Attributes:
        arm: the settings with the change.
        new: the choices that the change makes.
        effects: the difference to the settings without it, by metric.
        weak, middle: the gain at the weak end of the interval of the metric, and in the middle.
    """

    arm: Arm
    new: tuple[Choice, ...]
    effects: dict[str, Difference]
    weak: float
    middle: float
    cost: str

    @property
    def price(self) -> tuple[float, int]:
        host_gib = sum(each.host_gib for each in self.arm)
        return host_gib, sum(each.is_on for each in self.arm if each.part == "storage")


class Trials:
    """Replays arms over the same windows of a log, each arm once, until the time is over.

    Args:
        base: the settings that all arms have.
        slices: the windows, as values of `workload.slice`.
        directory: where each run has a directory, as in a sweep.
        workers: number of processes.
        end: time of `time.monotonic()` at which no further result is waited for.
    """

    def __init__(
        self, base: Sequence[str], slices: Sequence[str], directory: Path, workers: int, end: float
    ) -> None:
        self._base, self._slices, self._directory, self.end = base, slices, directory, end
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self.groups: dict[Arm, Group] = {}
        self.refused: dict[Arm, str] = {}  # the reason why a run of the arm failed
        self.late: set[Arm] = set()
        self._num_arms = 0

    def measure(self, arms: Sequence[Arm]) -> None:
        """Replay the arms that were not replayed before."""
        jobs: dict[Arm, list[tuple[Path, Future[None]]]] = {}
        for arm in arms:
            if arm in self.groups or arm in self.refused or arm in self.late:
                continue
            told = [each for choice in arm for each in choice.overrides]
            self._num_arms += 1
            for part in self._slices:
                name = name_of(self._num_arms, [*told, f"slice={part}"])
                overrides = (*self._base, *told, f"workload.slice={part}")
                job = self._pool.submit(replay, overrides, self._directory / name)
                jobs.setdefault(arm, []).append((self._directory / name, job))
        every = [job for each in jobs.values() for _, job in each]
        wait(every, timeout=max(self.end - time.monotonic(), 0))
        for job in every:
            job.cancel()
        for arm, each in jobs.items():
            if not all(job.done() and not job.cancelled() for _, job in each):
                self.late.add(arm)
                continue
            errors = [error for _, job in each if (error := job.exception()) is not None]
            if errors and not isinstance(errors[0], BAD_INPUT):
                raise errors[0]
            if errors:
                self.refused[arm] = sentence(errors[0])
            else:
                settings: dict[str, Value] = {choice.part: choice.what for choice in arm}
                runs = tuple(load_runs([path for path, _ in each]))
                self.groups[arm] = Group(settings=settings, runs=runs)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def effect(self, before: Arm, arm: Arm, metric: str) -> Trial | None:
        """Compare two arms request by request; None if the metric cannot be compared."""
        sides = self.groups[before], self.groups[arm]
        if not makes_claim(metric, *sides):
            return None
        shown = [each for each in dict.fromkeys((metric, *TITLES)) if makes_claim(each, *sides)]
        effects = Pairs(*sides).differences(shown)
        judged = effects[metric].judged
        if judged.interval is None:
            return None
        sign = 1 if metric.endswith((*RATES, "_per_s")) else -1
        new = tuple(each for each in arm if each not in before)
        weak = min(sign * each for each in judged.interval)
        middle = sign * judged.middle
        cost = _cost(before, arm, self.groups[arm])
        return Trial(arm=arm, new=new, effects=effects, weak=weak, middle=middle, cost=cost)


def _cost(before: Arm, arm: Arm, group: Group) -> str:
    more_gib = sum(each.host_gib for each in arm) - sum(each.host_gib for each in before)
    costs = [f"{more_gib:+,.0f} GiB of host memory"] if more_gib else []
    rates = [
        run.summary.get("load/rho_write", 0) * float(run.config.get("storage.write_gbps") or 0)
        for run in group.runs
    ]
    if any(rates):
        costs.append(f"{sum(rates) / len(rates):.2g} GB/s written to storage")
    return ", ".join(costs) or "none"


def replay(overrides: tuple[str, ...], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        run_job(config_of(*overrides), directory, overrides, is_job=True)


def best_of(trials: Sequence[Trial], worth: float) -> Trial | None:
    """Return the best change that is worth it.

    Of changes that gain as much, but for `worth`, it is the one with the smallest host cache.
    """
    found = [each for each in trials if each.weak >= worth]
    most = max((each.middle for each in found), default=0.0)
    near = [each for each in found if each.middle >= most - worth]
    return min(near, key=lambda each: (each.price, -each.middle), default=None)


@dataclass(slots=True, kw_only=True)
class Advice:
    """The changes that are worth it, in the order in which they were found, and what was tried."""

    title: str
    metric: str
    worth: float
    today: dict[str, float]
    notes: list[str]
    changes: list[Trial] = field(default_factory=list)  # each on top of those before
    rest: list[Trial] = field(default_factory=list)  # tried last, and not worth it
    total: Trial | None = None  # all changes against today
    num_tried: int = 0


def advise(options: Namespace, typed: Sequence[str], out_dir: Path) -> Advice:
    """Search the changes that are worth most, as the module describes."""
    end = time.monotonic() + 60 * options.minutes
    now = todays(typed)
    base = (
        [] if any(x.startswith("compat=") for x in typed) else [f"compat={COMPAT[options.engine]}"]
    )
    if not any(each.startswith("cache.device") for each in typed):
        base.append("cache.device_gib=null")  # as a server, which uses all memory
    kept = {each for part in now.values() for each in part}
    base += ["tracker.wandb_mode=disabled", *(each for each in typed if each not in kept)]
    config = config_of(*base, *kept)
    deployment = deploy(config)
    kinds = deployment.kinds.numbers
    grid = grid_of(
        options.engine,
        now,
        host_gib=deployment.host.total_bytes / GIB,
        has_storage=config.storage.kind != "none",
        kept="states" if MAMBA in kinds else "windows" if SWA in kinds else None,
        sizes=options.gib,
        storage=options.storage,
        num_devices=deployment.num_devices,
    )
    for choices in grid.values():  # leave out what is as today under another name
        for choice in choices[1:]:
            if config_of(*base, *kept, *choice.overrides) == config:
                choices.remove(choice)
    every = [arm for arm in product(*grid.values()) if is_possible(arm, grid)]
    today = every[0]
    notes: list[str] = []
    requests = workload_of(config, deployment.cost, notes).requests
    notes.append(repeated(requests, config.cache.page_size))
    num_arms = len(every) if options.full else 1 + ROUNDS * len(neighbors(grid, today))
    limit = affordable(config, num_arms, options)
    if limit < len(requests):
        notes.append(
            f"the time suffices for the first {limit:,} of {len(requests):,} requests; more of "
            "them may show more uses of large caches (--minutes)"
        )
        base.append(f"workload.limit={limit}")
        requests = requests[:limit]
    if config.workload.is_timed:
        span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / SECOND_NS
        base.append(f"workload.warm_up_s={WARM_UP * span_s:.3f}")
    slices = [f"{place}/{options.windows}" for place in range(options.windows)]
    trials = Trials(base, slices, out_dir, options.workers, end)
    try:
        trials.measure(every if options.full else [today])
        if today not in trials.groups:
            why = trials.refused.get(today, "it was not finished in the time (--minutes)")
            raise ValueError(f"the settings of today: {why}")
        title = f"{config.model.name} on {deployment.num_devices} x {config.hardware.name}"
        return search(trials, grid, today, options, title, notes)
    finally:
        trials.close()


def search(
    trials: Trials, grid: Grid, today: Arm, options: Namespace, title: str, notes: list[str]
) -> Advice:
    group = trials.groups[today]
    metric = options.metric or (TTFT if makes_claim(TTFT, group) else COST)
    told = {each: sum(group.values(each)) / len(group.runs) for each in (metric, *TITLES)}
    found = objections([run.summary for run in group.runs])
    # a window of a minute has no later requests, and comes after a warm-up
    notes += [each.sentence for each in found if each.name != "start-up"]
    advice = Advice(title=title, metric=metric, worth=options.worth, today=told, notes=notes)
    arm = today
    while True:
        near = (
            [each for each in trials.groups if each != arm]
            if options.full
            else neighbors(grid, arm)
        )
        trials.measure(near)
        tried = [trials.effect(arm, each, metric) for each in near if each in trials.groups]
        advice.rest = [each for each in tried if each is not None]
        best = best_of(advice.rest, options.worth)
        if best is None:
            break
        advice.changes.append(best)
        advice.rest.remove(best)
        arm = best.arm
        advice.total = trials.effect(today, arm, metric)
    advice.num_tried = len(trials.groups) - 1
    notes += [f"{words(each)}: {why}" for each, why in trials.refused.items()]
    if trials.late:
        late = "; ".join(words(each) for each in trials.late)
        notes.append(f"not tried for lack of time (--minutes): {late}")
    return advice


def words(arm: Arm) -> str:
    return ", ".join(each.what for each in arm if each.what != TODAY) or TODAY


def repeated(requests: Sequence[Request], page_size: int) -> str:
    used = reuse(requests, page_size)
    hits = int(used.lru(used.full_pages).sum()) * page_size
    share = hits / sum(each.prompt_len for each in requests)
    return f"{share:.1%} of the prompt tokens of the log repeat earlier ones"


def affordable(config: ExperimentConfig, num_arms: float, options: Namespace) -> int:
    """Return the number of requests for which the time suffices, by a replay of the first ones.

    It is at least theirs: with less time, fewer changes are tried.
    """
    begin = time.perf_counter()
    first = experiment.run(replace(config, workload=replace(config.workload, limit=PROBE)))
    per_request_s = (time.perf_counter() - begin) / len(first.records)
    given_s = 60 * options.minutes * min(options.workers, cpu_count() or 1) * USED
    per_run_s = given_s / (num_arms * options.windows) - OVERHEAD_S
    share = WARM_UP + (1 - WARM_UP) / options.windows  # of the log in each run
    return max(int(per_run_s / per_request_s / share), PROBE)


def as_markdown(advice: Advice, log: str) -> str:
    shown = list(advice.today)
    names = [TITLES.get(each, each) for each in shown]
    now = ", ".join(
        f"{name} {number(value)}" for name, value in zip(names, advice.today.values(), strict=True)
    )
    lines = [f"# {advice.title}: advice from {log}", "", *(f"- {x}" for x in advice.notes), ""]
    lines += [f"**Today:** {now}.", ""]
    if advice.changes:
        lines += [f"**Worth most for the {names[0]}**, each on top of the rows above:", ""]
        lines.append(f"| change | {' | '.join(names)} | cost | options |")
        lines.append("|---" * (len(names) + 3) + "|")
        lines += [_row(each, shown) for each in advice.changes[:MOST_CHANGES]]
        lines += ["", f"{len(advice.changes)} change(s) together: {_effects(advice.total, shown)}."]
    else:
        lines.append(
            f"**No change is worth it.** None of the {advice.num_tried} tried surely improves the "
            f"{names[0]}."
        )
    ranked = sorted(advice.rest, key=lambda each: -each.middle)
    for title, is_unsure in (
        ("Perhaps worth it, but not sure here (more --minutes or --windows decide)", True),
        ("Not worth it (the best of them)", False),
    ):
        told = [
            f"{words(each.new)} ({in_words(each.effects[shown[0]])})"
            for each in ranked
            if (each.middle >= advice.worth) is is_unsure and words(each.new) != TODAY
        ]
        lines += ["", f"**{title}:** {'; '.join(told[:MOST_CHANGES])}."] if told else []
    return "\n".join([*lines, "", STAR])


def _effects(trial: Trial | None, shown: Sequence[str]) -> str:
    if trial is None:
        return "not comparable"
    return ", ".join(
        f"{TITLES.get(k, k)} {in_words(trial.effects[k])}" for k in shown if k in trial.effects
    )


def _row(trial: Trial, shown: Sequence[str]) -> str:
    cells = [in_words(trial.effects[k]) if k in trial.effects else NO_CLAIM for k in shown]
    flags = " ".join(each.flags for each in trial.new)
    return f"| {words(trial.new)} | {' | '.join(cells)} | {trial.cost} | `{flags}` |"


def as_dict(advice: Advice, log: str) -> dict[str, object]:
    def told(trial: Trial) -> dict[str, object]:
        judged = {name: each.judged for name, each in trial.effects.items()}
        return {
            "change": words(trial.new),
            "overrides": [x for each in trial.new for x in each.overrides],
            "flags": [each.flags for each in trial.new if each.flags],
            "cost": trial.cost,
            "effects": {k: {"middle": v.middle, "interval": v.interval} for k, v in judged.items()},
        }

    return {
        "log": log,
        "title": advice.title,
        "metric": advice.metric,
        "today": advice.today,
        "notes": advice.notes,
        "changes": [told(each) for each in advice.changes[:MOST_CHANGES]],
        "together": advice.total and told(advice.total),
        "not_worth_it": [told(each) for each in advice.rest],
        "num_tried": advice.num_tried,
    }

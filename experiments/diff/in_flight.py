"""Compares two schedulers step by step, with several requests in flight.

Requests arrive before numbered steps. Both sides get the same ones, whatever head does: a request
arrives when fewer than a drawn number are open at base. No clock is involved.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from experiments.diff.compare import OpenSide, open_sides, token_ids
from experiments.diff.engines import Launch, say
from experiments.diff.protocol import Arrival, Pools, SideError, StepRow
from hicache.request import Request

# kinds of differences between two rows, the most telling one first, each with the keys of a row
# that show it
KINDS = {
    "hits": ("hit",),
    "retraction": ("preempted",),
    "budget": ("budget",),
    "deferral": ("deferred",),
    "order": ("started", "decode", "loading"),
    "chunk": ("extend",),
    "finish": ("finished",),
    "memory": ("free", "pools", "held", "moved"),
}
MEANINGS = {
    "hits": "a request that both start hits other tokens",
    "retraction": "other requests go back to the queue for lack of memory",
    "budget": "the step may compute another number of prompt tokens",
    "deferral": "another request waits, or for another reason",
    "order": "other requests run, or in another order",
    "chunk": "the same prompts are computed, but cut elsewhere",
    "finish": "other requests end",
    "memory": "the same steps, but other amounts held, free, copied or evicted",
}


class Arrivals:
    """Decides how many requests arrive before a step.

    Whenever fewer requests are open than a number drawn between half of `in_flight` and all of it,
    requests arrive until so many are, and the next number is drawn.
    """

    def __init__(self, in_flight: int, seed: int) -> None:
        self._least, self._most = max(in_flight // 2, 1), in_flight
        self._random = Random(seed)
        self._wanted = self._draw()

    def count(self, num_open: int) -> int:
        missing = self._wanted - num_open
        if missing > 0:
            self._wanted = self._draw()
        return max(missing, 0)

    def _draw(self) -> int:
        return self._random.randint(self._least, self._most)


@dataclass(slots=True, kw_only=True)
class FlightComparison:
    """What two schedulers did with the same arrivals, step by step.

    `firsts` holds the first pair of rows of each kind of difference, `counts` the number of steps
    that show it. A step may show several kinds. `totals` sums up each side, in order base, head.
    """

    base: dict[str, str]
    head: dict[str, str]
    pools: Pools
    num_requests: int
    num_steps: int = 0
    num_equal: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, tuple[StepRow, StepRow]] = field(default_factory=dict)
    hits: tuple[dict[int, list[int]], dict[int, list[int]]] = field(
        default_factory=lambda: ({}, {})
    )
    totals: tuple[Counter[str], Counter[str]] = field(
        default_factory=lambda: (Counter(), Counter())
    )
    failure: str | None = None

    @property
    def unequal_hits(self) -> list[int]:
        """Return the requests that both sides started, with other hits."""
        base, head = self.hits
        return [key for key in sorted(base.keys() & head.keys()) if base[key] != head[key]]

    def add(self, base: StepRow, head: StepRow) -> None:
        self.num_steps += 1
        for row, hits, total in zip((base, head), self.hits, self.totals, strict=True):
            hits.update(row["hit"])
            total["preemptions"] += len(row["preempted"])
            total["requests finished"] += len(row["finished"])
            total["steps with several prompts"] += len(row["extend"]) > 1
            total["device hit tokens"] += sum(each[0] for each in row["hit"].values())
            total["lower hit tokens"] += sum(each[1] for each in row["hit"].values())
        kinds = differences(base, head)
        self.num_equal += not kinds
        for kind in kinds:
            self.counts[kind] += 1
            self.firsts.setdefault(kind, (base, head))


def differences(base: StepRow, head: StepRow) -> list[str]:
    """Return the kinds of differences between two rows of the same step.

    Keys that one side leaves out are not compared. Hits are compared of requests that both sides
    start in this step. Where other requests run, chunks are compared of those that both compute.
    """
    both = set(base["hit"]) & set(head["hit"])
    sides = []
    for row in (base, head):
        ids = [each[0] for each in row["extend"]]
        # the order of those that go back shows in the steps that follow
        gone = {key: sorted(row[key]) for key in ("preempted",) if key in row}
        hits = {key: row["hit"][key] for key in both}
        sides.append(row | {"started": ids, "hit": hits} | gone)
    one, other = sides
    shared = set(one["started"]) & set(other["started"])
    for row in sides:
        row["extend"] = [each for each in row["extend"] if each[0] in shared]
    return [
        kind
        for kind, keys in KINDS.items()
        if any(one[key] != other[key] for key in keys if key in one and key in other)
    ]


def fly(
    requests: Sequence[Request],
    pools: Pools,
    launches: tuple[Launch, Launch],
    logs: Path,
    *,
    seed: int,
    until_first: bool = False,
) -> FlightComparison:
    """Let two schedulers run the same requests, and compare their steps.

    The comparison ends when both sides have finished all requests, or, with `until_first`, at the
    first step that differs.

    Raises:
        SideError: one of the sides cannot be started.
    """
    with ExitStack() as stack:
        sides = open_sides(stack, pools, launches, logs)
        base, head = (side.about() for side in sides)
        comparison = FlightComparison(base=base, head=head, pools=pools, num_requests=len(requests))
        try:
            run_steps(
                requests,
                Arrivals(pools.in_flight, seed),
                sides,
                comparison,
                until_first=until_first,
            )
        except SideError as error:
            comparison.failure = f"at step {comparison.num_steps + 1}: {error}"
    return comparison


def run_steps(
    requests: Sequence[Request],
    arrivals: Arrivals,
    sides: tuple[OpenSide, OpenSide],
    comparison: FlightComparison,
    *,
    until_first: bool,
) -> None:
    """Send both sides the same arrivals, step by step, and add their rows to the comparison."""
    num_come, idle = 0, 0
    while min(total["requests finished"] for total in comparison.totals) < len(requests):
        num_open = num_come - comparison.totals[0]["requests finished"]
        count = min(arrivals.count(num_open), len(requests) - num_come)
        new: list[Arrival] = [
            (number, token_ids(requests[number]), requests[number].prompt_len)
            for number in range(num_come, num_come + count)
        ]
        num_come += count
        for side in sides:
            side.ask([("step", new)])
        base, head = (side.take_row() for side in sides)
        comparison.add(base, head)
        is_equal = comparison.num_equal == comparison.num_steps
        if until_first and not is_equal:
            return
        idle = 0 if any(row["extend"] or row["decode"] for row in (base, head)) else idle + 1
        if idle > len(requests) + 10:
            raise SideError("no request runs any more")
        if comparison.num_steps % 2000 == 0:
            say(f"{comparison.num_steps:,} steps, {num_come:,} of {len(requests):,} requests")


# -- the report ------------------------------------------------------------------------------------


def to_json(comparison: FlightComparison, asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "asked": asked,
        "base": comparison.base,
        "head": comparison.head,
        "requests": comparison.num_requests,
        "steps": comparison.num_steps,
        "equal_steps": comparison.num_equal,
        "unequal_hits": comparison.unequal_hits,
        "kinds": dict(comparison.counts),
        "firsts": {kind: list(rows) for kind, rows in comparison.firsts.items()},
        "totals": [dict(total) for total in comparison.totals],
        "failure": comparison.failure,
    }


def to_markdown(comparison: FlightComparison, question: str) -> str:
    names = [f"{each['engine']} {each['version']}" for each in (comparison.base, comparison.head)]
    if names[0] == names[1]:
        names = [f"{names[0]} (base)", f"{names[1]} (head)"]
    lines = [
        f"### Steps of {names[1]} against {names[0]}",
        "",
        f"{question} **{comparison.num_equal:,} of {comparison.num_steps:,} steps are equal**; hits"
        f" differ in {len(comparison.unequal_hits):,} of {comparison.num_requests:,} requests.",
        "",
        f"| | {names[0]} | {names[1]} |",
        "|---|---:|---:|",
    ]
    base, head = comparison.totals
    lines += [f"| {name} | {base[name]:,} | {head[name]:,} |" for name in base]
    if comparison.failure is not None:
        lines += ["", f"**Not finished**: {comparison.failure}."]
    if comparison.counts:
        lines += ["", "| difference | steps | first step | meaning |", "|---|---:|---:|---|"]
    order = sorted(comparison.firsts.items(), key=lambda item: item[1][0]["step"])
    lines += [
        f"| {kind} | {comparison.counts[kind]:,} | {rows[0]['step']:,} | {MEANINGS[kind]} |"
        for kind, rows in order
    ]
    shown: set[int] = set()
    for _, rows in order:
        if rows[0]["step"] not in shown:
            shown.add(rows[0]["step"])
            kinds = ", ".join(differences(*rows))
            lines += ["", f"**Step {rows[0]['step']:,}** ({kinds}):", ""]
            lines += [
                f"- {name}: {_in_words(row, other)}"
                for name, row, other in zip(names, rows, rows[::-1], strict=True)
            ]
    return "\n".join(lines) + "\n"


def _in_words(row: StepRow, other: StepRow) -> str:
    prompts = [f"{number} [{start:,}, {end:,})" for number, start, end in row["extend"]]
    parts = ["prompts " + (", ".join(prompts) or "none"), f"{len(row['decode'])} decodes"]
    keys = ("budget", "loading", "preempted", "hit", "deferred", "finished", "free")
    parts += [f"{key} {row[key]}" for key in keys if row.get(key)]
    for key in ("pools", "held", "moved"):  # what differs
        one, two = row.get(key, {}), other.get(key, {})
        parts += [
            f"{key} {name} {one.get(name, 0):,}"
            for name in sorted({*one, *two})
            if one.get(name) != two.get(name)
        ]
    return "; ".join(parts)

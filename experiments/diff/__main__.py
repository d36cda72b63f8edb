"""What does this change do to the engine's cache? See `docs/diff.md`.

python -m experiments.diff --engine sglang --base 0.5.22 --head 0.5.23
"""

import argparse
import re
import sys
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path

from experiments.diff.compare import Comparison, compare
from experiments.diff.engines import ENGINES, OURS, prepare, say
from experiments.diff.explain import explain
from experiments.diff.protocol import TIERS, Pools, SideError
from experiments.diff.report import dump, names_of, to_json, to_markdown, write_figure
from experiments.diff.rooms import MODELS, bytes_of, chosen, pools_for
from experiments.launch.command import parser_of
from hicache.workload.build import KINDS


@dataclass(frozen=True, slots=True)
class Limit:
    """A change of one metric that is too much: `hits:-0.5%`."""

    metric: str
    percent: float

    @classmethod
    def parse(cls, text: str) -> "Limit":
        """As typed."""
        found = re.fullmatch(rf"({'|'.join(METRICS)}):([+-]?\d+(?:\.\d+)?)%", text)
        if found is None or not float(found[2]):
            raise SideError(
                f"--fail-on wants METRIC:-0.5% or METRIC:+3%, METRIC one of {', '.join(METRICS)},"
                f" got {text!r}"
            )
        return cls(found[1], float(found[2]))

    def broken_by(self, comparison: Comparison, unit_bytes: dict[str, int]) -> str | None:
        """A sentence if the metric changed by as much or more, in that direction."""
        base, head = (measure(comparison, side, self.metric, unit_bytes) for side in SIDES)
        if base == head:
            return None
        change = 100 * (head - base) / base if base else float("inf")
        if (change <= self.percent) if self.percent < 0 else (change >= self.percent):
            return (
                f"{self.metric} went from {base:,} to {head:,}, which is {change:+.2f} %;"
                f" {self.percent:+g} % is too much"
            )
        return None


SIDES = ("base", "head")
AREAS = {"copied_bytes": "moved/", "evicted_bytes": "evicted/"}
METRICS = ("hits", *(f"{tier}_hits" for tier in TIERS), *AREAS)


def main() -> None:
    """Compare, report, and exit with 1 if something changed by too much, with 2 if it failed."""
    options = parse(sys.argv[1:])
    try:
        sys.exit(run(options))
    except (SideError, ValueError, FileNotFoundError) as error:
        print(f"experiments.diff: {error}", file=sys.stderr)
        sys.exit(2)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("experiments.diff", __doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="sglang")
    what = f"a release, a checkout, a wheel, or {OURS}"
    parser.add_argument("--base", required=True, help=what)
    parser.add_argument("--head", required=True, help=what)
    parser.add_argument("--workload", default="mooncake_conversation", help=", ".join(KINDS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--components", choices=MODELS, default="full")
    parser.add_argument(
        "--pools",
        default="",
        help="other room than the workload's: device_tokens=262144,host_tokens=0,...; of "
        + ", ".join(each.name for each in fields(Pools)),
    )
    parser.add_argument("--copies", default="instant", help="instant, or delayed:N requests")
    parser.add_argument("--core", choices=("python", "rust"), default="python")
    parser.add_argument("--eviction", help="of head: a policy of the engine's, or module:Class")
    parser.add_argument("--model", help="whose bytes to count (a name in conf/model)")
    parser.add_argument("--fail-on", action="append", default=[], metavar="hits:-0.5%")
    parser.add_argument("--out", type=Path, help="a folder for the report")
    parser.add_argument(
        "--until-first", action="store_true", help="the first request whose hits differ is the last"
    )
    parser.add_argument("--no-explanation", action="store_true", help="spares a second run")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Compare and report; the exit status."""
    limits = [Limit.parse(text) for text in options.fail_on]
    engine = ENGINES[options.engine]
    pools = pools_for(
        options.workload,
        options.components,
        options.pools,
        options.copies,
        has_storage=engine.has_storage,
    )
    model = options.model or MODELS[options.components]
    unit_bytes = bytes_of(model, options.components)
    requests = chosen(options.workload, options.requests, pools.max_len)
    settings = {"core": options.core, "compat": engine.compat}
    evicting = settings | ({"eviction": options.eviction} if options.eviction else {})
    launches = (
        replace(prepare(engine, options.base), options=settings),
        replace(prepare(engine, options.head), options=evicting),
    )
    out = options.out or Path("outputs") / "diff" / f"{datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
    out.mkdir(parents=True, exist_ok=True)
    comparison = compare(requests, pools, launches, out, until_first=options.until_first)
    explanation, row = None, comparison.first_hit or comparison.first
    if row is not None and not options.no_explanation:
        base, _ = names_of(comparison)
        say(f"request {row.number} differs from {base}'s; running up to it once more")
        explanation = explain(row, requests, pools, launches, out)
    question = (
        f"{len(requests):,} requests of {options.workload}, {options.components} attention,"
        f" {pools.device_tokens:,} tokens on the device and {pools.host_tokens:,} on the host,"
        f" bytes of {model}."
    )
    comment = to_markdown(comparison, explanation, unit_bytes, question)
    (out / "comment.md").write_text(comment)
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    dump(to_json(comparison, explanation, unit_bytes, {"asked": asked}), out / "diff.json")
    write_figure(comparison, out / "diff.png")
    print(comment)
    broken = list(filter(None, (limit.broken_by(comparison, unit_bytes) for limit in limits)))
    for said in broken:
        print(f"too much: {said}")
    if comparison.failure is not None:
        print(f"not finished: {comparison.failure}")
    print(out)
    return 2 if comparison.failure is not None else int(bool(broken))


def measure(comparison: Comparison, side: str, metric: str, unit_bytes: dict[str, int]) -> int:
    """One of `METRICS`, of `base` or `head`."""
    totals = comparison.totals(side)
    if metric in AREAS:
        return sum(
            amount * unit_bytes[name.split("/")[1]]
            for name, amount in totals.items()
            if name.startswith(AREAS[metric])
        )
    tiers = TIERS if metric == "hits" else (metric.removesuffix("_hits"),)
    return sum(totals.get(f"hit/full/{tier}", 0) for tier in tiers)


if __name__ == "__main__":
    main()

"""Hits and bytes of a series of releases, on the same requests.

python -m experiments.diff.releases 0.5.22 0.5.23 --requests 500 --out DIR

Two releases run at a time, each once. The folder keeps the answers of each release, so an
interrupted run can continue. The table marks where the hit rate changes by half a point or more
between releases; `python -m experiments.diff` explains the change.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.diff.compare import compare
from experiments.diff.engines import ENGINES, prepare, say
from experiments.diff.protocol import COMPONENTS, MOVES, TIERS, SideError
from experiments.diff.report import GIB
from experiments.diff.rooms import MODELS, bytes_of, chosen, pools_for
from hicache.cli.command import parser_of

NOTABLE_POINTS = 0.5


def main() -> None:
    parser = parser_of("python -m experiments.diff.releases", __doc__)
    parser.add_argument("releases", nargs="+", help="releases to run, in order")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="sglang")
    parser.add_argument("--workloads", default="mooncake_conversation,weka_agentic")
    parser.add_argument("--components", default=",".join(COMPONENTS))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for workload in options.workloads.split(","):
        for component in options.components.split(","):
            try:
                run_missing(options, workload, component)
            except SideError as error:
                say(f"experiments.diff.releases: {error}")
            lines += table(options, workload, component)
    text = "\n".join(lines)
    (options.out / "releases.md").write_text(text + "\n")
    print(text)


def run_missing(options: argparse.Namespace, workload: str, component: str) -> None:
    missing = [
        each for each in options.releases if not place(options, workload, component, each).is_file()
    ]
    if not missing:
        return
    engine = ENGINES[options.engine]
    pools = pools_for(workload, component, "", "instant", has_storage=engine.has_storage)
    requests = chosen(workload, options.requests, pools.max_len)
    for first, second in zip(missing[::2], [*missing[1::2], missing[-1]], strict=False):
        say(f"{workload} {component}: {first}, {second}")
        launches = prepare(engine, first), prepare(engine, second)
        found = compare(requests, pools, launches, options.out)
        if found.failure is not None:
            raise SideError(f"{workload} {component}: {found.failure}")
        for side, release in (("base", first), ("head", second)):
            values = {
                "release": release,
                "hit_rate": found.hit_rate(side),
                "totals": found.totals(side),
                "hits": [getattr(row, side).hits for row in found.rows],
            }
            target = place(options, workload, component, release)
            target.write_text(json.dumps(values) + "\n")


def place(options: argparse.Namespace, workload: str, component: str, release: str) -> Path:
    name = f"{workload}-{component}-{options.requests}-{release.replace('/', '_')}.json"
    path: Path = options.out / name
    return path


def table(options: argparse.Namespace, workload: str, component: str) -> list[str]:
    unit_bytes = bytes_of(MODELS[component], component)
    lines = [
        f"**{workload}, {component}**, the first {options.requests:,} requests",
        "",
        "| release | hit rate | device | host | storage | back-up | load-back | write | read |"
        " other hits than before |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    before = None
    for release in options.releases:
        path = place(options, workload, component, release)
        if path.is_file():
            values = json.loads(path.read_text())
            lines.append(_row(values, before, unit_bytes))
            before = values
        else:
            lines.append(f"| {release} | not run |" + " |" * 8)
    return [*lines, ""]


def _row(values: dict[str, Any], before: dict[str, Any] | None, unit: dict[str, int]) -> str:
    totals = values["totals"]
    rate = f"{values['hit_rate']:.2%}"
    other = "–"
    if before is not None:
        points = 100 * (values["hit_rate"] - before["hit_rate"])
        if abs(points) >= NOTABLE_POINTS:
            rate = f"**{rate}** ({points:+.2f})"
        count = sum(
            mine != theirs for mine, theirs in zip(values["hits"], before["hits"], strict=True)
        )
        other = f"{count:,}"
    tokens = [f"{totals.get(f'hit/full/{tier}', 0):,}" for tier in TIERS]
    copied = [f"{_bytes(totals, how, unit) / GIB:,.1f} GiB" for how in MOVES]
    return f"| {values['release']} | {rate} | {' | '.join([*tokens, *copied, other])} |"


def _bytes(totals: dict[str, int], how: str, unit: dict[str, int]) -> int:
    return sum(totals.get(f"moved/{kind}/{how}", 0) * size for kind, size in unit.items())


if __name__ == "__main__":
    main()

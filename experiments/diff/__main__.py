"""Run two versions of an engine's cache on the same requests and report what differs.

See docs/diff.md.

python -m experiments.diff --engine sglang --base 0.5.22 --head 0.5.23
"""

import argparse
import re
import sys
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path

from experiments.diff import edges, in_flight, odd
from experiments.diff.compare import Comparison, compare
from experiments.diff.engines import ENGINES, OURS, RELEASE, Launch, prepare, say
from experiments.diff.explain import Explanation, explain
from experiments.diff.protocol import TIERS, Pools, SideError
from experiments.diff.report import dump, names_of, to_json, to_markdown, write_figure
from experiments.diff.rooms import CHUNK, MODELS, bytes_of, chosen, pools_for
from hicache.cli.command import parser_of
from hicache.workload.workload import KINDS


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit for how much one metric may change between two versions of a cache.

    `hits:-0.5%` is exceeded if `hits` falls by 0.5% or more.
    """

    metric: str
    percent: float

    @classmethod
    def parse(cls, text: str) -> "Limit":
        found = re.fullmatch(rf"({'|'.join(METRICS)}):([+-]?\d+(?:\.\d+)?)%", text)
        if found is None or not float(found[2]):
            raise SideError(
                f"--fail-on must be METRIC:-0.5% or METRIC:+3%, with METRIC one of"
                f" {', '.join(METRICS)}, got {text!r}"
            )
        return cls(found[1], float(found[2]))

    def broken_by(self, comparison: Comparison, unit_bytes: dict[str, int]) -> str | None:
        base, head = (measure(comparison, side, self.metric, unit_bytes) for side in SIDES)
        if base == head:
            return None
        change = 100 * (head - base) / base if base else float("inf")
        if (change <= self.percent) if self.percent < 0 else (change >= self.percent):
            return (
                f"{self.metric} changed by {change:+.2f} % from {base:,} to {head:,}; the limit is"
                f" {self.percent:+g} %"
            )
        return None


SIDES = ("base", "head")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
AREAS = {"copied_bytes": "moved/", "evicted_bytes": "evicted/"}
METRICS = ("hits", *(f"{tier}_hits" for tier in TIERS), *AREAS)


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        sys.exit(run(options))
    except (SideError, ValueError, FileNotFoundError) as error:
        print(f"experiments.diff: {error}", file=sys.stderr)
        sys.exit(2)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("python -m experiments.diff", __doc__)
    add = parser.add_argument
    add("--engine", choices=sorted(ENGINES), default="sglang", help="engine to compare")
    what = f"a release, a checkout, a wheel, or {OURS}"
    add("--base", required=True, help=what)
    add("--head", required=True, help=what)
    workloads = ", ".join([edges.NAME, odd.NAME, *KINDS])
    add("--workload", default="mooncake_conversation", help=f"one of {workloads}")
    add("--path", help="path of the trace file, for workloads that read one")
    add("--seed", type=int, default=0, help=f"draws the requests of the {odd.NAME} workload")
    add("--requests", type=int, default=2000, help="number of requests to run")
    add("--components", choices=MODELS, default="full", help="kinds of KV that the model has")
    add(
        "--pools",
        default="",
        help="pool sizes other than the workload's, as device_tokens=262144,host_tokens=0,...: "
        + ", ".join(each.name for each in fields(Pools)),
    )
    add("--chunk", type=int, default=CHUNK, help="prompt tokens that are computed at once")
    add(
        "--copies",
        default="instant",
        help="when copies complete: instant, or delayed:N (after N more requests)",
    )
    add(
        "--write-policy",
        choices=WRITE_POLICIES,
        default=WRITE_POLICIES[0],
        help="write policy of both sides",
    )
    add("--core", choices=("python", "rust"), default="python", help="core of the cache to run")
    add("--eviction", help="eviction policy of head: one of the engine's, or module:Class")
    add(
        "--in-flight",
        type=int,
        default=0,
        metavar="N",
        help="compare the schedulers step by step, with up to N requests at a time",
    )
    add(
        "--synchronous",
        action="store_true",
        help="plan each step after the one before it has ended, in both engines (with --in-flight)",
    )
    add(
        "--mixed",
        action="store_true",
        help="steps with prompts also decode, as with SGLang's --enable-mixed-chunk (--in-flight)",
    )
    add(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a setting of head, where that is {OURS}; repeatable",
    )
    add(
        "--speculation",
        choices=("eagle",),
        help="the caches serve a draft model, too: keys and dropped blocks, with no draft accepted",
    )
    add("--stages", type=int, default=1, help="stages of SGLang's pipeline, one cache each")
    add(
        "--own-clocks",
        action="store_true",
        help="plant a mistake: each stage counts the copies that have ended on it (with --stages)",
    )
    add("--corrected", action="store_true", help="correct three faults of vLLM (docs/validity.md)")
    add("--model", help="model whose KV sizes convert tokens to bytes, a name in conf/model")
    add(
        "--fail-on",
        action="append",
        default=[],
        metavar="METRIC:-0.5%",
        help="exit with 1 if the metric of head changes by this much or more; repeatable",
    )
    add(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the answers of base, a release, here: the next comparison with it reads them",
    )
    add("--out", type=Path, help="directory for the report")
    add("--until-first", action="store_true", help="stop after the first request whose hits differ")
    add(
        "--no-explanation", action="store_true", help="do not rerun to explain the first difference"
    )
    add("--no-edges", action="store_true", help=f"do not run the {edges.NAME} workload first")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    limits = [Limit.parse(text) for text in options.fail_on]
    engine = ENGINES[options.engine]
    model = options.model or MODELS[options.components]
    unit_bytes = bytes_of(model, options.components)
    parts = [Part(options)]
    if not options.in_flight and options.workload != edges.NAME and not options.no_edges:
        parts = [Part(each) for each in edges_of(options)] + parts
    settings = {"core": options.core, "compat": engine.compat, "write_policy": options.write_policy}
    if options.in_flight and not options.synchronous:
        settings["scheduling"] = "asynchronous"
    if options.mixed:
        settings["mixed"] = "yes"
    if options.speculation:
        settings["speculation"] = options.speculation
    if options.stages > 1:
        settings["stages"] = f"{options.stages}"
        if options.own_clocks:
            settings["votes"] = "no"
    if options.base.startswith(engine.keeps_windows):
        settings["windows"] = "every"
    if options.corrected:
        if options.engine != "vllm":
            raise SideError(f"--corrected is for --engine vllm, got {options.engine}")
        settings["corrected"] = "yes"
    evicting = settings | ({"eviction": options.eviction} if options.eviction else {})
    if options.setting:
        evicting |= {"settings": " ".join(options.setting)}
    if options.keep is not None and RELEASE.fullmatch(options.base) is None:
        raise SideError(f"--keep is for a release, whose code does not change; got {options.base}")
    launches = (
        replace(prepare(engine, options.base), options=settings, kept=options.keep),
        replace(prepare(engine, options.head), options=evicting),
    )
    out = options.out or Path("outputs") / "diff" / f"{datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
    if options.in_flight:
        return fly(parts[-1], launches, out)
    status = 0
    for part in parts:
        folder = out if part is parts[-1] else out / part.name
        comparison = part.examine(launches, unit_bytes, model, folder)
        said = [f"not finished: {comparison.failure}"] if comparison.failure is not None else []
        broken = filter(None, (limit.broken_by(comparison, unit_bytes) for limit in limits))
        said += [f"limit exceeded: {each}" for each in broken]
        for line in said:
            print(f"{part.name}: {line}")
        status = max(status, 2 if comparison.failure is not None else int(bool(said)))
    print(out)
    return status


def fly(part: "Part", launches: tuple[Launch, Launch], folder: Path) -> int:
    options = part.options
    folder.mkdir(parents=True, exist_ok=True)
    comparison = in_flight.fly(
        part.requests,
        part.pools,
        launches,
        folder,
        seed=options.seed,
        until_first=options.until_first,
    )
    question = (
        f"{part.question}; up to {options.in_flight} requests in flight, seed {options.seed}."
    )
    comment = in_flight.to_markdown(comparison, question)
    (folder / "comment.md").write_text(comment)
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    dump(in_flight.to_json(comparison, asked), folder / "diff.json")
    print(comment)
    print(folder)
    return 2 if comparison.failure is not None else 0


def edges_of(options: argparse.Namespace) -> list[argparse.Namespace]:
    own = {
        "workload": edges.NAME,
        "path": None,
        "pools": "",
        "requests": edges.COUNT,
        "until_first": False,
    }
    return [
        argparse.Namespace(**{**vars(options), **own, "copies": copies}) for copies in edges.COPIES
    ]


class Part:
    """A workload of the comparison: the requests and pool sizes that the options ask for.

    Raises:
        SideError: the pool sizes are invalid, or no request fits into the pools.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.pools = pools_for(
            options.workload,
            options.components,
            options.pools,
            options.copies,
            chunk=options.chunk,
            has_storage=ENGINES[options.engine].has_storage,
        )
        if options.in_flight:  # no read from storage, whose end would depend on threads
            self.pools = replace(self.pools, in_flight=options.in_flight, has_storage=False)
        self.requests = chosen(
            options.workload, options.requests, self.pools, options.path, options.seed
        )

    @property
    def name(self) -> str:
        return f"{self.options.workload}{'-delayed' * (self.pools.copy_delay > 0)}"

    @property
    def question(self) -> str:
        return (
            f"{len(self.requests):,} requests of {self.options.workload}, {self.options.components}"
            f" attention, {self.pools.device_tokens:,} tokens on the device and"
            f" {self.pools.host_tokens:,} on the host, chunks of {self.pools.chunk_tokens:,},"
            f" {self.options.copies} copies"
        )

    def examine(
        self, launches: tuple[Launch, Launch], unit_bytes: dict[str, int], model: str, folder: Path
    ) -> Comparison:
        folder.mkdir(parents=True, exist_ok=True)
        options = self.options
        comparison = compare(
            self.requests, self.pools, launches, folder, until_first=options.until_first
        )
        question = f"{self.question}, bytes of {model}."
        asked = {name: value for name, value in vars(options).items() if name != "out"}

        def write(explanation: Explanation | None) -> str:
            comment = to_markdown(comparison, explanation, unit_bytes, question)
            (folder / "comment.md").write_text(comment)
            values = to_json(comparison, explanation, unit_bytes, {"asked": asked})
            dump(values, folder / "diff.json")
            return comment

        comment = write(None)
        write_figure(comparison, folder / "diff.png")
        row = comparison.first_hit or comparison.first
        if row is not None and not options.no_explanation:
            base, _ = names_of(comparison)
            say(f"request {row.number} differs from {base}; rerunning up to it to explain why")
            try:
                comment = write(explain(row, self.requests, self.pools, launches, folder))
            except SideError as error:
                say(f"request {row.number} cannot be explained: {error}")
        print(comment)
        return comparison


def measure(comparison: Comparison, side: str, metric: str, unit_bytes: dict[str, int]) -> int:
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

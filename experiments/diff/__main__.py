"""What does this change do to the engine's cache? See `docs/diff.md`.

python -m experiments.diff --engine sglang --base 0.5.22 --head 0.5.23
"""

import argparse
import os
import sys
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path

from omegaconf import OmegaConf

from experiments.diff.compare import Comparison, compare
from experiments.diff.engines import ENGINES, OURS, Launch, prepare
from experiments.diff.explain import Explanation, explain
from experiments.diff.protocol import COMPONENTS, TIERS, Pools, SideError
from experiments.diff.report import dump, names_of, to_json, to_markdown, write_figure
from experiments.launch.schema import CONF
from hicache.config import WorkloadConfig
from hicache.models import ModelConfig
from hicache.request import Request
from hicache.workload.build import KINDS, load_workload

# pools that make each trace compete for them, as docs/validity.md compares with
ROOMS = {
    "weka_agentic": Pools(device_tokens=1_310_720, host_tokens=3_932_160, max_len=262_144),
}
ROOM = Pools(device_tokens=524_288, host_tokens=1_572_864, max_len=131_072)
WINDOW_LEN = 1024
SWA_TOKENS = {"weka_agentic": 393_216}
NUM_STATES = {"weka_agentic": 64}
# whose bytes a token or a state has, unless --model says otherwise
MODELS = {"full": "llama3_8b", "swa": "gemma3_27b", "mamba": "qwen3_next_80b"}


@dataclass(frozen=True, slots=True)
class Limit:
    """A change of one metric that is too much: `hits:-0.5%`."""

    metric: str
    percent: float

    @classmethod
    def parse(cls, text: str) -> "Limit":
        """As typed."""
        metric, _, percent = text.partition(":")
        try:
            value = float(percent.removesuffix("%"))
        except ValueError:
            value = 0.0
        if metric not in METRICS or not percent.endswith("%") or value == 0:
            raise SideError(
                f"--fail-on wants METRIC:-0.5% or METRIC:+3%, METRIC one of {', '.join(METRICS)},"
                f" got {text!r}"
            )
        return cls(metric, value)

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
    parser = argparse.ArgumentParser(
        prog="python -m experiments.diff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", choices=sorted(ENGINES), default="sglang")
    what = f"a release, a checkout, a wheel, or {OURS}"
    parser.add_argument("--base", required=True, help=what)
    parser.add_argument("--head", required=True, help=what)
    parser.add_argument("--workload", default="mooncake_conversation", help=", ".join(KINDS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--components", choices=COMPONENTS, default="full")
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
    pools = pools_for(options.workload, options.components, options.pools, options.copies)
    model = options.model or MODELS[options.components]
    unit_bytes = bytes_of(model, options.components)
    requests = chosen(options.workload, options.requests, pools.max_len)
    engine = ENGINES[options.engine]
    launches = prepare(engine, options.base, _say), prepare(engine, options.head, _say)
    settings = {"core": options.core}
    sides = settings, settings | ({"eviction": options.eviction} if options.eviction else {})
    out = options.out or Path("outputs") / "diff" / f"{datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
    out.mkdir(parents=True, exist_ok=True)
    comparison = compare(
        requests, pools, launches, sides, out, _say, until_first=options.until_first
    )
    explanation = None
    if not options.no_explanation:
        explanation = explained(comparison, requests, launches, sides, out)
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
    broken = [
        said for limit in limits if (said := limit.broken_by(comparison, unit_bytes)) is not None
    ]
    for said in broken:
        print(f"too much: {said}")
    if comparison.failure is not None:
        print(f"not finished: {comparison.failure}")
    print(out)
    return 2 if comparison.failure is not None else int(bool(broken))


def explained(
    comparison: Comparison,
    requests: list[Request],
    launches: tuple[Launch, Launch],
    sides: tuple[dict[str, str], dict[str, str]],
    logs: Path,
) -> Explanation | None:
    """Why the first request differs: the first whose hits do, if there is one."""
    row = comparison.first_hit or comparison.first
    if row is None:
        return None
    base, _ = names_of(comparison)
    _say(f"request {row.number} differs from {base}'s; running up to it once more")
    return explain(row, requests, comparison.pools, launches, sides, logs)


def chosen(kind: str, count: int, max_len: int) -> list[Request]:
    """The first `count` requests of a workload that fit into `max_len`, in order of arrival.

    Raises:
        SideError: none fits.
    """
    workload = load_workload(
        WorkloadConfig(kind=kind), data_dir=os.environ.get("HICACHE_DATA"), seed=0
    )
    fitting = (each for each in workload.requests if each.prompt_len + each.output_len <= max_len)
    requests = [request for request, _ in zip(fitting, range(count), strict=False)]
    if not requests:
        shortest = min(each.prompt_len + each.output_len for each in workload.requests)
        raise SideError(
            f"no request of {kind} fits: the shortest has {shortest:,} tokens, and max_len is"
            f" {max_len:,}"
        )
    return requests


def pools_for(kind: str, components: str, changes: str, copies: str) -> Pools:
    """The room that suits a workload, with what `--pools` and `--copies` change.

    Raises:
        SideError: a name or a number that does not make sense.
    """
    pools = ROOMS.get(kind, ROOM)
    if components == "swa":
        swa_tokens = SWA_TOKENS.get(kind, 196_608)
        pools = replace(pools, window_len=WINDOW_LEN, swa_tokens=swa_tokens)
    elif components == "mamba":
        pools = replace(pools, num_states=NUM_STATES.get(kind, 160))
    known = {each.name: each.type for each in fields(Pools)}
    values: dict[str, object] = {}
    for part in filter(None, changes.split(",")):
        name, _, value = part.partition("=")
        if name not in known or not value.isdigit():
            raise SideError(f"--pools wants NAME=NUMBER,... of {', '.join(known)}; got {part!r}")
        values[name] = bool(int(value)) if name == "has_storage" else int(value)
    how, _, delay = copies.partition(":")
    if copies != "instant":
        if how != "delayed" or not delay.isdigit():
            raise SideError(f"--copies wants instant or delayed:N, got {copies!r}")
        values["copy_delay"] = int(delay)
    pools = replace(pools, **values)  # type: ignore[arg-type]
    if pools.host_tokens == 0:
        pools = replace(pools, has_storage=False)
    needed = pools.num_running * pools.page_size
    if pools.device_tokens < needed:
        raise SideError(
            f"device_tokens={pools.device_tokens} is less than a page for each of"
            f" {pools.num_running} requests ({needed})"
        )
    if pools.max_len > pools.device_tokens:
        raise SideError(
            f"the trace is too long for its pools: requests of up to max_len={pools.max_len:,}"
            f" tokens, and device_tokens={pools.device_tokens:,}"
        )
    return pools


def bytes_of(model: str, component: str) -> dict[str, int]:
    """Bytes of one token of KV, of window KV, and of one state, of a model in `conf/model`.

    Raises:
        SideError: there is no such model, or it has no such layers.
    """
    path = CONF / "model" / f"{model}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in path.parent.glob("*.yaml")))
        raise SideError(f"--model wants one of {known}, got {model!r}")
    values = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(values, dict)
    values.pop("defaults", None)  # the schema, for Hydra
    shape = ModelConfig(**values)  # type: ignore[arg-type]
    unit_bytes = {
        "full": shape.full_token_bytes,
        "swa": shape.swa_token_bytes,
        "mamba": shape.mamba_slot_bytes,
    }
    if unit_bytes[component] == 0:
        raise SideError(f"--model {model} keeps no {component}")
    return unit_bytes


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


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()

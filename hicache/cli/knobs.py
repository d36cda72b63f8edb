"""Every setting (knob) with its default, limits and meaning, for `--help` and docs/knobs.md.

python -m hicache.cli.knobs > docs/knobs.md

The meaning of a knob is the comment above or after its field; for an enum, the docstring of the
enum and the comments of its members.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import get_args

from hicache.config import WORKLOADS, ExperimentConfig, WorkloadConfig
from hicache.models import Figure, RateTable
from hicache.runs.schema import CONF, config_of

USAGE = """\
hicache run                                    replay the built-in workload
hicache run workload=multi_turn cache.host_gib=64
hicache run -m cache.host_gib=64,128 seed=0,1  run every combination (a sweep)
hicache run --help cache storage               show the knobs of two groups
hicache run --cfg job ...                      print the configuration, run nothing
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    name: str
    default: str
    limits: str
    meaning: str


def help_of(groups: Sequence[str]) -> str:
    """Return the `--help` text for some groups of settings, such as `cache` and `storage`.

    The text lists each setting of these groups with its default and its meaning. If `groups` is
    empty, the text lists the names of all groups.

    Raises:
        ValueError: a group does not exist.
    """
    known = groups_of()
    for group in groups:
        if group not in known:
            raise ValueError(f"unknown group {group}: the groups are {', '.join(known)}")
    if not groups:
        lines = [f"  {group:<11}{_first_line(kind)}" for group, kind in known.items()]
        presets = ["Presets, as compat=NAME:", _names("compat")]
        questions = ["Questions with their grids, as experiment=NAME:", *_questions()]
        return "\n".join([USAGE, "Groups:", *lines, "", *presets, "", *questions])
    return "\n\n".join(_help_of_group(group, known[group]) for group in groups)


def groups_of() -> dict[str, type]:
    return {
        item.name: item.type
        for item in fields(ExperimentConfig)
        if isinstance(item.type, type) and is_dataclass(item.type)
    }


def knobs_of(kind: type, prefix: str) -> Iterator[Knob]:
    """Yield the settings of a group; one that holds a mapping of further ones counts as one."""
    assert is_dataclass(kind)
    comments = comments_of(kind)
    for item in fields(kind):
        nested = _mapping_of(item)
        meaning = _first_line(nested) if nested else comments.get(item.name)
        yield Knob(
            name=f"{prefix}{item.name}",
            default="{}" if nested else _default(item),
            limits=_limits(item),
            meaning=" ".join(filter(None, (meaning, _choices(item)))),
        )


def parts_of(group: str, kind: type) -> Iterator[tuple[str, list[Knob]]]:
    """Yield the settings of a group part by part, each with a heading, "" for the group's own."""
    assert is_dataclass(kind)
    yield "", list(knobs_of(kind, f"{group}."))
    for item in fields(kind):
        nested, place = _mapping_of(item), f"{group}.{item.name}"
        if nested:
            yield f"Keys of {place}", list(knobs_of(nested, f"{place}."))
    if kind is WorkloadConfig:
        common = {knob.name for knob in knobs_of(kind, f"{group}.")}
        for own in dict.fromkeys(WORKLOADS.values()):
            kinds = ",".join(name for name, each in WORKLOADS.items() if each is own)
            knobs = [each for each in knobs_of(own, f"{group}.") if each.name not in common]
            yield f"With workload={kinds}", knobs


def _mapping_of(item: Field[object]) -> type | None:
    kind = item.type
    if isinstance(kind, type) and is_dataclass(kind) and kind not in (Figure, RateTable):
        return kind
    return None


def as_markdown() -> str:
    parts = [
        "# Every knob",
        "`group.knob=value` on the command line sets a knob, and `group=option` loads a file of "
        "`conf/`, which sets several knobs of a group. `null` is the None of the descriptions; "
        "`???` marks a knob that a file in `conf/` sets. `module:Class` names a class of your own.",
        "A default below holds unless a file in `conf/` sets another: a run without options takes "
        "`storage=memory`, `workload=builtin` and the other choices of `conf/config.yaml`. "
        "`hicache run --cfg job ...` prints the values that a run would have.",
        "This page is generated from the comments in `hicache/config.py` and `hicache/models/` by "
        "`python -m hicache.cli.knobs > docs/knobs.md`.",
    ]
    groups = groups_of()
    top = [knob for knob in knobs_of(ExperimentConfig, "") if knob.name not in groups]
    parts += ["## At the top", _table(top)]
    for group, kind in groups.items():
        parts += [f"## {group}", _prose(kind), _options_line(group)]
        for heading, knobs in parts_of(group, kind):
            parts += [heading and f"### {heading}", _table(knobs)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _help_of_group(group: str, kind: type) -> str:
    lines = [f"{group}: {_prose(kind)}", _options_line(group)]
    lines.append("Values are those of a run without options:")
    plain = config_of()
    for heading, knobs in parts_of(group, kind):
        lines += [f"{heading}:"] if heading else []
        for knob in knobs:
            value = _value_of(plain, knob)
            head = f"  {knob.name}={value}"
            lines.append(f"{head}  ({knob.limits})" if knob.limits else head)
            lines += textwrap.wrap(
                knob.meaning, 92, initial_indent="      ", subsequent_indent="      "
            )
    return "\n".join(line for line in lines if line)


def _value_of(config: ExperimentConfig, knob: Knob) -> str:
    try:
        value = attrgetter(knob.name)(config)
    except AttributeError:  # of a kind of workload that is not chosen
        return knob.default
    return knob.default if is_dataclass(value) else _shown(value)


def _table(knobs: Iterable[Knob]) -> str:
    rows = [
        f"| `{knob.name}` | `{knob.default}` | {knob.limits} | {knob.meaning} |".replace(
            "|  |", "| |"
        )
        for knob in knobs
    ]
    return "\n".join(["| knob | default | limits | meaning |", "|---|---|---|---|", *rows])


def _prose(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").splitlines()[0]


def _options_line(group: str) -> str:
    options = options_of(group)
    return f"Options: {', '.join(options)}." if len(options) > 1 else ""


def _names(group: str) -> str:
    return textwrap.fill(
        ", ".join(options_of(group)), 98, initial_indent="  ", subsequent_indent="  "
    )


def _questions() -> list[str]:
    paths = {name: CONF / "experiment" / f"{name}.yaml" for name in options_of("experiment")}
    return [f"  {name:<22}{first_sentence(path)}" for name, path in paths.items()]


def first_sentence(path: Path) -> str:
    """Return the first sentence of the comment that opens a file of `conf/`."""
    lines = [line for line in path.read_text().splitlines() if line != "# @package _global_"]
    told = " ".join(line[2:] for line in takewhile(lambda line: line.startswith("# "), lines))
    return re.split(r"(?<=[.?]) ", told.removeprefix("Question: "), maxsplit=1)[0]


def options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _default(item: Field[object]) -> str:
    value = item.default
    if value is MISSING and item.default_factory is not MISSING:
        value = item.default_factory()
    return _shown(value)


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Figure | RateTable):
        return "per machine"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _limits(item: Field[object]) -> str:
    limits = item.metadata
    if not limits:
        return ""
    least, above, most = limits["least"], limits["above"], limits["most"]
    said = []
    if limits["one_of"] or limits["ours"]:
        said.append(", ".join(limits["one_of"] or (*limits["ours"], "module:Class")))
    if most is not None:
        said.append(f"{least} to {most}")
    elif least is not None:
        said.append(f"at least {least}")
    if above is not None:
        said.append(f"above {above}")
    if limits["only"]:
        said.append(f"used only with {limits['only']}")
    return "; ".join(said)


def _choices(item: Field[object]) -> str:
    kinds = [item.type, *get_args(item.type)]
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if not enums:
        return ""
    comments = comments_of(enums[0])
    members = [
        f"{member.name} ({comments[member.name]})" if member.name in comments else member.name
        for member in enums[0]
    ]
    return f"{_first_line(enums[0]).rstrip('.')}: {', '.join(members)}."


@cache
def comments_of(kind: type) -> dict[str, str]:
    found = {**comments_of(kind.__base__)} if is_dataclass(kind.__base__) else {}
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    for node in ast.iter_child_nodes(ast.parse(source).body[0]):
        if not isinstance(node, ast.AnnAssign | ast.Assign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        first = node.lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        told = [line.partition("# ")[2] for line in lines[first : node.end_lineno] if "# " in line]
        if told:
            found[ast.unparse(target)] = " ".join(told)
    return found


if __name__ == "__main__":
    print(as_markdown(), end="")

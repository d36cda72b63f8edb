"""List what a run can use, one line each.

hicache list                      models, machines, workloads, policies and experiments
hicache list models experiments   two of these lists
"""

import inspect
from collections.abc import Sequence
from functools import partial

from hicache.cli.command import parser_of
from hicache.cli.knobs import first_sentence, options_of
from hicache.config import STOCK_POLICIES
from hicache.policies.stock import STOCK
from hicache.runs.schema import CONF

GROUPS = {
    "models": "model",
    "machines": "hardware",
    "workloads": "workload",
    "policies": "cache.policy",
    "experiments": "experiment",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache list", __doc__)
    parser.add_argument("lists", nargs="*", metavar="LIST", help=f"of {', '.join(GROUPS)}")
    lists = parser.parse_args(arguments).lists
    if unknown := [each for each in lists if each not in GROUPS]:
        parser.error(f"no list {unknown[0]}: the lists are {', '.join(GROUPS)}")
    print("\n\n".join(list_of(each) for each in lists or GROUPS))


def list_of(name: str) -> str:
    """Return the list `name` as text: how to name an entry in a run, then a line for each."""
    group = GROUPS[name]
    if name == "policies":
        lines = {each: _about_policy(each) for each in STOCK_POLICIES}
        lines["module:Class"] = "Your own class: see `hicache check-policy --help`."
    else:
        paths = {each: CONF / group / f"{each}.yaml" for each in options_of(group)}
        lines = {each: first_sentence(path) for each, path in paths.items()}
    rows = [f"  {each:<23}{line}" for each, line in lines.items()]
    return "\n".join([f"{name}, as {group}=NAME:", *rows])


def _about_policy(name: str) -> str:
    if name == "lru":
        return "Evicts the least recently used data first (the default)."
    policy = STOCK[name]
    described = policy.args[0] if isinstance(policy, partial) else policy
    return (inspect.getdoc(described) or "").splitlines()[0]

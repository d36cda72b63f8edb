"""Check your policy class on small runs with tight pools and slow storage.

hicache check-policy my_policies:Mine
hicache check-policy my_policies:Mine --args weight=0.5
hicache check-policy my_policies:Mine --knob scheduler.order

The program checks every invariant of the cache after every step. A run must give the same result
when it is repeated and when it takes one decode step at a time, and two ranks must make equal
decisions.
"""

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter

from hicache import experiment
from hicache.cache.named import loaded
from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.schema import config_of
from hicache.engine.policy import METHODS
from hicache.results.metrics import Result, summarize

# the method that a class for each knob must have; a cache.policy class has some of METHODS
POINTS = {
    "cache.checkpoints": "lengths",
    "prefetch.stop": "waits",
    "scheduler.order": "sort_key",
    "scheduler.swa_budget": "tokens",
}
TIGHT = (
    "workload=agents", "workload.limit=40", "storage=memory", "storage.read_gbps=0.5",
    "workload.start=warm_storage", "prefetch.threshold=64", "engine.check_invariants=true",
)  # fmt: skip
POOLS = {
    "tiny_hybrid": ("model=tiny_hybrid", "cache.device_gib=0.06", "cache.host_gib=0.06"),
    "llama3_8b": ("model=llama3_8b", "cache.device_gib=8", "cache.host_gib=10"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache check-policy", __doc__)
    parser.add_argument("policy", metavar="module:Class", help="class to check")
    parser.add_argument(
        "--knob",
        choices=("cache.policy", *POINTS),
        help="knob that the class is for; required if its methods fit several knobs",
    )
    parser.add_argument(
        "--args", nargs="*", default=[], metavar="NAME=NUMBER", help="keyword arguments of it"
    )
    options = parser.parse_args(arguments)
    with in_one_sentence():
        knob = options.knob or knob_of(options.policy)
        settings = [f"{knob}={options.policy}", *(f"{knob}_args.{each}" for each in options.args)]
        print(f"checking {options.policy} as {knob}")
        for told in findings(knob, settings):
            print(f"  {told}")


def knob_of(policy: str) -> str:
    """Return the setting that a policy class is written for, such as `scheduler.order`.

    The methods of the class determine the setting. `policy` has the form `module:Class`.

    Raises:
        ValueError: the class cannot be loaded, or its methods fit no setting or several settings.
    """
    module, _, name = policy.partition(":")
    if not name:
        raise ValueError(f"the policy must be given as module:Class, got {policy}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{policy} cannot be loaded: {error}") from error
    return knob_of_class(found)


def knob_of_class(policy: type) -> str:
    knobs = [knob for knob, method in POINTS.items() if hasattr(policy, method)]
    single = {"sort_key", *(("may_stop", "deadline_ns") if hasattr(policy, "waits") else ())}
    if any(hasattr(policy, method) for method in METHODS if method not in single):
        return "cache.policy"
    if len(knobs) != 1:
        name = getattr(policy, "__name__", policy)
        wanted = ", ".join(f"{method} ({knob})" for knob, method in POINTS.items())
        raise ValueError(
            f"{name} must have the methods of exactly one of {wanted}; otherwise pass --knob"
        )
    return knobs[0]


def findings(knob: str, settings: Sequence[str]) -> Iterator[str]:
    """Test a policy class on small runs, and yield one line for each passed check.

    Args:
        knob: the setting that selects the policy class, such as `cache.policy`.
        settings: the class in the form `knob=module:Class`, followed by the settings of its
            arguments.

    Raises:
        ValueError: a run gave other results when it was repeated, or when it decoded one step at a
            time.
    """
    for model, pools in POOLS.items():
        base = (*TIGHT, *pools)
        first = _run(*base, *settings)
        yield f"{model}: {len(first.records)} requests, every invariant held after every step"
        if _summary(_run(*base, *settings)) != _summary(first):
            raise ValueError(f"{settings[0]}: two equal runs on {model} gave different results")
        if _summary(_run(*base, *settings, "engine.jump=false")) != _summary(first):
            raise ValueError(
                f"{settings[0]}: taking one decode step at a time changed the result on {model}"
            )
        yield f"{model}: the same result when repeated, and one decode step at a time"
        default = _summary(_run(*base))
        same = "NO DIFFERENCE from" if default == _summary(first) else "results differ from"
        yield f"{model}: {same} the default {knob}={attrgetter(knob)(config_of(*base))}"
    if hasattr(loaded(knob, settings[0].partition("=")[2]), "prefetch"):
        yield "two ranks were not run: prefetch(...) needs parallel.ranks=1"
        return
    _run(*base, *settings, "parallel.ranks=2")
    yield "two ranks made equal decisions"


def _run(*overrides: str) -> Result:
    return experiment.run(config_of(*overrides))


def _summary(result: Result) -> str:
    return json.dumps(summarize(result.records, result.measures), sort_keys=True)


if __name__ == "__main__":
    sys.path.insert(0, "")
    main()

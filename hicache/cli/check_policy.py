"""Check your policy class on small runs with tight pools and slow storage.

hicache check-policy my_policies:Mine
hicache check-policy my_policies:Mine --args weight=0.5

The program checks every invariant of the cache after every step of one run. It repeats the run
without these checks, also with one decode step at a time: the result must be the same. Two ranks
must make equal decisions. A class that routes requests runs on two engines. The program also prints
how often each method was called.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from inspect import getattr_static, isfunction
from unittest.mock import patch

from hicache import experiment
from hicache.cli.command import in_one_sentence, parser_of
from hicache.policies.policy import METHODS
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of
from hicache.user_code import loaded

TIGHT = (
    "workload=agents", "workload.limit=40", "storage=memory", "storage.read_gbps=0.5",
    "workload.start=warm_storage", "prefetch.threshold=64",
)  # fmt: skip
CHECKED = "engine.check_invariants=true"  # takes ten times as long as the run itself
POOLS = {
    "tiny_hybrid": (
        "model=tiny_hybrid", "cache.device_gib=0.035", "cache.host_gib=0.03",
        "cache.device.share.mamba=0.02", "cache.host.share.mamba=0.015",
    ),
    "llama3_8b": ("model=llama3_8b", "cache.device_gib=8", "cache.host_gib=10"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache check-policy", __doc__)
    parser.add_argument("policy", metavar="module:Class", help="class to check")
    parser.add_argument(
        "--args", nargs="*", default=[], metavar="NAME=NUMBER", help="keyword arguments of it"
    )
    options = parser.parse_args(arguments)
    with in_one_sentence():
        print(f"checking {options.policy}")
        arguments = [f"cache.policy_args.{each}" for each in options.args]
        for told in findings([f"cache.policy={options.policy}", *arguments]):
            print(f"  {told}")


def findings(settings: Sequence[str]) -> Iterator[str]:
    """Test a policy class on small runs, and yield one line for each passed check.

    Args:
        settings: `cache.policy=module:Class`, followed by the settings of its arguments.

    Raises:
        ValueError: a run gave other results when it was repeated, or when it decoded one step at a
            time.
    """
    policy = loaded(*settings[0].split("=", 1))
    methods = [each for each in dir(policy) if each[0] != "_" and callable(getattr(policy, each))]
    others = [each for each in methods if each not in METHODS]
    if others:
        yield f"no methods of a policy, so hicache never calls them: {', '.join(others)}"
    engines = ("parallel.replicas=2",) if "route" in methods else ()
    for model, pools in POOLS.items():
        base = (*TIGHT, *pools, *engines)
        first = _run(*base, *settings, CHECKED)
        num = first["request/count"]
        yield f"{model}: {num} requests, every invariant held after every step"
        counts: dict[str, Counter[object]] = {
            each: Counter()
            for each in methods
            if each in METHODS
            if isfunction(getattr_static(policy, each))
        }
        with ExitStack() as stack:
            for each, answers in counts.items():
                method = _counting(getattr(policy, each), answers)
                stack.enter_context(patch.object(policy, each, method))
            second = _run(*base, *settings)
        if second != first:
            raise ValueError(f"{settings[0]}: two equal runs on {model} gave different results")
        if _run(*base, *settings, "engine.jump=false") != first:
            is_untimed = "may_stop" in methods and "deadline_ns" not in methods
            raise ValueError(
                f"{settings[0]}: taking one decode step at a time changed the result on {model}"
                + "; a may_stop that depends on the time needs deadline_ns" * is_untimed
            )
        yield f"{model}: the same result when repeated, and one decode step at a time"
        yield f"{model}: calls: {', '.join(_told(*each) for each in counts.items()) or 'none'}"
        if _run(*base) == first:
            yield (
                f"{model}: NO DIFFERENCE from a run without the policy: it had nothing to decide "
                "here, or decided as the settings do"
            )
        else:
            yield f"{model}: results differ from a run without the policy"
    if "prefetch" in methods:
        yield "two ranks were not run: prefetch(...) needs parallel.ranks=1"
        return
    _run(*base, *settings, "parallel.ranks=2", CHECKED)
    yield "two ranks made equal decisions"


def _counting(method: Callable[..., object], answers: Counter[object]) -> Callable[..., object]:
    @wraps(method)
    def counted(*arguments: object, **named: object) -> object:
        answer = method(*arguments, **named)
        answers[answer if answer is None or isinstance(answer, bool) else "other"] += 1
        return answer

    return counted


def _told(name: str, answers: Counter[object]) -> str:
    if name.startswith("on_") or set(answers) <= {"other"}:
        return f"{name} {answers.total():,}"
    split = [f"{answer} {count:,}" for answer, count in answers.most_common()]
    return f"{name} {answers.total():,} ({', '.join(split)})"


def _run(*overrides: str) -> dict[str, float]:
    result = experiment.run(config_of(*overrides))
    return summarize(result.records, result.measures)

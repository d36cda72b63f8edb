"""Scenarios over the whole space of settings break no invariant.

`python -m tests.fuzz` tries them by hand; a finding names the command that repeats it.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from hicache.results.metrics import RequestRecord
from hicache.runs.schema import known_keys
from tests.fuzz.knobs import KNOBS, UNDRAWN
from tests.fuzz.scenario import PLAIN, Choices, draw, plan_of
from tests.fuzz.shrink import Finding, examine, find, try_all
from tests.fuzz.trial import (
    MOST_MOMENTS,
    BoundedClock,
    HangError,
    Trial,
    check_equal,
    check_records,
    try_choices,
)

SEED = 0
# those left out take as long as ten others, most with pages of one token; they are among the many
SMALL = sorted({*range(33)} - {4, 13, 15, 16, 18, 19, 21, 22})
LARGE = 2000


@pytest.mark.parametrize("number", SMALL)
def test_scenario_breaks_no_invariant(number: int) -> None:
    found = find(f"{SEED}/{number}")
    assert not isinstance(found, Finding), f"\n{found}"


@pytest.mark.soak
def test_many_scenarios_break_no_invariant_and_three_in_ten_use_all_tiers() -> None:
    found = list(try_all([f"{SEED}/{number}" for number in range(LARGE)]))
    findings = [each for each in found if isinstance(each, Finding)]
    assert not findings, "\n" + "\n".join(map(str, findings))
    assert sum(found) / LARGE >= 0.3


# -- the tools that try scenarios ----------------------------------------------------------------


def test_scenario_depends_on_its_seed_and_number_alone() -> None:
    alone = draw(SEED, 7)
    assert [draw(SEED, number) for number in range(8)][7] == alone


def test_choice_that_conflicts_with_a_fixed_choice_becomes_plain() -> None:
    drawn = [draw(SEED, number, {"roles": "one_each"}) for number in range(40)]
    assert {each["roles"] for each in drawn} == {"one_each"}
    assert any(draw(SEED, number)["compat"] == "vllm_0_33" for number in range(40))
    assert all(each["compat"] != "vllm_0_33" for each in drawn)


def test_every_setting_is_drawn_or_listed_as_undrawn() -> None:
    drawn = {key for knob in KNOBS for key in knob.keys}
    for workload in ("talk", "chat", "agents"):
        more = {"kinds": "all", "workload": workload, "pools.storage": "3.0"}
        drawn |= set(plan_of({**PLAIN, **more}).overrides)
    areas = ("workload", "parallel", "cache", "prefetch", "scheduler", "storage", "engine")
    groups = {"storage.faults", "parallel.faults", "cache.device", "cache.host"}
    drawn |= {key.rpartition(".")[0] for key in drawn if ".share." in key}
    knobs = {key for key in known_keys() if "." in key and key.split(".")[0] in areas} - groups
    assert knobs - drawn == UNDRAWN


def test_clock_that_is_read_too_often_reports_a_hang() -> None:
    clock = BoundedClock()
    for _ in range(MOST_MOMENTS):
        clock.wait_until(0)
    with pytest.raises(HangError):
        clock.wait_until(0)


def test_finding_keeps_only_the_choices_and_requests_that_its_error_needs() -> None:
    wanted = {"kinds": "all", "cache.page_size": "512"}

    def attempt(tried: Choices, limit: int | None) -> Trial:
        if all(tried[knob] == value for knob, value in wanted.items()) and (limit or 40) >= 5:
            raise ValueError(f"request {tried['seed']} is lost: {limit}")
        raise KeyError("another error")

    found = examine("0/1", draw(SEED, 1) | wanted, None, attempt)
    assert isinstance(found, Finding)
    assert (found.choices, found.limit) == (wanted, 5)
    assert "--limit 5 kinds=all cache.page_size=512" in str(found)


@pytest.fixture(scope="module")
def plain() -> Trial:
    return try_choices(PLAIN)


def test_changed_record_makes_two_runs_differ(plain: Trial) -> None:
    last = replace(plain.records[-1], num_steps=plain.records[-1].num_steps + 1)
    other = replace(plain, records=[*plain.records[:-1], last])
    with pytest.raises(AssertionError, match="another run differs"):
        check_equal(plain, other, "another run")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda records: records[1:], "requests came"),
        (lambda records: [records[0], *records], "are different"),
        (lambda records: _first(records, queue_ns=-1), "has a queue of -1 ns"),
        (lambda records: _first(records, computed_len=0), "at most"),
        (lambda records: _first(records, output_len=0), "got 0 tokens"),
        (lambda records: _first(records, finish_ns=0), "finished before"),
    ],
)
def test_impossible_record_is_an_error(
    plain: Trial, spoil: Callable[[list[RequestRecord]], list[RequestRecord]], complaint: str
) -> None:
    plan = plan_of(PLAIN)
    check_records(plan, plain.records)
    with pytest.raises(AssertionError, match=complaint):
        check_records(plan, spoil(list(plain.records)))


def _first(records: list[RequestRecord], **changes: int) -> list[RequestRecord]:
    return [replace(records[0], **changes), *records[1:]]

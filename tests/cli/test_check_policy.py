import re

import pytest

from hicache import experiment
from hicache.cache.checked import PolicyError
from hicache.cli import check_policy
from hicache.runs.errors import report_error
from hicache.runs.schema import config_of

OWN = f"{__name__}:"


class Longest:
    """Evicts the longest leaf first."""

    def rank(self, entry, tier, kind):
        return (-entry.count, entry.used)

    def admit(self, entry, source, target, load):
        return True

    def admits(self):
        raise AssertionError("hicache called a method that no policy has")

    @staticmethod
    def deadline_ns(prefetch):
        return None

    def may_stop(self, prefetch, now_ns):
        return prefetch.is_complete


class Boom:
    """Fails when it is asked for the thirtieth time."""

    def __init__(self, world):
        self._asked = 0

    def sort_key(self, req, match):
        self._asked += 1
        return 1 / (30 - self._asked)


def test_a_good_class_is_told_what_was_tried(capsys, monkeypatch):
    monkeypatch.setattr(check_policy, "TIGHT", (*check_policy.TIGHT, "workload.limit=10"))
    check_policy.main([OWN + "Longest"])
    printed = capsys.readouterr().out
    assert "two ranks made equal decisions" in printed
    assert "NO DIFFERENCE from" not in printed
    assert "so hicache never calls them: admits\n" in printed
    calls = re.findall(r"calls: admit ([\d,]+) \(True \1\), may_stop .*, rank [\d,]+\n", printed)
    assert len(calls) == 2


class ByTime:
    """Stops at some times, and names no deadline."""

    def may_stop(self, prefetch, now_ns):
        return prefetch.is_complete or now_ns // 1_000_000 % 50 == 0


def test_a_class_that_stops_by_the_time_is_told_to_name_its_deadline(capsys):
    with pytest.raises(SystemExit):
        check_policy.main([OWN + "ByTime"])
    assert "needs deadline_ns" in capsys.readouterr().err


class Eraser:
    def on_hit(self, entry, request):
        entry.hits = 0


def test_what_a_policy_is_told_of_an_entry_cannot_be_set(capsys):
    with pytest.raises(SystemExit):
        check_policy.main([OWN + "Eraser"])
    assert "property 'hits' of 'Entry' object has no setter" in capsys.readouterr().err


def test_a_bad_class_ends_in_its_line_and_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        check_policy.main([OWN + "Boom"])
    assert ended.value.code == 1
    told = capsys.readouterr().err.splitlines()
    assert any("return 1 / (30 - self._asked)" in line for line in told)
    assert told[0].startswith(f"cache.policy={OWN}Boom: sort_key(")
    assert told[0].endswith("raised ZeroDivisionError: division by zero")


@pytest.mark.parametrize("name", ["OWN", "Missing", ""])
def test_what_is_no_class_is_refused_in_one_sentence(name, capsys):
    with pytest.raises(SystemExit) as ended:
        check_policy.main([OWN + name])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_leaves_the_line_the_class_and_the_question_behind(tmp_path, capsys):
    config = config_of("workload=agents", "workload.limit=40", f"cache.policy={OWN}Boom")
    with pytest.raises(PolicyError) as broken:
        experiment.run(config)
    assert report_error(broken.value, tmp_path) == 1
    told = (tmp_path / "error.txt").read_text()
    assert "return 1 / (30 - self._asked)" in told
    assert told.splitlines()[0].startswith(f"cache.policy={OWN}Boom: sort_key(")
    assert capsys.readouterr().err == told


class Alternate:
    """Sends every second request to the second engine."""

    def __init__(self, world):
        self._next = 1

    def route(self, request, engines):
        self._next = 1 - self._next
        return self._next


def test_a_router_is_checked_on_two_engines(capsys, monkeypatch):
    monkeypatch.setattr(check_policy, "TIGHT", (*check_policy.TIGHT, "workload.limit=10"))
    check_policy.main([OWN + "Alternate"])
    assert "two ranks made equal decisions" in capsys.readouterr().out

import re

import pytest

from hicache.cli import check_policy

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


class Alternate:
    """Sends every second request to the second engine."""

    def __init__(self, world):
        self._next = 1

    def route(self, request, engines):
        self._next = 1 - self._next
        return self._next


class Boom:
    """A policy whose eighth call of `sort_key` raises ZeroDivisionError."""

    def __init__(self, world):
        self._asked = 0

    def sort_key(self, req, match):
        self._asked += 1
        return 1 / (8 - self._asked)


class ByTime:
    """A prefetch policy that stops by the clock, but does not define the `deadline_ns` needed."""

    def may_stop(self, prefetch, now_ns):
        return prefetch.is_complete or now_ns // 1_000_000 % 20 == 0


class Eraser:
    def on_hit(self, entry, request):
        entry.hits = 0


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    monkeypatch.setattr(check_policy, "TIGHT", (*check_policy.TIGHT, "workload.limit=10"))


@pytest.mark.parametrize("name", ["Longest", "Alternate"])
def test_a_correct_policy_class_passes_every_check(name, capsys):
    check_policy.main([OWN + name])
    printed = capsys.readouterr().out
    assert "two ranks made equal decisions" in printed  # a router is checked on two engines
    if name == "Longest":
        assert "NO DIFFERENCE from" not in printed
        assert "so hicache never calls them: admits\n" in printed
        calls = r"calls: admit ([\d,]+) \(True \1\), may_stop .*, rank [\d,]+\n"
        assert len(re.findall(calls, printed)) == 2


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("ByTime", 2, "needs deadline_ns"),
        ("Eraser", 1, "property 'hits' of 'Entry' object has no setter"),
        ("Boom", 1, "raised ZeroDivisionError: division by zero\n"),
        ("OWN", 2, f"cache.policy={OWN}OWN "),
        ("Missing", 2, f"cache.policy={OWN}Missing "),
        ("", 2, f"cache.policy={OWN} "),
    ],
)
def test_a_policy_class_that_fails_a_check_is_refused_with_the_reason(name, code, told, capsys):
    with pytest.raises(SystemExit) as ended:
        check_policy.main([OWN + name])
    printed = capsys.readouterr().err
    assert ended.value.code == code
    assert told in printed
    if name == "Boom":
        assert printed.startswith(f"cache.policy={OWN}Boom: sort_key(")
        assert "return 1 / (8 - self._asked)" in printed
    else:
        assert code == 1 or printed.count("\n") == 1

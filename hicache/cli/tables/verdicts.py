"""Finds the problems that make compared results misleading, and marks the affected rows."""

from collections.abc import Sequence
from string import ascii_lowercase

from hicache.cli.tables.groups import Group, StoredRun
from hicache.results.metrics import Status
from hicache.results.requests_file import has_requests, read_requests
from hicache.results.verdict import CLEAN, SURVIVORS, Objection, in_short, objection, objections

UNSERVED = {"request/rejected_count": "rejected", "request/aborted_count": "aborted"}


class Verdicts:
    """Finds the problems that make compared results misleading, such as an overloaded GPU.

    Each problem has a letter, which marks the affected rows of a table, and an explanation.

    Args:
        answers: lists of groups of runs. The groups within a list are compared with each other. It
            is a problem if the groups within a list finished different requests.
    """

    def __init__(self, answers: Sequence[Sequence[Group]]) -> None:
        self._survivors = {
            id(group): shares for groups in answers for group in groups if (shares := apart(groups))
        }
        groups = [group for each in answers for group in each]
        shares = [share for each in self._survivors.values() for share in each]
        self.found = [*on_runs(groups), *objection(SURVIVORS, shares)]
        self._letters = dict(zip([each.name for each in self.found], ascii_lowercase, strict=False))

    def on(self, group: Group) -> list[Objection]:
        return [*on_runs([group]), *objection(SURVIVORS, self._survivors.get(id(group), []))]

    def marked(self, text: str, group: Group) -> str:
        letters = "".join(self._letters[each.name] for each in self.on(group))
        return f"{text} {letters}".strip()

    def names(self, group: Group) -> str:
        return ", ".join(each.name for each in self.on(group))

    @property
    def notes(self) -> list[str]:
        lines = [f"{self._letters[each.name]}: {each.sentence}" for each in self.found]
        return lines or [f"verdict: {CLEAN}"]

    @property
    def line(self) -> str:
        return f"verdict: {in_short(self.found)}"


def on_runs(groups: Sequence[Group]) -> list[Objection]:
    return objections([run.summary for group in groups for run in group.runs])


def apart(groups: Sequence[Group]) -> list[float]:
    """Return the fraction of requests that finished in some groups of runs but not in all.

    The result has one fraction for each random seed and each replayed part of the trace. It omits
    fractions that are too small for a warning. It also omits runs that served different requests or
    stored no data about requests.
    """
    shares = []
    for served in dict.fromkeys(run.served for group in groups for run in group.runs):
        runs = [run for group in groups for run in group.runs if run.served == served]
        counts = {run.summary.get("request/count") for run in runs}
        is_known = all(has_requests(run.path) for run in runs)
        lost = any(run.summary.get(key) for run in runs for key in UNSERVED)
        if len(counts) > 1 or not is_known or not lost:
            continue
        survivors = [_survivors(run) for run in runs]
        in_any = set.union(*survivors)
        share = 1 - len(set.intersection(*survivors)) / max(len(in_any), 1)
        if share >= SURVIVORS.threshold:
            shares.append(share)
    return shares


def _survivors(run: StoredRun) -> set[int]:
    rows = read_requests(run.path)
    return set(rows["id"][rows["status"] == Status.finished.value])

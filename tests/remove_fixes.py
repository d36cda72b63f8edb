"""Take each fix out of the code, one at a time, and see which named test notices.

python -m tests.remove_fixes              all of them
python -m tests.remove_fixes --list
python -m tests.remove_fixes 003 004      those whose name begins so

Works on a copy of the source; ends with 1 if a removal goes unnoticed or cannot be made.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PREFETCH = "hicache/cache/prefetch/prefetcher.py"
AGREEMENT = "hicache/engine/ranks/agreement.py"
CUT = "tests/cache/test_prefetch_numbers.py"
NUMBERS = "tests/cache/test_numbers.py"
BUDGET = "tests/scheduler/test_budget.py"
WORLDS = "tests/scheduler/test_engine_worlds.py"
VOTES = "tests/engine/test_agreement.py"
REPORTS = "tests/experiments/test_reports.py"
GROUPS = "tests/engine/test_ranks.py"
SCHEDULER = "hicache/scheduler/scheduler.py"
SCENARIOS = ("tests/fuzz/test_scenarios.py", "breaks_no_law")  # 40 of them, whatever they draw
# three failures are notice enough: a scenario that fails is made small, which takes a while
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A fix, the source lines that make it, what stood there without it, and who should notice.

    `test`: a file and a word that the names of the tests share. `also`: further lines, each as
    (path, fix, without), where one place alone is not the fix.
    """

    name: str
    path: str
    fix: str
    without: str
    test: tuple[str, str]
    also: tuple[tuple[str, str, str], ...] = ()


REMOVALS = (
    Removal(
        name="000-002 a prefetch without room is cut",
        path=PREFETCH,
        fix="if full is None and config.cut is not CutPolicy.abandon:",
        without="if full is None and config.cut is None:",
        test=(CUT, "is_cut_to_the_pages_there_are"),
    ),
    Removal(
        name="000-002 a cut below the threshold gives up",
        path=PREFETCH,
        fix="if fits * self._page >= config.threshold:",
        without="if fits:",
        test=(CUT, "is_cut_to_the_pages_there_are"),
    ),
    Removal(
        name="000-002 the threshold itself is enough",
        path=PREFETCH,
        fix="if asked * page < self.config.threshold:",
        without="if asked * page <= self.config.threshold:",
        test=(CUT, "below_the_threshold_does_not_start"),
    ),
    Removal(
        name="000-002 keys are cut with the tokens",
        path=PREFETCH,
        fix="            prefetch.num_pages = len(full)\n        return True",
        without="        return True",
        test=(CUT, "no_more_keys_than_it_has_pages"),
    ),
    Removal(
        name="000-002 the anchor is protected first",
        path=PREFETCH,
        fix="anchor_lock=tree.lock_host(anchor, anchor.start),",
        without="anchor_lock=tree.lock_host(anchor, anchor.end),",
        test=(CUT, "the_anchor_survives"),
    ),
    Removal(
        name="000-002 evict before cutting",
        path=PREFETCH,
        fix="full = room.allocate(FULL, wanted, evict=not config.evict_whole)",
        without="full = room.allocate(FULL, wanted, evict=False)",
        test=(CUT, "evicted_before_a_prefetch_is_cut"),
    ),
    Removal(
        name="000 pages go back when there is no state slot",
        path=PREFETCH,
        fix="                    room.free(other, prefetch.staged[other])\n"
        "                    prefetch.staged[other] = NO_PAGES\n                return",
        without="                    prefetch.staged[other] = NO_PAGES\n                return",
        test=(CUT, "without_a_state_slot_gives_all_pages_back"),
    ),
    Removal(
        name="later: a cut falls on what can be restored",
        path=PREFETCH,
        fix="fits = max((each for each in prefetch.restorable if each <= fits), default=0)",
        without="pass",
        test=(CUT, "skips_lengths_without_a_state"),
    ),
    Removal(
        name="003 complete pages wait for their sidecars",
        path=PREFETCH,
        fix="return stop.may_stop(prefetch, now_ns) and not self._awaits_sidecars(prefetch)",
        without="return stop.may_stop(prefetch, now_ns)",
        test=(CUT, "complete_pages_wait_for_their_sidecars"),
    ),
    Removal(
        name="003 they do so whatever the ranks voted before",
        path=PREFETCH,
        fix="return may_stop and not self._awaits_sidecars(prefetch)",
        without="return may_stop",
        test=(VOTES, "sidecars_that_another_rank_has_not_read"),
    ),
    Removal(
        name="003 unknown keys are not complete",
        path="hicache/cache/prefetch/prefetch.py",
        fix="return are_known and self.completed_pages == self.num_pages",
        without="return self.completed_pages == len(self.restorable or ())",
        test=(CUT, "whose_keys_are_not_known_is_not_complete"),
    ),
    Removal(
        name="003 the reader keeps what it is still reading into",
        path=PREFETCH,
        fix="else:\n                self._stop(prefetch)\n        self.forget",
        without="else:\n                self._end(prefetch, 'aborted')\n        self.forget",
        test=(CUT, "abort_during_a_read"),
    ),
    Removal(
        name="004 pages to load back are charged",
        path="hicache/scheduler/budget.py",
        fix="host = ceil_page(swa_host_hit_length, page)",
        without="host = 0",
        test=(WORLDS, "with_the_host_term"),
    ),
    Removal(
        name="004 they are charged in whole pages",
        path="hicache/scheduler/budget.py",
        fix="host = ceil_page(swa_host_hit_length, page)",
        without="host = swa_host_hit_length",
        test=(BUDGET, "rounded_up"),
    ),
    Removal(
        name="004 admission hands the host hit on",
        path="hicache/scheduler/admission.py",
        fix="host_hit = match.swa_host_hit_length",
        without="host_hit = 0",
        test=(WORLDS, "with_the_host_term"),
    ),
    Removal(
        name="004 a window on the host alone is loaded back",
        path="hicache/cache/tiers/load_backs.py",
        fix="wants_sidecar = match.swa_host_hit_length or match.mamba_host_hit_length",
        without="wants_sidecar = match.mamba_host_hit_length",
        test=(REPORTS, "window_on_the_host_alone"),
    ),
    Removal(
        name="004 a state on the host alone is loaded back",
        path="hicache/cache/tiers/load_backs.py",
        fix="wants_sidecar = match.swa_host_hit_length or match.mamba_host_hit_length",
        without="wants_sidecar = match.swa_host_hit_length",
        test=(NUMBERS, "state_alone_is_loaded_back"),
    ),
    Removal(
        name="004 the three host hits are told apart",
        path="hicache/cache/tree/match.py",
        fix="return bool(self.host_hit_length or self.swa_host_hit_length"
        " or self.mamba_host_hit_length)",
        without="return bool(self.host_hit_length)",
        test=(NUMBERS, "state_alone_is_loaded_back"),
    ),
    Removal(
        name="ranks: the longest common restorable length",
        path=AGREEMENT,
        fix="    if rule is HitAgreement.min_of_maxima:\n        return [max(lengths",
        without="    if rule:\n        return [max(lengths",
        test=(VOTES, "longest_prefix_that_all_can_restore"),
    ),
    Removal(
        name="ranks: only what all have heard is acted on",
        path=AGREEMENT,
        fix="for _ in range(num_answers):",
        without="for _ in range(len(self.answers)):",
        test=(VOTES, "news_that_every_rank_has"),
    ),
    Removal(
        name="ranks: queries and reads are counted apart",
        path=AGREEMENT,
        fix="counts = [len(self.answers), len(self.progress)]",
        without="counts = [len(self.answers) + len(self.progress)] * 2",
        test=(VOTES, "in_either_order"),
    ),
    Removal(
        name="ranks: copies are complete in their order",
        path=AGREEMENT,
        fix="(index for index, copy in enumerate(copies) if copy not in self._copied),\n"
        "                len(copies),",
        without="(),\n                sum(copy in self._copied for copy in copies),",
        test=(VOTES, "order_in_which_they_began"),
    ),
    Removal(
        name="ranks: stop when all can",
        path=PREFETCH,
        fix="may_stop = self.verdicts.get(prefetch.request_id, False)",
        without="may_stop = self.can_terminate_prefetch(prefetch, now_ns)",
        test=(VOTES, "stops_when_all_ranks_can"),
    ),
    Removal(
        name="ranks: drop what any knows to be gone",
        path=AGREEMENT,
        fix="votes += [int(can_stop), 1 - int(request_id in self._to_abort)]",
        without="votes += [int(can_stop), 1]",
        test=(VOTES, "one_rank_knows_to_be_gone"),
    ),
    Removal(
        name="ranks: sidecars are all or nothing",
        path=PREFETCH,
        fix="or prefetch.sidecars_found",
        without="or prefetch.is_read",
        test=(VOTES, "one_rank_lacks_are_published_by_none"),
    ),
    Removal(
        name="ranks: trees are compared",
        path=AGREEMENT,
        fix="if minimum[-2] != -minimum[-1]:",
        without="if False:",
        test=(VOTES, "whose_tree_differs_is_found"),
    ),
    Removal(
        name="ranks: groups of one need no collective",
        path="hicache/engine/ranks/processes.py",
        fix="if any(len(group) > 1 for group in partition) and partition not in partitions:",
        without="if partition not in partitions:",
        test=(GROUPS, "groups_of_one"),
    ),
    Removal(
        name="ranks: equal groups are made once",
        path="hicache/engine/ranks/processes.py",
        fix="if any(len(group) > 1 for group in partition) and partition not in partitions:",
        without="if any(len(group) > 1 for group in partition):",
        test=(GROUPS, "part_the_ranks_alike"),
    ),
    Removal(
        name="scenarios: whoever waits is looked at when the last one gave its pages back",
        path=SCHEDULER,
        fix="if was_running and not self.running:",
        without="if False:",
        test=SCENARIOS,
    ),
    Removal(
        name="scenarios: under open arrivals nobody waits for an answer",
        path="hicache/workload/arrivals.py",
        fix="deque(() if self._mode is Arrivals.open else self._children.get(request_id, ()))",
        without="deque(self._children.get(request_id, ()))",
        test=SCENARIOS,
    ),
    Removal(
        name="scenarios: routing asks and does not match",
        path="hicache/engine/routing.py",
        fix="held_len = tree.usable_len(tokens, request.prompt_len - 1, request.namespace)",
        without="held_len = tree.match("
        "tokens, request.prompt_len - 1, request.namespace).usable_len",
        test=SCENARIOS,
    ),
    Removal(
        name="scenarios: a state that is locked keeps its window",
        path="hicache/cache/tree/radix_tree.py",
        fix="swa_start = min(swa_start, node.start) if with_state else swa_start",
        without="pass",
        test=SCENARIOS,
    ),
    Removal(
        name="scenarios: a wait for storage ends when the request is let go",
        path=SCHEDULER,
        fix="            job.end_wait(now_ns)\n            return True",
        without="            return True",
        test=SCENARIOS,
        also=(
            (
                PREFETCH,
                "return not self._lets_go(prefetch, now_ns)",
                "return not self.can_terminate_prefetch(prefetch, now_ns)",
            ),
        ),
    ),
    Removal(
        name="scenarios: rows and warm-up see every step that has ended",
        path="hicache/results/recorder.py",
        fix="                engine.catch_up(moment)\n",
        without="                pass\n",
        test=SCENARIOS,
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the removals and print one line each."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.remove_fixes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="how names of removals begin; none: all")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args(arguments)
    chosen = [
        each for each in REMOVALS if not options.names or each.name.startswith(tuple(options.names))
    ]
    if options.list:
        for removal in chosen:
            print(f"{removal.name}: {removal.test[0]} -k '{removal.test[1]}'")
        return
    if not chosen:
        sys.stderr.write(f"no removal begins with {' or '.join(options.names)}; see --list\n")
        sys.exit(2)
    unnoticed = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "source"
        for name in ("hicache", "experiments", "tests", "conf"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for removal in chosen:
            verdict = try_removal(removal, copy)
            unnoticed += not verdict.startswith("noticed")
            print(f"{removal.name}: {verdict}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} removals are noticed")
    sys.exit(int(unnoticed > 0))


def try_removal(removal: Removal, copy: Path) -> str:
    """Take a fix out of a copy of the source, run its tests, put it back; what they said."""
    edits = [(removal.path, removal.fix, removal.without), *removal.also]
    sources = {path: (copy / path).read_text() for path, _, _ in edits}
    for path, fix, _ in edits:
        if sources[path].count(fix) != 1:
            return f"CANNOT BE MADE: the fix stands {sources[path].count(fix)} times in {path}"
    if run_tests(removal, copy):
        return f"NO TEST: {removal.test[0]} -k '{removal.test[1]}' does not pass with the fix"
    for path, fix, without in edits:
        (copy / path).write_text((copy / path).read_text().replace(fix, without))
    try:
        failed = run_tests(removal, copy)
    finally:
        for path, source in sources.items():
            (copy / path).write_text(source)
    return f"noticed by {', '.join(failed)}" if failed else f"UNNOTICED by {removal.test[1]}"


def run_tests(removal: Removal, copy: Path) -> list[str]:
    """The names of the tests that failed, or of the file if none could be run."""
    file, words = removal.test
    done = subprocess.run(
        [*PYTEST, file, "-k", words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    names = [line.split(" ")[1].rpartition("::")[2].partition("[")[0] for line in lines]
    return list(dict.fromkeys(names)) or [file]


if __name__ == "__main__":
    main()

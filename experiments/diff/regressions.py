"""Make one-line edits in a copy of SGLang 0.5.23, and check that the comparison reports them.

python -m experiments.diff.regressions

`faults.toml` lists the edits. Each is made in a copy of the release, which is compared with the
release on the `edges` workload until hits differ or the requests end. A fault must be reported,
unless its entry proves that it changes nothing. A refactoring must make no difference.
"""

import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.diff import edges
from experiments.diff.compare import Comparison, compare_sides
from experiments.diff.engines import ENGINES, prepare
from experiments.diff.explain import changes_in_words, hits_in_words
from experiments.diff.process import SideProcess
from experiments.diff.protocol import Call, Outcome, Pools, SideError
from experiments.diff.rooms import chosen, pools_for
from hicache.cli.command import parser_of
from hicache.request import Request

RELEASE = "0.5.23"
FOLDER = "sglang/srt"
FAULTS = Path(__file__).with_name("faults.toml")
SHOWN = 3  # amounts in a row of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A one-line change of SGLang. A comparison with the original must report it if it is a fault.

    Attributes:
        name: description of the change.
        file: path of the file below `sglang/srt`.
        line: text to replace.
        instead: the new text.
        place: which occurrence of the text to replace, from 0.
        kind: kinds of attention in the compared caches.
        write_policy: write policy of both caches.
        copies: `instant`, or `delayed:N` if copies between tiers end N requests later.
        equivalent: why the change has no effect. Empty means that it must be reported.
        is_fault: False if the change is a refactoring, which must not be reported.
    """

    name: str
    file: str
    line: str
    instead: str
    place: int = 0
    kind: str = "full"
    write_policy: str = "write_through"
    copies: str = "instant"
    equivalent: str = ""
    is_fault: bool = True

    @property
    def is_reportable(self) -> bool:
        return self.is_fault and not self.equivalent


def edits(path: Path = FAULTS) -> list[Edit]:
    listed = tomllib.loads(path.read_text())
    faults = [Edit(**each) for each in listed["fault"]]
    return faults + [Edit(**each, is_fault=False) for each in listed["refactoring"]]


def main() -> None:
    parser = parser_of("python -m experiments.diff.regressions", __doc__)
    parser.add_argument("--requests", type=int, default=edges.COUNT)
    parser.add_argument("--workload", default=edges.NAME)
    parser.add_argument("--faults", type=Path, default=FAULTS, help="file with other edits")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the edits to run, from 1")
    options = parser.parse_args()
    engine = ENGINES["sglang"]
    launch = prepare(engine, RELEASE)
    release = Path(launch.path[0])
    print("| edit | kind | reported | first difference | what differs there | first hit | s |")
    print("|---|---|---|---:|---|---|---:|", flush=True)
    wrong = 0
    released: dict[tuple[str, ...], Remembered] = {}
    with (
        tempfile.TemporaryDirectory(dir=release.parent, prefix="edited-") as folder,
        ExitStack() as stack,
    ):
        copy = Path(folder)
        # links: only edited files are copied
        shutil.copytree(release / "sglang", copy / "sglang", copy_function=os.link)
        edited = replace(prepare(engine, folder), name="the edited copy")
        for number, edit in enumerate(edits(options.faults), start=1):
            if options.only and number not in options.only:
                continue
            started = time.monotonic()
            pools = pools_for(options.workload, edit.kind, "", edit.copies)
            requests = chosen(options.workload, options.requests, pools.max_len)
            base, head = (
                replace(each, options={"write_policy": edit.write_policy})
                for each in (launch, edited)
            )
            settings = edit.kind, edit.write_policy, edit.copies
            if settings not in released:
                process = SideProcess(base, pools, copy / f"base-{'-'.join(settings)}.log")
                released[settings] = Remembered(stack.enter_context(process))
            with edited_by(edit, copy), SideProcess(head, pools, copy / "head.log") as process:
                sides = released[settings], process
                found = compared(requests, pools, sides)
            wrong += is_reported(found) != edit.is_reportable
            print(row(edit, found, time.monotonic() - started), flush=True)
    sys.exit(min(wrong, 1))


def compared(
    requests: Sequence[Request], pools: Pools, sides: tuple["Remembered", SideProcess]
) -> Comparison:
    try:
        return compare_sides(requests, pools, sides, until_first=True)
    except SideError as error:
        about = sides[0].about()
        failure = f"at request 0 {error}"
        return Comparison(
            base=about, head={}, pools=pools, rows=(), failure=failure, stopped=("head",)
        )


class Remembered:
    """Asks a compared cache each question once, and replays the answers in later comparisons."""

    def __init__(self, side: SideProcess) -> None:
        self._side, self._about = side, side.about()
        self._outcomes: list[Outcome | SideError] = []
        self._next = 0

    def about(self) -> dict[str, str]:
        self._next = 0
        return self._about

    def ask(self, calls: list[Call]) -> None:
        if self._next == len(self._outcomes):
            self._side.ask(calls)

    def take_outcome(self) -> Outcome:
        if self._next == len(self._outcomes):
            try:
                self._outcomes.append(self._side.take_outcome())
            except SideError as error:
                self._outcomes.append(error)
        self._next += 1
        outcome = self._outcomes[self._next - 1]
        if isinstance(outcome, SideError):
            raise outcome
        return outcome


@contextmanager
def edited_by(edit: Edit, copy: Path) -> Iterator[None]:
    """Make a change in the copy of SGLang in the folder `copy`, and undo the change on exit.

    Raises:
        SideError: the copy does not contain the text to replace.
    """
    path = copy / FOLDER / edit.file
    whole = path.read_text()
    parts = whole.split(edit.line)
    cut = edit.place + 1
    if len(parts) <= cut:
        raise SideError(f"{path} has no line {edit.line!r} (number {edit.place})")
    before, after = edit.line.join(parts[:cut]), edit.line.join(parts[cut:])
    path.unlink()  # remove the link, so that the release's own file is not changed
    path.write_text(before + edit.instead + after)
    try:
        yield
    finally:
        path.write_text(whole)


def is_reported(found: Comparison) -> bool:
    return found.first is not None or len(found.stopped) == 1


def row(edit: Edit, found: Comparison, seconds: float) -> str:
    reported = "yes" if is_reported(found) else f"no, in {len(found.rows):,} requests"
    number = what = hit = ""
    if found.first is not None:
        number, what = f"{found.first.number}", found.first.kind.value
    if (sized := next((each for each in found.rows if any(each.weight)), None)) is not None:
        what += f"; at {sized.number}: {changes_in_words(sized, SHOWN)}"
    if found.first_hit is not None:
        base, head = (hits_in_words(each) for each in (found.first_hit.base, found.first_hit.head))
        hit = f"{found.first_hit.number}: {base} → {head}"
    elif found.failure is not None:
        number, hit = number or f"{len(found.rows)}", found.failure
    cells = (edit.name, edit.kind, reported, number, what, hit, f"{seconds:.0f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

"""Regressions of one line each, planted in a copy of SGLang 0.5.23: does the comparison see them?

python -m experiments.diff.regressions --requests 2000

Each is put into a copy of the release and compared with the release until hits differ or the
requests end. The first row is a copy without any change, which must not differ in anything.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.diff.compare import Comparison, compare
from experiments.diff.engines import ENGINES, prepare
from experiments.diff.explain import hits_in_words
from experiments.diff.protocol import SideError
from experiments.diff.rooms import chosen, pools_for

RELEASE = "0.5.23"
ROOM = "sglang/srt/mem_cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """One line of the release, and what is put in its place; `place` counts equal ones from 0."""

    name: str
    component: str = "full"
    file: str
    line: str
    instead: str
    place: int = 0


NOTHING = Regression(name="nothing (a copy)", file="", line="", instead="")
REGRESSIONS = (
    Regression(
        name="the lock of a finished back-up is not released",
        file="unified_radix_cache.py",
        line="self.dec_lock_ref(lock_node_id, lock_params)",
        instead="pass",
    ),
    Regression(
        name="eviction order reversed",
        file="evict_policy.py",
        line="return node.last_access_time",
        instead="return -node.last_access_time",
    ),
    Regression(
        name="a prefetch is never committed",
        file="unified_radix_cache.py",
        line="completed_tokens = operation.completed_tokens",
        instead="completed_tokens = 0",
    ),
    Regression(
        name="what is backed up is not written to storage",
        file="unified_radix_cache.py",
        line="self.write_backup_storage(node_id)",
        instead="pass",
    ),
    Regression(
        name="back-up waits for one hit more",
        file="unified_cache/unified_tree_core.py",
        line="and node.hit_count >= self.write_through_threshold",
        instead="and node.hit_count > self.write_through_threshold",
        place=1,
    ),
    Regression(
        name="storage is asked for four times the least length",
        file="unified_radix_cache.py",
        line="if len(prefetch_key) < self.prefetch_threshold:",
        instead="if len(prefetch_key) < 4 * self.prefetch_threshold:",
    ),
    Regression(
        name="a match is no use",
        file="unified_cache/unified_tree_core.py",
        line="node.last_access_time = get_and_increase_time_counter()",
        instead="pass",
    ),
    Regression(
        name="a match is content with a window a page short",
        component="swa",
        file="unified_cache/components/swa.py",
        line='return state["len"] >= sliding_window_size',
        instead='return state["len"] >= sliding_window_size - 64',
    ),
    Regression(
        name="a prompt keeps a window that is a page short",
        component="swa",
        file="unified_cache/components/swa.py",
        line="sliding_window_size=self.sliding_window_size,",
        instead="sliding_window_size=self.sliding_window_size - 64,",
    ),
    Regression(
        name="no state is kept at a branch",
        component="mamba",
        file="unified_cache/components/mamba.py",
        line="aligned_seqlen if aligned_seqlen > mamba_boundary_len else None",
        instead="None",
    ),
    Regression(
        name="a state that is used stays as old as it was",
        component="mamba",
        file="unified_cache/components/mamba.py",
        line="self.tree_core.lru_lists[ct].reset_node_mru(node)",
        instead="pass",
    ),
)


def main() -> None:
    """Plant one after the other, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--workload", default="mooncake_conversation")
    parser.add_argument("--only", type=int, nargs="*", help="0: the copy; 1, 2, ...: as listed")
    options = parser.parse_args()
    engine = ENGINES["sglang"]
    launch = prepare(engine, RELEASE)
    release = Path(launch.path[0])
    print("| planted | components | caught | first request | released hit | with it hit | s |")
    print("|---|---|---|---:|---|---|---:|", flush=True)
    with tempfile.TemporaryDirectory(dir=release.parent, prefix="planted-") as folder:
        copy = Path(folder)
        # links: what is not changed need not be written again
        shutil.copytree(release / "sglang", copy / "sglang", copy_function=os.link)
        planted = prepare(engine, folder)
        for number, regression in enumerate((NOTHING, *REGRESSIONS)):
            if options.only and number not in options.only:
                continue
            started = time.monotonic()
            pools = pools_for(options.workload, regression.component, "", "instant")
            requests = chosen(options.workload, options.requests, pools.max_len)
            with planted_in(regression, copy):
                found = compare(requests, pools, (launch, planted), copy, until_first=True)
            print(row(regression, found, time.monotonic() - started), flush=True)


@contextmanager
def planted_in(regression: Regression, copy: Path) -> Iterator[None]:
    """The copy has the regression meanwhile.

    Raises:
        SideError: the release has no such line.
    """
    if not regression.file:
        yield
        return
    path = copy / ROOM / regression.file
    whole = path.read_text()
    parts = whole.split(regression.line)
    cut = regression.place + 1
    if len(parts) <= cut:
        raise SideError(f"{path} has no line {regression.line!r} (number {regression.place})")
    before, after = regression.line.join(parts[:cut]), regression.line.join(parts[cut:])
    path.unlink()  # a link: the release's own file stays as it is
    path.write_text(before + regression.instead + after)
    try:
        yield
    finally:
        path.write_text(whole)


def row(regression: Regression, found: Comparison, seconds: float) -> str:
    """One line of the table."""
    first = found.first_hit
    start = f"| {regression.name} | {regression.component} |"
    if first is not None:
        base, head = hits_in_words(first.base), hits_in_words(first.head)
        return f"{start} yes | {first.number} | {base} | {head} | {seconds:.0f} |"
    if found.failure is not None:
        return f"{start} yes | {len(found.rows)} | | {found.failure} | {seconds:.0f} |"
    if found.first is not None:
        said = f"{found.first.kind.value}"
        return f"{start} hits do not differ | {found.first.number} | | {said} | {seconds:.0f} |"
    return f"{start} no difference in {len(found.rows):,} requests | | | | {seconds:.0f} |"


if __name__ == "__main__":
    main()

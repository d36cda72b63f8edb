"""Who is writing: a process, named so that a later one with the same id is not taken for it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_OWNER = re.compile(r"([0-9a-f]{32})\.([0-9]{1,20})\.([0-9]{1,20})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process of this machine: its boot, its id, and when it started (clock ticks after boot)."""

    boot: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.boot}.{self.pid}.{self.started}"


def current_owner() -> Owner:
    """The process that asks."""
    pid = os.getpid()
    return Owner(boot=_boot(), pid=pid, started=_started(pid) or 0)


def parse_owner(text: str) -> Owner | None:
    """The owner that `str` wrote, or none if it is no such text."""
    match = _OWNER.fullmatch(text)
    if match is None:
        return None
    boot, pid, started = match.groups()
    return Owner(boot=boot, pid=int(pid), started=int(started))


def is_this_boot(owner: Owner) -> bool:
    """Whether the owner ran on this machine since it was last started."""
    return owner.boot == _boot()


def is_alive(owner: Owner) -> bool:
    """Whether that very process runs now, on this machine."""
    return is_this_boot(owner) and _started(owner.pid) == owner.started


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def _started(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc(5)); none if there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name in field 2 may hold blanks and brackets: what follows its last bracket does not
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])

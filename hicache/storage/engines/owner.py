"""The identity of a writing process, distinct from a later process with the same id."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_OWNER = re.compile(r"([0-9a-f]{32})\.([0-9]{1,20})\.([0-9]{1,20})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Identifies one process of this machine, even if its process id is reused later.

    `boot` identifies the boot of the machine. `started` is the start of the process, in clock ticks
    after the boot.
    """

    boot: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.boot}.{self.pid}.{self.started}"


def current_owner() -> Owner:
    pid = os.getpid()
    return Owner(boot=_boot(), pid=pid, started=_started(pid) or 0)


def parse_owner(text: str) -> Owner | None:
    match = _OWNER.fullmatch(text)
    if match is None:
        return None
    boot, pid, started = match.groups()
    return Owner(boot=boot, pid=int(pid), started=int(started))


def is_this_boot(owner: Owner) -> bool:
    return owner.boot == _boot()


def is_alive(owner: Owner) -> bool:
    return is_this_boot(owner) and _started(owner.pid) == owner.started


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name in field 2 may contain blanks and brackets, so split after the last bracket
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])  # field 22 of proc(5)

"""The identity of a writing process, distinct from a later process with the same id.

An owner is a text of three parts: the boot of the machine, the process id, and the start of the
process in clock ticks after the boot.
"""

import os
from pathlib import Path


def current_owner() -> str:
    owner = _owner_of(os.getpid())
    assert owner is not None
    return owner


def is_alive(owner: str) -> bool:
    pid = owner.partition(".")[2].partition(".")[0]
    return pid.isdecimal() and owner == _owner_of(int(pid))


def _owner_of(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    # the name in field 2 may contain blanks and brackets, so split after the last bracket
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{boot}.{pid}.{fields[19]}"  # field 22 of proc(5)

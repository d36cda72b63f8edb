"""The identity of a writing process, distinct from a later process with the same id.

An owner is a text of three parts: the boot of the machine, the process id, and the start of the
process in clock ticks after the boot.
"""

import os
from pathlib import Path


def current_owner() -> str:
    return f"{_boot()}.{os.getpid()}.{_started(os.getpid())}"


def is_alive(owner: str) -> bool:
    boot, *numbers = owner.split(".")
    if boot != _boot() or len(numbers) != 2 or not numbers[0].isdecimal():
        return False
    started = _started(int(numbers[0]))
    return started is not None and str(started) == numbers[1]


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

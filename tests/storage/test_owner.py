"""The identity of a process: recognized while the process lives, and never that of another."""

import os
import subprocess
from pathlib import Path
from shutil import which

import pytest

from hicache.storage.engines.owner import current_owner, is_alive

BOOT, _, STARTED = current_owner().split(".")
PID = os.getpid()


def owner_of(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return f"{BOOT}.{pid}.{stat[stat.rindex(')') + 2 :].split()[22 - 3]}"


def test_the_current_process_is_alive_and_its_owner_holds_its_start():
    assert current_owner() == owner_of(PID)
    assert is_alive(current_owner())
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < int(STARTED) / os.sysconf("SC_CLK_TCK") < up_s


@pytest.mark.parametrize(
    "text",
    ["", BOOT, f"{BOOT}.{PID}", f"{BOOT}.{PID}.{STARTED}.3", f"{BOOT}.-1.2", f"{BOOT}.x.{STARTED}",
     f"{BOOT}.{PID}.{STARTED}\n", f"{BOOT}.{PID}.{int(STARTED) - 1}", f"{BOOT}.{'9' * 9}.None",
     f"{'0' * 32}.{PID}.{STARTED}"],  # the last one is of another boot
    ids=range(10),  # the texts differ between test processes, and pytest-xdist needs equal names
)  # fmt: skip
def test_an_invalid_or_outdated_owner_is_not_alive(text):
    assert not is_alive(text)


def test_a_process_is_alive_until_it_ends_whatever_its_name(tmp_path):
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to(which("cat"))
    with subprocess.Popen([odd], stdin=subprocess.PIPE) as child:
        assert f"({odd.name})" in Path(f"/proc/{child.pid}/stat").read_text()
        owner = owner_of(child.pid)
        assert is_alive(owner)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(owner)  # a zombie
    assert not is_alive(owner)

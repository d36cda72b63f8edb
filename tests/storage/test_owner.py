"""A process is known again, and no other is taken for it."""

import os
import subprocess
from pathlib import Path
from shutil import which

import pytest

from hicache.storage.engines.owner import current_owner, is_alive

BOOT, _, STARTED = current_owner().split(".")
PID = os.getpid()


def owner_of(pid: int) -> str:
    """As that process would say it."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return f"{BOOT}.{pid}.{stat[stat.rindex(')') + 2 :].split()[22 - 3]}"


def test_the_current_process_is_alive_and_says_when_it_started() -> None:
    assert current_owner() == owner_of(PID)
    assert is_alive(current_owner())
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < int(STARTED) / os.sysconf("SC_CLK_TCK") < up_s


@pytest.mark.parametrize(
    "text",
    ["", BOOT, f"{BOOT}.{PID}", f"{BOOT}.{PID}.{STARTED}.3", f"{BOOT}.-1.2", f"{BOOT}.x.{STARTED}",
     f"{BOOT}.{PID}.{STARTED}\n", f"{BOOT}.{PID}.{int(STARTED) - 1}", f"{BOOT}.{'9' * 9}.None"],
    ids=range(9),  # every test process has its own texts, and all need the same names
)  # fmt: skip
def test_another_text_names_no_process(text: str) -> None:
    assert not is_alive(text)


def test_a_process_of_another_boot_is_not_of_this_one() -> None:
    assert not is_alive(f"{'0' * 32}.{PID}.{STARTED}")


def test_a_process_is_alive_until_it_ends_and_no_longer_even_before_its_end_is_collected() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        owner = owner_of(child.pid)
        assert is_alive(owner)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(owner)  # a zombie
    assert not is_alive(owner)


def test_the_name_of_a_process_may_hold_anything(tmp_path: Path) -> None:
    cat = which("cat")
    assert cat is not None
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to(cat)
    with subprocess.Popen([odd], stdin=subprocess.PIPE) as child:
        assert f"({odd.name})" in Path(f"/proc/{child.pid}/stat").read_text()
        assert is_alive(owner_of(child.pid))
        child.kill()

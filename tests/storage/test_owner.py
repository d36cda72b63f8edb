"""A process is known again, and nobody else is taken for it."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest

from hicache.storage.owner import Owner, current_owner, is_alive, is_this_boot, parse_owner


def owner_of(pid: int) -> Owner:
    """As that process would say it."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    started = int(stat[stat.rindex(")") + 2 :].split()[22 - 3])
    return replace(current_owner(), pid=pid, started=started)


def test_the_current_process_is_alive_and_says_when_it_started() -> None:
    assert current_owner() == owner_of(os.getpid())
    assert is_alive(current_owner())
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < current_owner().started / os.sysconf("SC_CLK_TCK") < up_s


def test_an_owner_is_read_back_from_its_text() -> None:
    assert parse_owner(str(current_owner())) == current_owner()


@pytest.mark.parametrize(
    "text",
    ["", "a.1.2", "0" * 32, f"{'0' * 32}.1", f"{'0' * 32}.1.2.3", f"{'0' * 31}.1.2",
     f"{'0' * 32}.-1.2", f"{'0' * 32}.1.x", f"{'0' * 32}.².3", f"{'0' * 32}.1.2\n",
     f"{'0' * 32}.{'9' * 21}.1"],
)  # fmt: skip
def test_another_text_names_nobody(text: str) -> None:
    assert parse_owner(text) is None


def test_a_number_that_is_used_again_is_another_process() -> None:
    assert not is_alive(replace(current_owner(), started=current_owner().started - 1))


def test_a_process_of_another_boot_is_not_of_this_one() -> None:
    other = replace(current_owner(), boot="0" * 32)
    assert (is_this_boot(other), is_alive(other)) == (False, False)
    assert is_this_boot(current_owner())


def test_a_process_is_alive_until_it_ends_and_no_longer_even_if_nobody_asks_for_its_end() -> None:
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

"""Passwords are hidden in URLs, and found again where a server is spoken to."""

import os
from pathlib import Path

import pytest

from hicache.storage.passwords import PASSWORD, PASSWORD_FILE, hide, mask, reveal, without_password


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PASSWORD, PASSWORD_FILE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("url", "masked", "password"),
    [
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0", "pw"),
        ("rediss://me:p%40w@host", "rediss://me:***@host", "p@w"),
        ("redis://:p@w@host", "redis://:***@host", "p@w"),
        ("redis://:p/w,x y@host", "redis://:***@host", "p/w,x y"),
    ],
)
def test_a_password_is_hidden_and_found_again(url: str, masked: str, password: str) -> None:
    assert hide(url) == masked == mask(url)
    assert os.environ[PASSWORD] == password
    assert hide(masked) == masked  # hidden twice, it is known still
    assert os.environ[PASSWORD] == password
    assert password not in without_password(f"cannot reach {reveal(masked)}")


@pytest.mark.parametrize(
    "url", ["redis://host:6379/0", "redis://me@host", "/a/place", "host:50051"]
)
def test_what_has_no_password_stays(url: str) -> None:
    assert hide(url) == url
    assert reveal(url) == url
    assert PASSWORD not in os.environ


def test_a_url_without_a_password_is_given_the_one_in_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "secret"))
    assert reveal("redis://host:6379/0") == "redis://:from%20a%20file@host:6379/0"
    monkeypatch.setenv(PASSWORD, "p@w")
    assert reveal("redis://me@host") == "redis://me:p%40w@host"
    assert reveal("redis://:own@host") == "redis://:own@host"


def test_a_password_that_is_known_no_more_is_asked_for() -> None:
    with pytest.raises(ValueError, match=rf"redis://:\*\*\*@host hides its password.*{PASSWORD}"):
        reveal("redis://:***@host")


def test_two_passwords_in_one_command_are_refused_and_not_told() -> None:
    with pytest.raises(ValueError, match="must share one password") as refused:
        hide("redis://:first@h1,redis://:second@h2")
    assert "first" not in str(refused.value)


def test_the_roots_of_a_sweep_are_hidden_each() -> None:
    assert hide("redis://:a@h1:1,redis://:a@h2") == "redis://:***@h1:1,redis://:***@h2"
    assert hide("redis://h1:6379,redis://:b@h2") == "redis://h1:6379,redis://:***@h2"
    assert os.environ[PASSWORD] == "b"

"""Passwords of storage servers, which nothing that a run writes or prints contains.

A URL is shown with `***` in place of its password. The password itself is kept in the environment
of the process, which its children inherit: a user may put it there, or name a file that holds it.
"""

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

PASSWORD = "HICACHE_STORAGE_PASSWORD"
PASSWORD_FILE = "HICACHE_STORAGE_PASSWORD_FILE"
MASK = "***"
# a URL up to its user, and its password: all up to the last @ before another URL begins
_IN_URL = re.compile(r"(\w+://[^:@/\s]*:)((?:(?!\w+://).)+)@", re.DOTALL)


def mask(text: str) -> str:
    """Return the text with `***` in place of the password of each URL."""
    return _IN_URL.sub(rf"\1{MASK}@", text)


def hide(text: str) -> str:
    """Return the text masked; the password goes to the environment, where `reveal` finds it.

    Raises:
        ValueError: the URLs in it have different passwords.
    """
    found = {unquote(password) for _, password in _IN_URL.findall(text)} - {MASK}
    if len(found) > 1:
        raise ValueError("storage.root: the servers of one command must share one password")
    if found:
        os.environ[PASSWORD] = found.pop()
    return mask(text)


def reveal(url: str) -> str:
    """Return a URL with the password that it hides, or that a URL without one is given.

    Raises:
        ValueError: the URL hides a password that is known no more.
        OSError: the file of the password cannot be read.
    """
    scheme, _, rest = url.partition("://")
    login, _, host = rest.rpartition("@")
    user, _, written = login.partition(":")
    password = _password()
    if written not in ("", MASK) or (password is None and not written):
        return url
    if password is None:
        raise ValueError(
            f"storage.root={url} hides its password: give it in {PASSWORD}, or name a file that "
            f"holds it in {PASSWORD_FILE}"
        )
    return f"{scheme}://{user}:{quote(password, safe='')}@{host}"


def without_password(text: str) -> str:
    """Return a message with `***` in place of the password, if that is known and in it."""
    password = os.environ.get(PASSWORD)
    for form in (password, password and quote(password, safe="")):
        if form:
            text = text.replace(f":{form}@", f":{MASK}@")
    return text


def _password() -> str | None:
    file = os.environ.get(PASSWORD_FILE)
    if PASSWORD not in os.environ and file:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    return os.environ.get(PASSWORD)

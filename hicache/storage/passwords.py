"""Keeps the passwords of storage servers out of everything that a run writes or prints.

URLs are shown with `***` in place of the password. The password itself stays in the process's
environment, which child processes inherit. A user may put it there, or name a file that holds it.
"""

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

PASSWORD = "HICACHE_STORAGE_PASSWORD"
PASSWORD_FILE = "HICACHE_STORAGE_PASSWORD_FILE"
MASK = "***"
# group 1: a URL up to its user; the password ends at the last @ before the next URL
_IN_URL = re.compile(r"(\w+://[^:@/\s]*:)((?:(?!\w+://).)+)@", re.DOTALL)


def mask(text: str) -> str:
    return _IN_URL.sub(rf"\1{MASK}@", text)


def hide(text: str) -> str:
    """Replace the password in all URLs of `text` by `***`, and remember the password.

    The environment variable HICACHE_STORAGE_PASSWORD then holds the password, for `reveal`.

    Raises:
        ValueError: the URLs in `text` have different passwords.
    """
    found = {unquote(password) for _, password in _IN_URL.findall(text)} - {MASK}
    if len(found) > 1:
        raise ValueError("storage.root: the servers of one command must share one password")
    if found:
        os.environ[PASSWORD] = found.pop()
    return mask(text)


def reveal(url: str) -> str:
    """Return `url` with its password filled in, if the URL has none or hides it as `***`.

    The password comes from the environment variable HICACHE_STORAGE_PASSWORD, or from the file that
    HICACHE_STORAGE_PASSWORD_FILE names. A URL without a password stays unchanged if neither
    variable is set.

    Raises:
        ValueError: the URL hides its password, and no password is configured.
        OSError: the password file cannot be read.
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

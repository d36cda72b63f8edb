"""Secrets in settings and messages: refused where a run would store them, masked where printed.

A setting may hold of a URL what is known to be harmless: scheme, host, port and database. The user
and the password of a storage server come from the environment.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

USER, PASSWORD = "HICACHE_STORAGE_USER", "HICACHE_STORAGE_PASSWORD"

_SCHEME = r"\w[\w+.-]*://"
_NAME = r"(?:[\w.-]|\$\{[\w.:]+\})+"  # Hydra replaces ${...}, and the result is checked again
_HOST = rf"(?:{_NAME}|\[[\da-fA-F:.]+\])(?::(?:\d+|\$\{{[\w.:]+\}}))?"
_PATH = r"(?:/[\w.-]+)+/?(?:\?db=\d+)?"
_HARMLESS = re.compile(
    rf"rediss?://{_HOST}(?:/\d*)?|(?:unix|file)://{_PATH}|(?!redis|unix){_SCHEME}{_HOST}(?:/[\w.-]*)?"
)
# in texts that are no URL: user:password@host, or password=...
_LOGIN = re.compile(r"[^/\s]+:[^/\s]*@|(?:passw|pwd|secret|token|api_?key)\w*\s*[=:]", re.I)
_USER_PART = re.compile(rf"({_SCHEME})(?:(?!{_SCHEME})[^\n])*@")
_QUERY_PART = re.compile(rf"({_SCHEME}[^\s?#]*)[?#]\S*")
_SECRET_NAME = re.compile(r"(?:PASSWORD|PASSWD|SECRET|TOKEN|_KEY)$", re.I)
_LEAST_LETTERS = 4  # of a secret that is masked: shorter ones also occur in ordinary words


def refuse_secrets(settings: Mapping[str, Any], prefix: str = "") -> None:
    """Raise an error if a setting, also one of a group, may hold a secret."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            refuse_secrets(value, f"{prefix}{name}.")
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, str):
                refuse_secret(f"{prefix}{name}", each)


def refuse_secret(setting: str, value: str) -> None:
    """Raise an error if the value of a setting may hold a secret, which a run would write down.

    In `storage.root`, only harmless addresses and paths are allowed; in other settings, URLs must
    have neither user nor query nor fragment.

    Raises:
        ValueError: there may be a secret; the message does not contain the value.
    """
    if setting == "storage.root":
        parts = re.split(r"[,\s]+(?=\w[\w+.-]*://)", value.strip("'\"[] "))
        is_harmless = all(map(_is_harmless, parts))
    else:
        is_variable = setting.startswith("hydra.job.env_set.") and _SECRET_NAME.search(setting)
        is_harmless = not is_variable and ("://" not in value or _without_parts(value) == value)
    if not is_harmless:
        scheme = re.match(_SCHEME, value)
        raise ValueError(
            f"{setting}={scheme[0] if scheme else ''}*** may hold a password or another secret, "
            "which a run writes to its files: give only scheme, host, port and database, and the "
            f"rest in {USER} and {PASSWORD}"
        )


def masked(text: str) -> str:
    """Replace the secrets of the environment, and all parts of URLs that may hold one, by `***`."""
    for secret in sorted(_in_environment(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _without_parts(text)


def _is_harmless(address: str) -> bool:
    address = address.strip("'\" ")
    if "://" in address:
        return _HARMLESS.fullmatch(address) is not None
    return _LOGIN.search(address) is None


def _without_parts(text: str) -> str:
    return _QUERY_PART.sub(r"\1?***", _USER_PART.sub(r"\1***@", text))


def _in_environment() -> set[str]:
    found: set[str] = set()
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name):
            found.add(value)
        elif "://" in value:
            found.update(_in_url(value))
    return {part for each in found for part in _spellings(each) if len(part) >= _LEAST_LETTERS}


def _in_url(value: str) -> Iterator[str]:
    try:
        url = urlsplit(value)
    except ValueError:
        return
    yield from filter(None, (url.username, url.password, url.fragment))
    yield from (secret for _, secret in parse_qsl(url.query))


def _spellings(secret: str) -> Iterable[str]:
    return secret, unquote(secret)

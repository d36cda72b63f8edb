"""The password of a storage server: from the environment, and in nothing that a run writes."""

import re

PASSWORD = "HICACHE_STORAGE_PASSWORD"
# group 1: a URL up to its user; the password ends at the last @ before the next URL
_IN_URL = re.compile(r"(\w+://[^:@/\s]*:)(?:(?!\w+://).)+@", re.DOTALL)


def refuse_password(root: str) -> None:
    """Raise an error if a URL in `root` holds a password, which a run would write to its files.

    Raises:
        ValueError: there is a password; the message does not contain it.
    """
    shown = _IN_URL.sub(r"\1***@", root)
    if shown != root:
        raise ValueError(f"storage.root={shown} holds a password: give it in {PASSWORD} instead")

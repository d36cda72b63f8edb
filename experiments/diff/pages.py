"""Names of pages, by which two sides say which pages they hold."""

import hashlib

from experiments.diff.protocol import Tokens

NAME_BYTES = 8


def page_names(tokens: Tokens, page_size: int, before: int = 0) -> list[int]:
    """[P] names of the whole pages of `tokens`, each made of all tokens up to its page's end.

    Args:
        tokens: [T] ids.
        page_size: tokens of a page.
        before: the name of the page before the first one; 0 means that there is none.
    """
    names = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        text = before.to_bytes(NAME_BYTES) + tokens[start : start + page_size].tobytes()
        before = int.from_bytes(hashlib.blake2b(text, digest_size=NAME_BYTES).digest())
        names.append(before)
    return names

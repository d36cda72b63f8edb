"""What a cache that never forgets would hit: the yardstick for loaders and generators."""

from collections.abc import Iterable, Iterator

from hicache.request import TOKEN_BYTES, Request

PAGE = 64


def page_chain(tokens: bytes, namespace: str, page: int = PAGE) -> Iterator[int]:
    """A chained hash for each whole page of `tokens`."""
    step = page * TOKEN_BYTES
    chained = hash(namespace)
    for begin in range(0, len(tokens) - step + 1, step):
        chained = hash((chained, tokens[begin : begin + step]))
        yield chained


def token_hit_rate(
    requests: Iterable[Request], *, only_ends: bool = False, page: int = PAGE
) -> float:
    """Matched share of all prompt tokens, in whole pages, at most `prompt_len - 1` a request.

    A prompt and its answer are in the cache as soon as the request has arrived. With `only_ends` a
    match must stop where an earlier prompt or answer ended (floored to a page), as a Mamba state
    kept there makes it.
    """
    usable: set[int] = set()
    hit = total = 0
    for request in requests:
        tokens = request.prompt.to_bytes() + request.output.to_bytes()
        chain = list(page_chain(tokens, request.namespace, page))
        reach = (request.prompt_len - 1) // page
        total += request.prompt_len
        if only_ends:
            hit += page * max((d for d in range(1, reach + 1) if chain[d - 1] in usable), default=0)
            for end in (request.prompt_len // page, len(chain)):
                if end:
                    usable.add(chain[end - 1])
        else:
            for hashed in chain[:reach]:
                if hashed not in usable:
                    break
                hit += page
            usable.update(chain)
    return hit / total

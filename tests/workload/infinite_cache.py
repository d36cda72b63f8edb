"""The hit rate of a cache that evicts nothing: a measure of loaders and generators."""

from collections.abc import Iterable, Iterator

from hicache.request import TOKEN_BYTES, Request

PAGE = 64


def page_chain(tokens: bytes, namespace: str, page: int = PAGE) -> Iterator[int]:
    """Yield for each whole page of `tokens` a hash of all tokens up to its end."""
    step = page * TOKEN_BYTES
    chained = hash(namespace)
    for begin in range(0, len(tokens) - step + 1, step):
        chained = hash((chained, tokens[begin : begin + step]))
        yield chained


def token_hit_rate(requests: Iterable[Request], *, page: int = PAGE) -> float:
    return token_hit_rates(requests, page=page)[0]


def token_hit_rates(requests: Iterable[Request], *, page: int = PAGE) -> tuple[float, float]:
    """Return two shares of all prompt tokens that hit, in whole pages before a prompt's last token.

    A prompt and its answer are in the cache as soon as the request has arrived. The second share
    counts only matches up to where an earlier prompt or answer ended (floored to a page), as with
    Mamba states that are kept there.
    """
    usable: set[int] = set()
    ends: set[int] = set()
    hit = hit_at_ends = total = 0
    for request in requests:
        tokens = request.prompt.to_bytes() + request.output.to_bytes()
        chain = list(page_chain(tokens, request.namespace, page))
        reach = (request.prompt_len - 1) // page
        total += request.prompt_len
        hit_at_ends += page * next((d for d in range(reach, 0, -1) if chain[d - 1] in ends), 0)
        hit += page * next((d for d in range(reach) if chain[d] not in usable), reach)
        usable.update(chain)
        ends.update(chain[end - 1] for end in (request.prompt_len // page, len(chain)) if end)
    return hit / total, hit_at_ends / total

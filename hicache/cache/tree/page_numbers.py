"""Numbers for the pages of requests: a tree that never forgets."""

import numpy as np

from hicache.cache.tree.census import NO_NUMBERS, Census, PageNumbers
from hicache.cache.tree.eviction import Fifo
from hicache.cache.tree.radix_tree import RadixTree
from hicache.request import Request


class PageNumbering:
    """Equal numbers for equal prefixes, whoever brings them."""

    def __init__(self, census: Census, page_size: int) -> None:
        self.page_size = page_size
        self._census = census
        self._tree = RadixTree(page_size=page_size, policy=Fifo())

    def of(self, request: Request, tokens: bytes) -> PageNumbers:
        """The number of each whole page of a request whose prompt and answer are `tokens`.

        The last token of an answer is never fed back, so nothing is kept of it. O(new pages +
        nodes they pass).
        """
        tree = self._tree
        end = (request.prompt_len + request.output_len - 1) // tree.page_size
        node = tree.root(request.namespace)
        parts = [NO_NUMBERS]
        while node.end < end:
            child = tree.descend(node, tokens, end)
            if child is None:
                edge = tokens[node.end * tree.page_bytes : end * tree.page_bytes]
                child = tree.grow(node, edge)
                child.numbers = self._census.add(child.num_pages)
            parts.append(child.numbers)
            node = child
        return np.concatenate(parts)

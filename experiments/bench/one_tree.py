"""One tree in a process of its own: microseconds of each row, as JSON.

    python -m experiments.bench.one_tree ours|python|rust full|full,swa|full,swa,mamba

A *match* finds a whole prompt of one node, or of a path of 64 nodes; an *insert* publishes a prompt
that is new and has its pages; *lock* is a lock and its release, of a node below the root or at the
end of a path of 64; *evict* drops one prompt, which goes back to the pool. A window is of 1,024
tokens, and a state stands at the end of each prompt.
"""

import gc
import json
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

PAGE, NUM_PAGES, NUM_PROMPTS, DEPTH = 64, 64, 300, 64
TOKENS = PAGE * NUM_PAGES
WINDOW = 1024
NUM_STATES = 4 * NUM_PROMPTS
POOL_TOKENS = 4 * NUM_PROMPTS * TOKENS


def main(core: str, *components: str) -> None:
    """Time every row once."""
    window_len = WINDOW if "swa" in components else 0
    num_states = NUM_STATES if "mamba" in components else 0
    tree = (OurTree if core == "ours" else SglangTree)(core, window_len, num_states)
    prompts = [tree.key(range(n * TOKENS, (n + 1) * TOKENS)) for n in range(NUM_PROMPTS)]
    path = range(-TOKENS, 0)  # of `DEPTH` nodes: prompts that share ever longer beginnings
    cuts = [tree.key([*path[: n * PAGE], *range(10**8, 10**8 + PAGE)]) for n in range(1, DEPTH)]
    took = {"insert": each(tree.insert, [tree.ready(prompt) for prompt in prompts])}
    for cut in [*cuts, tree.key(path)]:
        tree.insert(tree.ready(cut))
    deep = [tree.key(path)] * NUM_PROMPTS
    for key in (prompts[0], deep[0]):
        assert tree.length(tree.match(key)) == TOKENS
    took["match"] = each(tree.match, prompts)
    took[f"match, {DEPTH} nodes"] = each(tree.match, deep)
    took["lock"] = each(tree.lock, [tree.match(prompt) for prompt in prompts])
    took[f"lock, {DEPTH} nodes"] = each(tree.lock, [tree.match(key) for key in deep])
    took["evict"] = each(tree.evict, [TOKENS] * (NUM_PROMPTS // 2))
    print(json.dumps(took))


def each(call: Callable[[Any], object], arguments: list[Any]) -> float:
    """Microseconds of one call."""
    gc.collect()
    gc.disable()
    started = time.process_time_ns()
    for argument in arguments:
        call(argument)
    took_ns = time.process_time_ns() - started
    gc.enable()
    return took_ns / len(arguments) / 1000


class OurTree:
    """Ours, pages called by the digests of their tokens."""

    def __init__(self, core: str, window_len: int, num_states: int) -> None:
        from hicache.cache.kinds import named_kinds
        from hicache.cache.pages import PageAllocator
        from hicache.cache.prefix_cache import PrefixCache
        from hicache.cache.tree.radix_tree import RadixTree
        from hicache.cache.tree.sequence import Sequence

        counts = (POOL_TOKENS // PAGE, POOL_TOKENS // PAGE if window_len else 0, num_states)
        pools = [PageAllocator(each, is_checked=False) for each in counts]
        none = [PageAllocator(0) for _ in counts]
        kinds = named_kinds(PAGE, window_len=window_len, has_states=num_states > 0)
        self._tree = RadixTree(kinds=kinds)
        self._cache = PrefixCache(self._tree, (pools, none))
        self._sequence = Sequence

    def key(self, tokens: Any) -> bytes:
        """As the tree takes them."""
        return array("i", tokens).tobytes()

    def ready(self, key: bytes) -> Any:
        """A prompt with pages from the pool where it is new."""
        sequence = self._sequence(key)
        self._cache.acquire(sequence, self._cache.match(sequence, len(key) // 4 + 1))
        self._cache.extend(sequence, len(key) // 4)
        if self._tree.kinds.points:
            slot = self._cache.take_state_slot(sequence)
            assert slot is not None
            sequence.states[sequence.num_pages] = slot
        return sequence

    def insert(self, sequence: Any) -> None:
        """Publish it."""
        self._cache.finish(sequence, sequence.num_pages)

    def match(self, key: bytes) -> Any:
        """The node where it ends."""
        return self._tree.match(key, len(key) // 4).device_node

    def length(self, node: Any) -> int:
        """Tokens up to its end."""
        return int(node.end * PAGE)

    def lock(self, node: Any) -> None:
        """And release."""
        self._tree.release(self._tree.lock(node))

    def evict(self, num_tokens: int) -> None:
        """At least so many tokens."""
        self._cache.device.evict(0, num_tokens // PAGE)


class SglangTree:
    """SGLang's, Python or Rust."""

    def __init__(self, core: str, window_len: int, num_states: int) -> None:
        from experiments.diff.protocol import Pools
        from experiments.diff.sglang.side import open_side

        pools = Pools(
            page_size=PAGE,
            device_tokens=POOL_TOKENS,
            host_tokens=0,
            has_storage=False,
            max_len=2 * TOKENS,
            window_len=window_len,
            swa_tokens=POOL_TOKENS if window_len else 0,
            num_states=num_states,
        )
        self._side = open_side(pools, {"core": core})
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as theirs
        from sglang.srt.mem_cache.radix_cache import RadixKey

        from experiments.diff.sglang.memory import take_pages

        self._cache, self._take, self._join = self._side.cache, take_pages, torch.cat
        self._theirs, self._key = theirs, RadixKey

    def key(self, tokens: Any) -> Any:
        """As the tree takes them."""
        return self._key(array("q", (token + 2 * 10**8 for token in tokens)))

    def ready(self, key: Any) -> Any:
        """A prompt with pages from the pool where it is new."""
        node = self.match(key)
        known = self._cache.path_device_indices(node)
        new = self._take(self._side._allocator, len(key) - len(known))
        states = getattr(self._side._rows, "mamba_allocator", None)
        return self._theirs.InsertParams(
            key=key,
            value=self._join([known, new]),
            prev_prefix_len=len(known),
            mamba_value=states and states.alloc(1),
        )

    def insert(self, ready: Any) -> None:
        """Publish it."""
        self._cache.insert(ready)

    def match(self, key: Any) -> Any:
        """The node where it ends."""
        found = self._cache.match_prefix(self._theirs.MatchPrefixParams(key=key))
        return found.last_device_node

    def length(self, node: Any) -> int:
        """Tokens up to its end."""
        return len(self._cache.path_device_indices(node))

    def lock(self, node: Any) -> None:
        """And release."""
        self._cache.unlock(self._cache.lock(node))

    def evict(self, num_tokens: int) -> None:
        """At least so many tokens."""
        self._cache.evict(self._theirs.EvictParams(num_tokens=num_tokens))


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2].split(","))

"""Time one tree in a process of its own, and print microseconds by row as JSON.

    python -m experiments.bench.one_tree ours|python|rust full|full,swa|full,swa,mamba

A *match* finds a whole prompt of one node, or of a path of 64 nodes. An *insert* publishes a new
prompt that has its pages. A *lock* is a lock and its release, of a node below the root or at the
end of a path of 64 nodes. An *evict* drops one prompt. A window has 1,024 tokens, and a state
stands at the end of each prompt.
"""

import gc
import json
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Protocol

PAGE, NUM_PAGES, NUM_PROMPTS, DEPTH = 64, 64, 300, 64
WINDOW = 1024
TURNS = 3  # of each row that leaves the tree as it was; the least counts
# models of ours with these kinds of data; both windows have 1,024 tokens
MODELS = {"full": "llama3_8b", "full,swa": "gemma3_27b", "full,swa,mamba": "hymba_1b5"}


class Tree(Protocol):
    """The operations of a prefix tree that are timed; `Any` is the tree's own type."""

    def key(self, tokens: Iterable[int]) -> Any: ...

    def ready(self, key: Any) -> Any:
        """Return a prompt whose new pages are taken from the pool."""

    def insert(self, ready: Any) -> None: ...

    def match(self, key: Any) -> Any:
        """Return the node where the prompt ends."""

    def match_len(self, node: Any) -> int: ...

    def lock(self, node: Any) -> None:
        """Lock the node, and release it."""

    def evict(self, num_tokens: int) -> None: ...


def main(core: str, components: str) -> None:
    made: Callable[[str, str], Tree] = OurTree if core == "ours" else SglangTree
    tokens_len = PAGE * NUM_PAGES
    tree = made(core, components)
    prompts = [tree.key(range(n * tokens_len, (n + 1) * tokens_len)) for n in range(NUM_PROMPTS)]
    path = range(10**7, 10**7 + tokens_len)  # becomes `DEPTH` nodes: prompts that branch off it
    cuts = [tree.key([*path[: n * PAGE], *range(10**8, 10**8 + PAGE)]) for n in range(1, DEPTH)]
    took = {"insert": _each(tree.insert, [tree.ready(prompt) for prompt in prompts], 1)}
    for cut in [*cuts, tree.key(path)]:
        tree.insert(tree.ready(cut))
    deep = [tree.key(path)] * NUM_PROMPTS
    for key in (prompts[0], deep[0]):
        assert tree.match_len(tree.match(key)) == tokens_len
    took["match"] = _each(tree.match, prompts)
    took[f"match, {DEPTH} nodes"] = _each(tree.match, deep)
    took["lock"] = _each(tree.lock, [tree.match(prompt) for prompt in prompts])
    took[f"lock, {DEPTH} nodes"] = _each(tree.lock, [tree.match(key) for key in deep])
    took["evict"] = _each(tree.evict, [tokens_len] * (NUM_PROMPTS // 2), 1)
    print(json.dumps(took))


def _each(call: Callable[[Any], object], arguments: list[Any], turns: int = TURNS) -> float:
    """Return the microseconds of one call."""
    times_ns = []
    for _ in range(turns):
        gc.collect()
        gc.disable()
        started_ns = time.process_time_ns()
        for argument in arguments:
            call(argument)
        times_ns.append(time.process_time_ns() - started_ns)
        gc.enable()
    return min(times_ns) / len(arguments) / 1000


class OurTree:
    """The tree of an engine as `hicache.experiment.build` makes it; digests name its pages."""

    def __init__(self, core: str, components: str) -> None:
        from hicache.cache.tree.sequence import Sequence
        from hicache.experiment import build
        from hicache.runs.schema import config_of

        tokens = 4 * NUM_PROMPTS * PAGE * NUM_PAGES
        sizes = [f"cache.device.tokens.full={tokens}"]
        if "swa" in components:
            sizes.append(f"cache.device.tokens.swa={tokens}")
        if "mamba" in components:
            sizes.append(f"cache.device.states={4 * NUM_PROMPTS}")
        settings = (f"model={MODELS[components]}", f"cache.page_size={PAGE}", "cache.host_gib=0")
        engine, _ = build(config_of(*settings, *sizes, "storage=none", "hardware=h200"))
        self._cache, self._tree, self._sequence = engine.cache, engine.cache.tree, Sequence

    def key(self, tokens: Iterable[int]) -> bytes:
        return array("i", tokens).tobytes()

    def ready(self, key: bytes) -> Any:
        sequence = self._sequence(key)
        assert self._cache.acquire(sequence, self._cache.match(sequence, len(key) // 4 + 1))
        assert self._cache.extend(sequence, len(key) // 4)
        if self._tree.kinds.points:
            slot = self._cache.take_state_slot(sequence)
            assert slot is not None
            sequence.states[sequence.num_pages] = slot
        return sequence

    def insert(self, ready: Any) -> None:
        self._cache.finish(ready, ready.num_pages)

    def match(self, key: bytes) -> Any:
        return self._tree.match(key, len(key) // 4).device_node

    def match_len(self, node: Any) -> int:
        return int(node.end * PAGE)

    def lock(self, node: Any) -> None:
        self._tree.release(self._tree.lock(node))

    def evict(self, num_tokens: int) -> None:
        self._cache.device.evict(0, num_tokens // PAGE)


class SglangTree:
    """SGLang's tree with its Python or Rust core."""

    def __init__(self, core: str, components: str) -> None:
        from experiments.diff.protocol import Pools
        from experiments.diff.sglang.side import SglangSide

        tokens = 4 * NUM_PROMPTS * PAGE * NUM_PAGES
        has_window = "swa" in components
        pools = Pools(
            page_size=PAGE,
            device_tokens=tokens,
            host_tokens=0,
            has_storage=False,
            max_len=2 * PAGE * NUM_PAGES,
            window_len=WINDOW if has_window else 0,
            swa_tokens=tokens if has_window else 0,
            num_states=4 * NUM_PROMPTS if "mamba" in components else 0,
        )
        self._side = SglangSide(pools, {"core": core})
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as theirs
        from sglang.srt.mem_cache.radix_cache import RadixKey

        from experiments.diff.sglang.memory import take_pages

        self._cache, self._take, self._join = self._side.cache, take_pages, torch.cat
        self._theirs, self._key = theirs, RadixKey

    def key(self, tokens: Iterable[int]) -> Any:
        return self._key(array("q", tokens))

    def ready(self, key: Any) -> Any:
        node = self.match(key)
        known = self._cache.path_device_indices(node)
        new = self._take(self._side.allocator, len(key) - len(known))
        states = getattr(self._side.rows, "mamba_allocator", None)
        return self._theirs.InsertParams(
            key=key,
            value=self._join([known, new]),
            prev_prefix_len=len(known),
            mamba_value=states and states.alloc(1),
        )

    def insert(self, ready: Any) -> None:
        self._cache.insert(ready)

    def match(self, key: Any) -> Any:
        found = self._cache.match_prefix(self._theirs.MatchPrefixParams(key=key))
        return found.last_device_node

    def match_len(self, node: Any) -> int:
        return len(self._cache.path_device_indices(node))

    def lock(self, node: Any) -> None:
        self._cache.unlock(self._cache.lock(node))

    def evict(self, num_tokens: int) -> None:
        self._cache.evict(self._theirs.EvictParams(num_tokens=num_tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Random walks: requests are submitted, run, end or are aborted; copies end in any order.

A walk drives the real cache and prefetcher as the scheduler and an executor would, in tiny pools.
After every operation a walk checks the invariants, compares the tree with the naive cache, and
checks every page that a request reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from hicache import config as conf
from hicache.cache.kinds import FULL, KEY_TAGS
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import CopyState, Reported, StorageDelete
from hicache.cache.tree.digests import chain_seed, page_digests
from hicache.cache.tree.lookup import look, usable_len
from hicache.cache.tree.node import TIERS, MatchResult
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.clock import SECOND_NS
from hicache.executor.storage_script import Load, read_script
from hicache.observe import invariants
from hicache.rules import DeadlineFrom
from tests.cache.ghost import GhostMemory, Payload
from tests.cache.oracle import answer_of, flatten, longest_match
from tests.cache.small import RANKED, make_cache, prefetcher_of

NAMESPACES = ("n0", "n0", "n0", "n0", "n1")


class WrongMatchError(AssertionError):
    """The tree and the naive cache disagree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of a walk. `cache`: arguments of `make_cache`."""

    seed: int
    prefetch: conf.PrefetchConfig
    cache: dict[str, Any]


def random_setting(seed: int) -> Setting:
    """Random settings of a walk: kinds, page size, policies and the sizes of tiny pools."""
    rng = Random(seed)
    page = rng.choice([1, 4, 16])
    windows = [1, page, 3 * page, max(page // 2, 1), 2 * page + 1, 2 * page - 1]
    window = rng.choice(windows) if rng.random() < 0.6 else 0
    window_pages = -(-window // page)
    swa = (window_pages + rng.randint(2, 12), rng.randint(0, window_pages + 12))
    slots = (rng.randint(4, 12), rng.randint(0, 8))
    has_states = rng.random() < 0.6
    pools = [(rng.randint(8, 24), rng.choice([0, 6, 12, 24, 48]))]
    pools += [swa if window else (0, 0), slots if has_states else (0, 0)]
    device, host = zip(*pools, strict=True)
    write = rng.choice(conf.STORAGE_WRITES)
    tiering = (
        rng.choice(list(conf.Tiering)) if write == "on_host_eviction" else conf.Tiering.inclusive
    )
    return Setting(
        seed=seed,
        prefetch=conf.PrefetchConfig(
            stop=rng.choice([*conf.STOP_POLICIES, "wait_complete"]),
            timeout_base_s=rng.choice([0.0, 1.0, 10.0]),
            threshold=page * rng.choice([1, 1, 2]),
            cut=rng.choice(list(conf.CutPolicy)),
            stage_at=rng.choice(list(conf.StageAt)),
            commit=rng.choice(list(conf.CommitPolicy)),
            occupied_share=rng.choice([0.5, 1.0, 1.0]),
            await_sidecars=rng.random() < 0.8,
        ),
        cache={
            "device": device,
            "host": host,
            "write_policy": rng.choice(conf.WRITE_POLICIES),
            "eviction": rng.choice(RANKED),
            "page_size": page,
            "window_len": window,
            "has_states": has_states,
            "load_back_threshold": rng.choice([1, 10]),
            "storage_queue_bytes": rng.choice([None, 8, 10_000, 10_000, 10_000, 10_000]),
            "storage": conf.StorageConfig(
                write=write, write_hits=rng.choice([1, 1, 2]), tiering=tiering
            ),
            "trims_leaves": rng.random() < 0.3,
            "evicts_mirrors": rng.random() < 0.5,
            "backs_up_answers": rng.random() < 0.7,
            "loads_last_page": rng.random() < 0.3,
            "deadline_from": rng.choice(list(DeadlineFrom)),
        },
    )


def portrait(tree: RadixTree) -> str:
    """A text of all nodes with their attributes, all queues and all counts of a tree."""
    residency = tree.residency
    queues = [residency.duplicates, *(each for tier in residency.queues for each in tier)]
    counts = (tree.num_nodes, residency.tick, residency.resident, residency.protected)
    nodes = [(id(node), vars(node)) for node in (*tree.roots.values(), *tree.nodes())]
    return repr((counts, [[*map(id, queue)] for queue in queues], nodes))


@dataclass(slots=True, kw_only=True, eq=False)
class Actor:
    """A request, waiting or computed up to `kv_len`."""

    id: int
    sequence: Sequence
    prompt_len: int
    prefetched: dict[str, int] = field(default_factory=dict)  # arguments of `acquire`
    kv_len: int = 0
    saves: set[int] = field(default_factory=set)  # pages after which states are kept


class Walk:
    """A cache with a prefetcher, and random operations on them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rng = Random(setting.seed + 1)
        self.cache = make_cache(**setting.cache)
        self.tree = self.cache.tree
        self.page = self.tree.page_size
        self.device_pages = setting.cache["device"][FULL]
        host_tokens = setting.cache["host"][FULL] * self.page
        self.prefetcher = prefetcher_of(self.cache, setting.prefetch, host_tokens)
        self.memory = GhostMemory(self.tree)
        self.waiting: list[Actor] = []
        self.running: list[Actor] = []
        self.copies: list[Reported] = []
        self.io: list[Iterator[Prefetch]] = []  # queries and reads under way
        self.now_ns = 0
        self.past: list[bytes] = [b""]
        if setting.cache["storage_queue_bytes"] is not None:
            for _ in range(3):
                self._store_document()

    # -- the walk ------------------------------------------------------------------------------

    def run(self, num_operations: int) -> None:
        """Do `num_operations` random operations, then end all requests and copies."""
        operations = {
            self.submit: 8,
            self.start: 2,
            self.serve: 8,
            self.go_on: 4,
            self.end: 4,
            self.drop: 2,
            self.finish_copy: 2,
            self.continue_io: 8,
            self.all_io: 4,
            self.lose_stored: 1,
            self.press: 3,
            self.probe: 1,
        }
        for _ in range(num_operations):
            self.rng.choices([*operations], [*operations.values()])[0]()
            self.now_ns += self.rng.randint(0, SECOND_NS // 4)
            self.check()
        self.drain()

    def drain(self) -> None:
        """Abort all requests, complete all copies, and check that nothing is left."""
        while self.waiting or self.running:
            self.drop()
            self.check()
        while self.copies or self.io:
            self.all_io()
            self.check()
        invariants.check_drained(self.cache, self.prefetcher)

    def check(self) -> None:
        """Book new copies; then check invariants and the content of pages."""
        self._hand_over()
        sequences = [actor.sequence for actor in self.running]
        invariants.check(self.cache, self.prefetcher, sequences)
        self.memory.check_tree(flatten(self.tree))
        for actor in self.running:
            self.memory.check_readable(actor.sequence, actor.kv_len)

    # -- requests ------------------------------------------------------------------------------

    def submit(self) -> None:
        """Submit a request whose prompt may begin with a part of an earlier one."""
        if len(self.waiting) >= 6:
            return
        rng, page = self.rng, self.page
        past = rng.choice(self.past)
        shared = past[: 4 * rng.randint(0, len(past) // 4)] if rng.random() < 0.3 else past
        fresh = self._bits(rng.randint(1, 4 * page + 2))
        longest = 4 * page * max(self.device_pages * 2 // 3, 2)
        tokens = (shared + fresh)[:longest]
        prompt_len = len(tokens) // 4
        tokens += self._bits(rng.randint(1, 2 * page + 1))
        self.past.append(tokens)
        sequence = Sequence(tokens, rng.choice(NAMESPACES))
        actor = Actor(id=len(self.past), sequence=sequence, prompt_len=prompt_len)
        self.waiting.append(actor)
        match = self.match(sequence, prompt_len)
        prefetch = self.prefetcher.prefetch_from_storage(
            actor.id, sequence, match, prompt_len, self.now_ns
        )
        if prefetch is not None:
            first, end = prefetch.start_page, prefetch.start_page + prefetch.num_pages
            actor.prefetched = {"storage_start": first * page, "storage_end": end * page}

    def match(self, sequence: Sequence, prompt_len: int) -> MatchResult:
        """Match a prompt, and compare the result with the naive cache and with lookups."""
        sought = (sequence.tokens, prompt_len - 1, sequence.namespace)
        wanted = longest_match(flatten(self.tree), self.tree.kinds, *sought)
        before = portrait(self.tree)
        told = answer_of(look(self.tree, *sought))
        lengths = [usable_len(self.tree, *sought, on_device=each) for each in (True, False)]
        if told != wanted or lengths != [wanted.device_prefix_len, wanted.usable_len]:
            raise WrongMatchError(f"lookups find {told} and {lengths}, the oracle {wanted}")
        if portrait(self.tree) != before:
            raise WrongMatchError("a lookup has changed the tree")
        match = self.cache.match(sequence, prompt_len)
        if answer_of(match) != wanted:
            raise WrongMatchError(f"the tree says {answer_of(match)}, the oracle {wanted}")
        return match

    def press(self) -> None:
        """Evict all that may leave one pool, or all pools."""
        wanted = [(tier, kind) for tier in TIERS for kind in self.tree.kinds.numbers]
        if self.rng.random() < 0.5:
            wanted = [self.rng.choice(wanted)]
        for tier, kind in wanted:
            self.cache.evict_all(tier, kind)

    def probe(self) -> None:
        """Match a prompt of an earlier request."""
        tokens = self.rng.choice(self.past)
        if tokens:
            sequence = Sequence(tokens, self.rng.choice(NAMESPACES))
            self.match(sequence, self.rng.randint(1, len(tokens) // 4))

    def start(self) -> Actor | None:
        """Admit a waiting request if its prefetch may stop and the pools have room."""
        if not self.waiting:
            return None
        actor, page = self.rng.choice(self.waiting), self.page
        if not self.prefetcher.check(actor.id, self.now_ns):
            return None
        match = self.match(actor.sequence, actor.prompt_len)
        lock = self.tree.lock(match.best_node)
        acquired = self.cache.acquire(
            actor.sequence, match, prompt_len=actor.prompt_len, **actor.prefetched
        )
        self.tree.release(lock)
        if acquired is None:
            return None
        load_back, actor.kv_len = acquired.load_back, acquired.cached_len
        hit_len = match.device_prefix_len if load_back is None else match.usable_len
        wanted = self.tree.kinds.replay_start(hit_len // page) * page
        self.memory.began[actor.sequence] = actor.kv_len
        loaded_len = -(-actor.kv_len // page) * page  # with the last page
        assert actor.kv_len == wanted or loaded_len == actor.prompt_len
        parts = acquired.device_len + acquired.host_len + acquired.storage_len
        assert parts == actor.kv_len
        self._hand_over()
        if load_back is not None and any(move.is_own for move in load_back.moves):
            self._finish(load_back)  # the step that writes into these pages waits for the copy
        self.memory.check_readable(actor.sequence, loaded_len)
        if self.tree.kinds.points:
            last_page = actor.prompt_len // page
            actor.saves = {last_page, self.rng.randint(0, last_page)}
        self.waiting.remove(actor)
        self.running.append(actor)
        self.prefetcher.forget(actor.id)
        self._extend(actor)
        return actor

    def serve(self) -> None:
        """Admit a request, compute its whole prompt and end it."""
        actor = self.start()
        while actor in self.running and actor.kv_len < actor.prompt_len:
            self._extend(actor)
        self.end()

    def go_on(self) -> None:
        """Compute another chunk of a prompt, or some tokens of an answer."""
        if self.running:
            self._extend(self.rng.choice(self.running))

    def end(self) -> None:
        """End a request whose prompt is computed, and publish its last pages."""
        done = [actor for actor in self.running if actor.kv_len >= actor.prompt_len]
        if not done:
            return
        actor = self.rng.choice(done)
        sequence = actor.sequence
        num_pages = actor.kv_len // self.page
        if sequence.boundary_slot is not None and num_pages > sequence.tree_pages:
            sequence.states[num_pages] = sequence.boundary_slot
            sequence.boundary_slot = None
        self.running.remove(actor)
        self.cache.finish(sequence, num_pages)

    def drop(self) -> None:
        """Abort a running or waiting request."""
        actors = self.running + self.waiting
        if not actors:
            return
        actor = self.rng.choice(actors)
        if actor in self.running:
            self.running.remove(actor)
            self.cache.abandon(actor.sequence)
        else:
            self.waiting.remove(actor)
            self.prefetcher.abort(actor.id)

    def _extend(self, actor: Actor) -> None:
        cache, sequence, page = self.cache, actor.sequence, self.page
        start, in_prompt = actor.kv_len, actor.kv_len < actor.prompt_len
        if in_prompt:
            end = min((start // page + self.rng.randint(1, 4)) * page, actor.prompt_len)
        else:
            end = min(start + self.rng.randint(1, page + 1), len(sequence.tokens) // 4)
        if end <= start:
            return
        if not cache.extend(sequence, end):
            self._hand_over()
            self.running.remove(actor)
            cache.abandon(sequence)
            again = Sequence(sequence.tokens, sequence.namespace)
            self.waiting.append(Actor(id=actor.id, sequence=again, prompt_len=actor.prompt_len))
            return
        captured = {}
        for pages in sorted(each for each in actor.saves if start < each * page <= end):
            if pages == actor.prompt_len // page:
                slot, sequence.boundary_slot = sequence.boundary_slot, None
            else:
                slot = cache.take_state_slot(sequence)
            if slot is not None:
                captured[pages] = slot
        sequence.states |= captured
        self._hand_over()
        self.memory.compute(sequence, start, end)
        for pages, slot in captured.items():
            self.memory.capture(sequence, pages * page, slot)
        boundary = end // page * page
        if not in_prompt and boundary > start and sequence.boundary_slot is not None:
            self.memory.capture(sequence, boundary, sequence.boundary_slot)
        actor.kv_len = end
        if in_prompt and end == actor.prompt_len:
            cache.publish(sequence, end // page)
            if self.tree.kinds.points and sequence.boundary_slot is None:
                sequence.boundary_slot = cache.take_state_slot(sequence)
        else:
            cache.leave_window(sequence, end)

    def _bits(self, count: int) -> bytes:
        # of two tokens alone, so that prefixes meet
        return np.array([self.rng.randint(0, 1) for _ in range(count)], "<i4").tobytes()

    def _store_document(self) -> None:
        # another engine has written a prompt, not all of it survives
        rng, tree = self.rng, self.tree
        num_pages = rng.randint(1, max(self.device_pages * 2 // 3, 1))
        tokens = self._bits(num_pages * tree.page_size)
        self.past.append(tokens)
        seed = chain_seed("n0")
        for page, digest in enumerate(page_digests(seed, tokens, tree.page_bytes)):
            payload = Payload("n0", tokens[: (page + 1) * tree.page_bytes])
            for kind in tree.kinds.numbers:
                if rng.random() < (0.5 if kind in tree.kinds.points else 0.97):
                    self.memory.stored[digest + KEY_TAGS[kind : kind + 1]] = payload

    def _hand_over(self) -> None:
        # copies are carried out before anything is computed over what they leave
        for work in self.cache.outbox:
            self.memory.book(work)
            if not isinstance(work, CopyState | StorageDelete):
                self.copies.append(work)
        self.io += map(self._answer, self.prefetcher.outbox)
        for prefetch in self.prefetcher.reads:
            self.io.append(self._read(prefetch, read_script(prefetch, self.rng.randint(1, 2))))
        for handed_over in (self.cache.outbox, self.prefetcher.outbox, self.prefetcher.reads):
            handed_over.clear()

    # -- copies and storage --------------------------------------------------------------------

    def all_io(self) -> None:
        """Complete up to 20 copies, and do up to 60 parts of storage queries and reads."""
        for _ in range(20):
            for call in (self.finish_copy, self.continue_io, self.continue_io, self.continue_io):
                call()
                self._hand_over()

    def finish_copy(self) -> None:
        """Complete one of the copies."""
        if self.copies:
            self._finish(self.rng.choice(self.copies))

    def _finish(self, work: Reported) -> None:
        self.copies.remove(work)
        self.memory.settle(work)
        self.cache.complete(work)

    def continue_io(self) -> None:
        """Do the next part of a query or read of storage."""
        if self.io:
            work = self.rng.choice(self.io)
            if next(work, None) is None:
                self.io.remove(work)

    def _answer(self, prefetch: Prefetch) -> Iterator[Prefetch]:
        if not prefetch.is_settled:
            stored = self.memory.stored
            prefetch.restorable = prefetch.ask(lambda keys: [key in stored for key in keys])
        yield prefetch  # the answer reaches the prefetcher later
        self.prefetcher.on_queried(prefetch)

    def _read(self, prefetch: Prefetch, script: Iterator[Load]) -> Iterator[Prefetch]:
        for load in script:
            yield prefetch
            staged = set(prefetch.staged[FULL])
            for key, (kind, page_id) in zip(load.keys, load.items, strict=True):
                if key not in self.memory.stored:
                    break
                if kind == FULL:
                    assert page_id in staged, "the reader fills a page that is no longer its own"
                self.memory.read_page(key, kind, page_id)
                load.found += 1
            if load.restores:
                prefetch.restored_pages = load.restores if load.is_whole else 0
            else:
                prefetch.completed_pages += load.found
            yield prefetch
        prefetch.is_read = True
        yield prefetch
        self.prefetcher.on_read(prefetch)

    def lose_stored(self) -> None:
        """Remove a page from storage, as an eviction there does."""
        if self.memory.stored:
            self.memory.stored.pop(self.rng.choice(sorted(self.memory.stored)))

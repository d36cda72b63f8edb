"""Random walks: requests that come, run, end and are dropped, and copies done in any order.

A walk drives the real cache and prefetcher as the scheduler and an executor would, in tiny pools.
After every operation the laws are checked, the tree is compared with the oracle, and every page
that a request reads is looked at.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from hicache.cache.kinds import FULL, KEY_TAGS
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import CopyState, StorageDelete
from hicache.cache.tree.digests import chain_seed, page_digests
from hicache.cache.tree.lookup import usable_len
from hicache.cache.tree.node import TIERS, MatchResult
from hicache.cache.tree.sequence import Sequence
from hicache.clock import SECOND_NS
from hicache.config import (
    EVICTION_POLICIES,
    STOP_POLICIES,
    STORAGE_WRITES,
    WRITE_POLICIES,
    CommitPolicy,
    CutPolicy,
    DeadlineFrom,
    PrefetchConfig,
    QuirksConfig,
    StageAt,
    StorageConfig,
    Tiering,
)
from hicache.executor.storage_script import Load, read_script
from hicache.observe import invariants
from tests.cache.ghost import GhostMemory, Payload
from tests.cache.oracle import answer_of, flatten, longest_match
from tests.cache.portrait import portrait
from tests.cache.small import evict_all, make_cache, prefetcher_of


class WrongMatchError(AssertionError):
    """The tree and the oracle disagree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a walk runs in. `cache`: arguments of `make_cache`."""

    seed: int
    num_namespaces: int
    prefetch: PrefetchConfig
    cache: dict[str, Any]


def random_setting(seed: int) -> Setting:
    """Any kinds, page size, policies and tiny pools."""
    rng = Random(seed)
    page = rng.choice([1, 4, 16])
    windows = [1, page, 3 * page, max(page // 2, 1), 2 * page + 1, 2 * page - 1]
    window = rng.choice(windows) if rng.random() < 0.6 else 0
    window_pages = -(-window // page)
    has_states = rng.random() < 0.6
    swa = (window_pages + rng.randint(2, 12)) if window else 0
    host_swa = rng.randint(0, window_pages + 12) if window else 0
    storage = Random(f"storage {seed}")  # draws of its own: those of the rest stay what they are
    storage_writes = storage.choice(STORAGE_WRITES)
    habits = Random(f"habits {seed}")
    is_late = storage_writes == "on_host_eviction"
    pools = {
        "write_policy": rng.choice(WRITE_POLICIES),
        "device": (rng.randint(8, 24), swa, rng.randint(4, 12) if has_states else 0),
        "host": (rng.choice([0, 6, 12, 24, 48]), host_swa, rng.randint(0, 8) if has_states else 0),
    }
    return Setting(
        seed=seed,
        prefetch=PrefetchConfig(
            stop=rng.choice([*STOP_POLICIES, "wait_complete"]),
            timeout_base_s=rng.choice([0.0, 1.0, 10.0]),
            threshold=page * rng.choice([1, 1, 2]),
            cut=rng.choice(list(CutPolicy)),
            stage_at=rng.choice(list(StageAt)),
            commit=rng.choice(list(CommitPolicy)),
            deadline_from=rng.choice(list(DeadlineFrom)),
            occupied_share=rng.choice([0.5, 1.0, 1.0]),
        ),
        cache={
            **pools,
            "eviction": rng.choice(sorted(EVICTION_POLICIES)),
            "page_size": page,
            "window_len": window,
            "has_states": has_states,
            "load_back_threshold": rng.choice([1, 10]),
            "storage_queue_bytes": rng.choice([None, 8, 10_000, 10_000, 10_000, 10_000]),
            "storage": StorageConfig(
                write=storage_writes,
                write_hits=storage.choice([1, 1, 2]),
                tiering=storage.choice(list(Tiering)) if is_late else Tiering.inclusive,
            ),
            "trims_leaves": habits.random() < 0.3,
            "backs_up_answers": habits.random() < 0.7,
            "loads_last_page": habits.random() < 0.3,
            "quirks": QuirksConfig(await_sidecars=habits.random() < 0.8),
        },
        num_namespaces=rng.choice([1, 2]),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Actor:
    """A request: waiting until it has been acquired, then computed up to `kv_len`."""

    id: int
    sequence: Sequence
    prompt_len: int
    prefetched: tuple[int, int] = (0, 0)
    kv_len: int = 0
    saves: list[int] = field(default_factory=list)


class Walk:
    """One world and its random operations."""

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
        self.copies: list[object] = []
        self.queries: list[Prefetch] = []
        self.answered: list[Prefetch] = []  # asked, and not taken in yet
        self.readers: list[Iterator[object]] = []  # reads under way
        self.read: list[Prefetch] = []  # read, and not taken in yet
        self.now_ns = 0
        self.past: list[bytes] = [b""]
        if setting.cache["storage_queue_bytes"] is not None:
            for _ in range(3):
                self._store_document()

    # -- the walk ------------------------------------------------------------------------------

    def run(self, num_operations: int) -> None:
        """So many operations, then let everything end."""
        operations: list[tuple[Callable[[], None], int]] = [
            (self.submit, 8),
            (self.start, 2),
            (self.serve, 8),
            (self.go_on, 4),
            (self.end, 4),
            (self.drop_running, 1),
            (self.drop_waiting, 1),
            (self.finish_copy, 2),
            (self.answer_query, 2),
            (self.take_answer, 2),
            (self.read_on, 2),
            (self.take_read, 2),
            (self.all_io, 4),
            (self.lose_stored, 1),
            (self.press, 3),
            (self.probe, 1),
        ]
        calls, weights = zip(*operations, strict=True)
        for _ in range(num_operations):
            self.rng.choices(calls, weights)[0]()
            self.now_ns += self.rng.randint(0, SECOND_NS // 4)
            self.check()
        self.drain()

    def drain(self) -> None:
        """Drop all requests, finish all copies, and see that nothing is left."""
        while self.waiting:
            self.drop_waiting()
            self.check()
        while self.running:
            self.drop_running()
            self.check()
        while self._has_io():
            self.all_io()
            self.check()
        invariants.check_drained(self.cache, self.prefetcher)

    def check(self) -> None:
        """Hand the outbox over; then laws, contents and locks."""
        self._hand_over()
        sequences = [actor.sequence for actor in self.running]
        invariants.check(self.cache, self.prefetcher, sequences)
        self.memory.check_tree(flatten(self.tree))
        for actor in self.running:
            self.memory.check_readable(actor.sequence, actor.kv_len)

    # -- requests ------------------------------------------------------------------------------

    def submit(self) -> None:
        """A request comes; what it shares with earlier ones is cut anywhere."""
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
        namespace = "n1" if rng.random() < 0.2 and self.setting.num_namespaces > 1 else "n0"
        sequence = Sequence(tokens, namespace)
        actor = Actor(id=len(self.past), sequence=sequence, prompt_len=prompt_len)
        self.waiting.append(actor)
        match = self.match(actor)
        prefetch = self.prefetcher.prefetch_from_storage(
            actor.id, actor.sequence, match, prompt_len, self.now_ns
        )
        if prefetch is not None:
            first = prefetch.start_page * page
            actor.prefetched = (first, first + prefetch.num_pages * page)

    def match(self, actor: Actor) -> MatchResult:
        """The tree's match, compared with the oracle's, and with what it says when only asked."""
        sought = (actor.sequence.tokens, actor.prompt_len - 1, actor.sequence.namespace)
        wanted = longest_match(flatten(self.tree), self.tree.kinds, *sought)
        before = portrait(self.tree)
        told = usable_len(self.tree, *sought)
        if told != wanted.usable_len:
            raise WrongMatchError(f"asked, the tree says {told}, the oracle {wanted.usable_len}")
        if portrait(self.tree) != before:
            raise WrongMatchError("asking has changed the tree")
        match = self.cache.match(actor.sequence, actor.prompt_len)
        if answer_of(match) != wanted:
            raise WrongMatchError(f"the tree says {answer_of(match)}, the oracle {wanted}")
        return match

    def press(self) -> None:
        """Somebody takes all that eviction can give of one pool, or of all, and gives it back."""
        wanted = [(tier, kind) for tier in TIERS for kind in self.tree.kinds.numbers]
        if self.rng.random() < 0.5:
            wanted = [self.rng.choice(wanted)]
        for tier, kind in wanted:
            evict_all(self.cache, tier, kind)

    def probe(self) -> None:
        """Look for something that was there once."""
        tokens = self.rng.choice(self.past)
        if tokens:
            sequence = Sequence(tokens, f"n{self.rng.randrange(self.setting.num_namespaces)}")
            prompt_len = self.rng.randint(1, len(tokens) // 4)
            self.match(Actor(id=0, sequence=sequence, prompt_len=prompt_len))

    def start(self) -> None:
        """Admit a waiting request, if its prefetch lets it and the pools do."""
        if not self.waiting:
            return
        actor = self.rng.choice(self.waiting)
        if not self.prefetcher.check(actor.id, self.now_ns):
            return
        match = self.match(actor)
        lock = self.tree.lock(match.best_node)
        first, last = actor.prefetched
        acquired = self.cache.acquire(
            actor.sequence,
            match,
            prompt_len=actor.prompt_len,
            storage_start=first,
            storage_end=last,
        )
        self.tree.release(lock)
        if acquired is None:
            return
        hit_len = match.device_prefix_len if acquired.load_back is None else match.usable_len
        wanted = self.tree.kinds.replay_start(hit_len // self.page) * self.page
        self.memory.began[actor.sequence] = acquired.cached_len
        loaded_len = -(-acquired.cached_len // self.page) * self.page  # with the last page
        assert acquired.cached_len == wanted or loaded_len == actor.prompt_len
        parts = acquired.device_len + acquired.host_len + acquired.storage_len
        assert parts == acquired.cached_len
        self._hand_over()
        load_back = acquired.load_back
        if load_back is not None and any(move.is_own for move in load_back.moves):
            self._finish(load_back)  # the step that writes into these pages waits for the copy
        actor.kv_len = acquired.cached_len
        self.memory.check_readable(actor.sequence, loaded_len)
        page = self.page
        last_page = actor.prompt_len // page
        if self.tree.kinds.points:
            ends = {last_page, self.rng.randint(0, last_page)}
            actor.saves = sorted(end for end in ends if end * page > actor.kv_len)
        self.waiting.remove(actor)
        self.running.append(actor)
        self.prefetcher.forget(actor.id)
        self._extend(actor)

    def serve(self) -> None:
        """Admit a request, compute its whole prompt and end it."""
        before = set(self.running)
        self.start()
        for actor in set(self.running) - before:
            while actor in self.running and actor.kv_len < actor.prompt_len:
                self._extend(actor)
        self.end()

    def go_on(self) -> None:
        """One more chunk of a prompt, or some tokens of an answer."""
        if self.running:
            self._extend(self.rng.choice(self.running))

    def end(self) -> None:
        """A request whose prompt is computed ends; its last pages are published."""
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

    def drop_running(self) -> None:
        """A running request is aborted."""
        if self.running:
            actor = self.running.pop(self.rng.randrange(len(self.running)))
            self.cache.abandon(actor.sequence)

    def drop_waiting(self) -> None:
        """A waiting request is aborted, whatever its prefetch is doing."""
        if self.waiting:
            actor = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.prefetcher.abort(actor.id)

    def _extend(self, actor: Actor) -> None:
        cache, sequence, page = self.cache, actor.sequence, self.page
        in_prompt = actor.kv_len < actor.prompt_len
        if in_prompt:
            end = actor.kv_len + self.rng.randint(1, 4) * page
            end = actor.prompt_len if end >= actor.prompt_len else end // page * page
            end = max(end, actor.kv_len + 1)
        else:
            end = min(actor.kv_len + self.rng.randint(1, page + 1), len(sequence.tokens) // 4)
        if end <= actor.kv_len:
            return
        if not cache.extend(sequence, end):
            self._hand_over()
            self.running.remove(actor)
            cache.abandon(sequence)
            actor.sequence = Sequence(sequence.tokens, sequence.namespace)
            actor.kv_len, actor.saves, actor.prefetched = 0, [], (0, 0)
            self.waiting.append(actor)
            return
        captured = []
        for pages in [each for each in actor.saves if actor.kv_len < each * page <= end]:
            if pages == actor.prompt_len // page:
                slot, sequence.boundary_slot = sequence.boundary_slot, None
            else:
                slot = cache.take_state_slot(sequence)
            if slot is not None:
                captured.append((pages, slot))
        self._hand_over()
        self.memory.compute(sequence, actor.kv_len, end)
        for pages, slot in captured:
            self.memory.capture(sequence, pages * page, slot)
            sequence.states[pages] = slot
        boundary = end // page * page
        if not in_prompt and boundary > actor.kv_len and sequence.boundary_slot is not None:
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
        outbox = self.cache.outbox.copy()
        self.cache.outbox.clear()
        for work in outbox:
            self.memory.book(work)
            if not isinstance(work, CopyState | StorageDelete):
                self.copies.append(work)
        self.queries += self.prefetcher.outbox
        self.prefetcher.outbox.clear()
        for prefetch in self.prefetcher.reads:
            batch_pages = self.rng.randint(1, 2)
            self.readers.append(self._reading(prefetch, read_script(prefetch, batch_pages)))
        self.prefetcher.reads.clear()

    # -- copies and storage --------------------------------------------------------------------

    def all_io(self) -> None:
        """Copies and storage get much done."""
        for _ in range(20):
            for call in (
                self.finish_copy,
                self.answer_query,
                self.take_answer,
                self.read_on,
                self.take_read,
            ):
                call()
                self._hand_over()
            if not self._has_io():
                break

    def _has_io(self) -> bool:
        return any((self.copies, self.queries, self.answered, self.readers, self.read))

    def finish_copy(self) -> None:
        """Any copy under way is done."""
        if self.copies:
            self._finish(self.rng.choice(self.copies))

    def _finish(self, work: object) -> None:
        self.copies.remove(work)
        self.memory.settle(work)  # type: ignore[arg-type]
        self.cache.complete(work)  # type: ignore[arg-type]

    def answer_query(self) -> None:
        """Storage says what it has of a prefetch."""
        if not self.queries:
            return
        prefetch = self.queries.pop(self.rng.randrange(len(self.queries)))
        if not prefetch.is_settled:
            stored = self.memory.stored
            prefetch.restorable = prefetch.ask(lambda keys: [key in stored for key in keys])
        self.answered.append(prefetch)

    def take_answer(self) -> None:
        """The answer reaches the prefetcher, perhaps much later."""
        if self.answered:
            self.prefetcher.on_queried(self.answered.pop(self.rng.randrange(len(self.answered))))

    def read_on(self) -> None:
        """A reader begins a batch, or ends the one at hand."""
        if self.readers:
            reader = self.rng.choice(self.readers)
            if next(reader, None) is None:
                self.readers.remove(reader)

    def _reading(self, prefetch: Prefetch, script: Iterator[Load]) -> Iterator[Load]:
        for load in script:
            yield load
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
            yield load
        prefetch.is_read = True
        self.read.append(prefetch)

    def take_read(self) -> None:
        """The reader's last word reaches the prefetcher."""
        if self.read:
            self.prefetcher.on_read(self.read.pop(self.rng.randrange(len(self.read))))

    def lose_stored(self) -> None:
        """Storage evicts, or a page is damaged: what was promised is not there any more."""
        if self.memory.stored:
            self.memory.stored.pop(self.rng.choice(sorted(self.memory.stored)))

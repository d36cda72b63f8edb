"""Windows that a running request reads and frees page by page, as in vLLM.

`compat.rules.trims_leaves` turns this on. The request's lock covers the pages of the tree that it
still reads.
"""

import sys
from collections.abc import Sequence as Items

from hicache.cache.kinds import FULL
from hicache.cache.pages import Pools
from hicache.cache.tiers.transfer import BackUp, LoadBack, Work
from hicache.cache.tree.node import DEVICE, HOST, MatchResult, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence


class PageWindows:
    def __init__(self, tree: RadixTree, pools: Pools) -> None:
        self._tree, self._pools = tree, pools[DEVICE]
        self._page_size, self._rules = tree.page_size, tree.rules

    # -- the begin of a request ----------------------------------------------------------------

    def own_loads(self, sequence: Sequence, match: MatchResult) -> set[tuple[int, Node]]:
        """Return the windows and states that a load-back brings for this request alone.

        With `compat.rules.keeps_for_repeats`, the tree keeps only those before a page where a
        prompt is expected to resume: that of an equal prompt, and where the prompt leaves the
        device's data. Nodes are split at these pages.
        """
        own: set[tuple[int, Node]] = set()
        if not self._rules.keeps_for_repeats:
            return own
        kinds, node = self._tree.kinds, match.best_node
        ends = self._ends(sequence, match)
        if node.end not in ends:
            own.update((kind, node) for kind in kinds.points)
        for kind, window in kinds.windows:
            first = max(window.first(node.end), 0)
            for cut in (first, *ends, *map(window.first, ends)):
                if first <= cut < node.end:
                    self._tree.ancestor(node, sequence.tokens, cut)  # splits there
            for above in node.path(first):
                if not any(window.first(end) <= above.start < end for end in ends):
                    own.add((kind, above))
        return own

    def begin(self, sequence: Sequence, node: Node, match: MatchResult) -> None:
        """Note that the request reads the windows that end at `node`, where it will be locked.

        Their host copies count as used where a prompt is expected to resume.
        """
        sequence.reads_from = [0] * self._tree.kinds.size
        for kind, window in self._tree.kinds.windows:
            first = sequence.reads_from[kind] = max(window.first(node.end), 0)
            for end in self._ends(sequence, match):  # `offloading/scheduler.py`, line 1855
                used = kind, max(window.first(end), first), min(end, node.end)
                if used[1] < used[2]:
                    sequence.used.append(used)
                    self._tree.ancestor(node, sequence.tokens, used[1])  # splits there
                    self._tree.ancestor(node, sequence.tokens, used[2])
            self._tree.ancestor(node, sequence.tokens, first)

    def take(self, sequence: Sequence, load_back: LoadBack) -> None:
        """Give the request, after a load-back, the window pages that were loaded for it alone."""
        end = sequence.num_pages
        sequence.used += [(kind, end - 1, end) for kind in self._tree.kinds.points]
        starts, lens = load_back.starts, self._tree.kinds.window_lens
        sequence.used += [(kind, starts[kind], end) for kind in lens if kind in starts]
        for kind, first, page_ids in load_back.own:
            if kind in lens:
                sequence.pages[kind][first : first + len(page_ids)] = page_ids
                sequence.leaving.append((kind, first, page_ids))
        assert sequence.lock is not None
        self.use_on_host(sequence, sequence.lock.node)

    def note_published(self, sequence: Sequence, num_pages: int, *, keeps_window: bool) -> None:
        """Note the windows and states that are about to enter the tree, up to page `num_pages`."""
        kinds, used = self._tree.kinds, sequence.used
        used += [(kind, end - 1, end) for kind in kinds.points for end in sequence.states]
        for kind, _ in kinds.windows if keeps_window else ():
            first = sequence.own_start(kind, kinds)
            if used and used[-1][0] == kind and used[-1][2] == first:
                first = used.pop()[1]  # so that a long prompt, published in parts, has one span
            used.append((kind, first, num_pages))

    # -- while it runs -------------------------------------------------------------------------

    def free(self, sequence: Sequence, length: int) -> None:
        """Free the pages that tokens from `length` on do not read, page by page.

        Those that the tree holds may be evicted from now on, and count as just used.
        """
        self._free_leaving(sequence, length)
        self._leave_past(sequence, length)
        lock, kinds, moved = sequence.lock, self._tree.kinds, False
        assert lock is not None
        for kind, _ in kinds.windows:
            end = min(self._read_from(kind, length), sequence.num_pages)
            if end <= sequence.reads_from[kind]:
                continue
            self._use(sequence, kind, end)
            own = sequence.own_start(kind, kinds)
            if end > own:
                self._pools[kind].free(sequence.pages[kind][own:end])
            sequence.starts[kind] = max(sequence.starts[kind], end)
            sequence.reads_from[kind], moved = end, True
        if moved:
            self.lock(sequence, lock.node)

    def lock(self, sequence: Sequence, node: Node) -> None:
        """Lock the prefix that ends at `node` in place of the one that was locked before."""
        old = sequence.lock
        assert old is not None
        sequence.lock = self._tree.lock(node, sequence.reads_from, sequence.tree_windows)
        states = [old.node.held[DEVICE][kind] for kind in self._tree.kinds.points]
        if node is not old.node and any(states):
            sequence.past.append(self._tree.lock(old.node, windows_end=0))
        self._tree.release(old)

    def end(self, sequence: Sequence) -> None:
        """Free the pages that wait, and mark what the request holds of the tree as just used."""
        self._free_leaving(sequence)
        if sequence.lock is not None:
            self._tree.touch(sequence.lock.node)  # vLLM frees full pages first
            self._leave_past(sequence)
            for kind, _ in self._tree.kinds.windows if sequence.num_pages else ():
                self._use(sequence, kind, sequence.num_pages)

    def use_on_host(
        self,
        sequence: Sequence,
        node: Node,
        old: int = 0,
        new: Items[Work] = (),
        *,
        is_end: bool = False,
    ) -> None:
        """Mark host copies of what the request uses, of the prefix that ends at `node`, as used.

        All count as used when the request first saved or loaded something, and again at its end.
        Those before page `old` are marked already, but for the copies in `new`.
        """
        start = min([old, *(each.first_page for each in new if isinstance(each, BackUp))])
        if is_end or not sequence.host_tick:  # `kv_offload/cpu/policies/lru.py`, line 140
            sequence.host_tick = self._tree.residency.next_tick()
        if not is_end:
            sequence.host_end = node.end
        for kind, first, end in [(FULL, 0, sequence.host_end), *sequence.used]:
            for above in node.path(max(first, start)):
                if above.end <= end and above.held[HOST][kind] is not None:
                    above.host_ticks[kind] = max(above.host_ticks[kind], sequence.host_tick)

    # -- inside --------------------------------------------------------------------------------

    def _ends(self, sequence: Sequence, match: MatchResult) -> list[int]:
        # where a prompt is expected to resume: an equal one, and one that leaves it where this one
        # leaves what the device holds
        if not self._rules.keeps_for_repeats:
            return [match.best_node.end]
        assert sequence.request is not None
        is_branch = match.branch_end > match.device_prefix_len
        ends = [match.branch_end // self._page_size] if is_branch else []
        return [self._tree.repeat_end(sequence.request.prompt_len), *ends]

    def _read_from(self, kind: int, length: int) -> int:
        return (length - self._tree.kinds.window_lens[kind] + 1) // self._page_size

    def _free_leaving(self, sequence: Sequence, length: int | None = None) -> None:
        # all, or those that tokens from `length` on do not read
        rest = []
        for kind, first, page_ids in sequence.leaving:
            count = len(page_ids)
            if length is not None:
                count = max(min(self._read_from(kind, length) - first, count), 0)
            self._pools[kind].free(page_ids[:count])
            if page_ids[count:]:
                rest.append((kind, first + count, page_ids[count:]))
        sequence.leaving = rest

    def _leave_past(self, sequence: Sequence, length: int = sys.maxsize) -> None:
        # a state is copied in the step after the one that computed it, and freed in the step after
        # that (`single_type_kv_cache_manager.py`, line 1641)
        while sequence.past and sequence.past[0].node.end * self._page_size < length:
            lock = sequence.past.pop(0)
            self._tree.residency.leave_state(lock.node)
            self._tree.release(lock)

    def _use(self, sequence: Sequence, kind: int, end: int) -> None:
        # pages of the tree that the sequence has read until now, up to page `end`
        lock, start = sequence.lock, sequence.reads_from[kind]
        assert lock is not None
        end = min(end, sequence.own_start(kind, self._tree.kinds), lock.node.end)
        if end > start:
            self._tree.use_windows(lock.node, sequence.tokens, kind, start, end)

"""Explains the computed tokens of one engine by the history of its pages."""

from dataclasses import dataclass

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.reasons.missing_pages import MissingPages
from hicache.cache.reasons.table import Span
from hicache.cache.tree.node import MatchResult
from hicache.cache.tree.page_registry import Chain, num_leading
from hicache.cache.tree.radix_tree import RadixTree
from hicache.config import ExperimentConfig
from hicache.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A request that may be admitted now, and why what it has not found is not there."""

    chain: Chain
    match: MatchResult
    target_len: int
    is_again: bool  # it was admitted before
    spans: list[Span]  # from the end of what was found to the last page boundary


class Explainer:
    """Gives every token that is computed a reason. Decides nothing."""

    def __init__(self, tree: RadixTree, config: ExperimentConfig, *, names_evictions: bool) -> None:
        """`names_evictions`: whether an explanation says which evictions it was."""
        self._tree = tree
        self._history = tree.history
        self._config = config
        self._names_evictions = names_evictions
        self._page = tree.page_size

    def chain_of(self, request: Request) -> Chain:
        """The pages of a request."""
        return Chain(request.id, self._history.registry.numbers_of(request), request.prompt_len)

    def open(
        self,
        chain: Chain,
        match: MatchResult,
        target_len: int,
        *,
        came_len: int,
        prefetch: Prefetch | None,
        declined: str | None,
        is_again: bool,
    ) -> Explanation:
        """Look at things as they are before the request takes anything.

        Args:
            chain: the request's pages.
            match: what it has found.
            target_len: tokens that it must have.
            came_len: tokens that were usable when it came: from there on it had a prefetch.
            prefetch: that one.
            declined: why it had none.
            is_again: whether it was admitted before.
        """
        page = self._page
        first, reach = match.found_len // page, (target_len - 1) // page
        spans: list[Span] = []
        if first < reach:
            seen = num_leading(self._history.registry.is_seen[chain.numbers[:reach]])
            if first < seen:
                missing = MissingPages(
                    tree=self._tree,
                    config=self._config,
                    names_evictions=self._names_evictions,
                    numbers=chain.numbers[:seen],
                    full_end=match.full_len // page,
                    start=first if is_again else came_len // page,
                    prefetch=None if is_again else prefetch,
                    declined="retracted" if is_again else declined,
                )
                spans += missing.spans(first)
            seen = max(first, seen)
            if seen < reach:
                spans.append(Span(seen * page, reach * page, "first_seen"))
        return Explanation(
            chain=chain, match=match, target_len=target_len, is_again=is_again, spans=spans
        )

    def close(self, explanation: Explanation, cached_len: int) -> list[Span]:
        """The request is admitted: a reason for each token `[cached_len, target_len)`."""
        match, target_len, page = explanation.match, explanation.target_len, self._page
        spans = list(explanation.spans)
        if cached_len < match.found_len:
            spans.insert(0, Span(cached_len, match.found_len, self._unused(match)))
        last_page = max((target_len - 1) // page * page, cached_len)
        if last_page < target_len - 1:
            spans.append(Span(last_page, target_len - 1, "page_rounding"))
        spans.append(Span(target_len - 1, target_len, "last_token"))
        self._history.admit(explanation.chain, cached_len // page)
        if explanation.is_again:
            spans = [_own(span) for span in spans]
        return spans

    def forget(self, chain: Chain) -> None:
        """A request has been given up on; what it had not computed, nobody has seen."""
        self._history.forget(chain)

    def _unused(self, match: MatchResult) -> str:
        if match.usable_len < match.found_len:
            return "hit_given_up"
        if (
            match.host_hit_length < self._config.cache.load_back_threshold
            and not match.needs_sidecars
        ):
            return "load_back_too_short"
        return "load_back_failed"


def _own(span: Span) -> Span:
    # what a request that was sent back finds unpublished is its own
    if span.reason in ("first_seen", "being_computed", "thrown_away"):
        return span._replace(reason="retracted")
    return span

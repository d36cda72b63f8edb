"""What a step takes up, who is put off and who is sent back: small worlds without storage."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.tree.node import HOST
from hicache.config import Batching, SchedulerConfig
from hicache.request import Request
from hicache.scheduler.batch import Batch
from tests.scheduler.world import KINDS, STEP_NS, World, plot_of, request_of

KIND_NAMES = sorted(KINDS)


class Watched:
    """A world that has served these requests, and what its steps were."""

    def __init__(
        self, requests: Sequence[Request], kind: str = "full", pages: int = 40, **knobs: Any
    ) -> None:
        config = SchedulerConfig(**{"chunk_tokens": 64, "max_running": 8, **knobs})
        plot = plot_of(
            kind, device=(pages, 40, 24), scheduler=config, has_storage=False, may_jump=False
        )
        self.world = World(plot)
        self.steps: list[tuple[dict[int, tuple[int, int]], list[int]]] = []
        forward = self.world.executor.forward

        def watched(batch: Batch, now_ns: int) -> Any:
            extends = {each.req.request.id: (each.start, each.end) for each in batch.extends}
            self.steps.append((extends, [req.request.id for req in batch.decodes]))
            return forward(batch, now_ns)

        self.world.executor.forward = watched  # type: ignore[method-assign]
        self.world.serve(requests)

    @property
    def counters(self) -> Counter[str]:
        return self.world.counters

    def chunks(self, number: int) -> list[tuple[int, int]]:
        """What was computed of a prompt, step by step."""
        return [extends[number] for extends, _ in self.steps if number in extends]


def strangers(*prompt_lens: int, answer: int = 4, apart_ns: int = 0) -> list[Request]:
    """Requests that share nothing."""
    return [
        request_of(
            number,
            range(1000 * number, 1000 * number + length),
            [number] * answer,
            number * apart_ns,
        )
        for number, length in enumerate(prompt_lens)
    ]


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk_tokens", "chunks"),
    [
        (64, [(0, 64), (64, 128), (128, 150)]),
        (60, [(0, 56), (56, 112), (112, 150)]),  # a cut chunk ends at a page
        (150, [(0, 150)]),
        (149, [(0, 144), (144, 150)]),
        (3, [(8 * page, min(8 * page + 8, 150)) for page in range(19)]),  # a page at least
    ],
)
def test_a_prompt_is_computed_in_chunks_that_end_at_pages(
    chunk_tokens: int, chunks: list[tuple[int, int]]
) -> None:
    assert Watched(strangers(150), chunk_tokens=chunk_tokens).chunks(0) == chunks


def test_a_step_takes_up_prompts_until_its_tokens_are_spent() -> None:
    watched = Watched(strangers(24, 30, 40, 8), chunk_tokens=64)
    assert watched.steps[0][0] == {0: (0, 24), 1: (0, 30), 2: (0, 8)}
    # whoever was begun goes on first
    assert watched.steps[1][0] == {2: (8, 40), 3: (0, 8)}


def test_a_prompt_that_fills_a_step_to_the_token_leaves_nothing_for_the_next_one() -> None:
    watched = Watched(strangers(64, 8), chunk_tokens=64)
    assert [extends for extends, _ in watched.steps[:2]] == [{0: (0, 64)}, {1: (0, 8)}]


@pytest.mark.parametrize("batching", list(Batching), ids=lambda batching: batching.value)
def test_only_mixed_steps_decode_beside_prompts(batching: Batching) -> None:
    watched = Watched(strangers(20, 20, 20, apart_ns=3 * STEP_NS), batching=batching)
    both = [step for step in watched.steps if step[0] and step[1]]
    alone = (Batching.prefill_first, Batching.prompts_together)
    assert bool(both) == (batching not in alone)


def test_no_more_run_at_once_than_may_and_whoever_is_next_is_counted_once() -> None:
    watched = Watched(strangers(10, 10, 10, 10, answer=20), max_running=2)
    assert max(len(decodes) for _, decodes in watched.steps) == 2
    assert len(watched.world.finished) == 4
    assert watched.counters["scheduler/deferred_running_count"] == 1
    assert watched.counters["scheduler/deferred_count"] == 1


def test_a_request_that_waits_for_room_is_counted_by_what_it_lacks() -> None:
    watched = Watched(strangers(200, 200))
    assert watched.counters["scheduler/deferred_tokens_count"] == 1
    assert watched.counters["scheduler/deferred_count"] == 1


def test_a_refused_request_keeps_its_place_before_smaller_ones() -> None:
    watched = Watched(strangers(200, 200, 8, answer=2))
    assert [req.request.id for req, _ in watched.world.finished] == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt_len", "reason"),
    [(72, "needs 11 pages, and the device pool has 10"), (71, "needs more tokens than")],
)
def test_a_prompt_that_never_fits_is_told_what_it_lacks(prompt_len: int, reason: str) -> None:
    watched = Watched(strangers(prompt_len, answer=1), pages=10)
    ((_, told),) = watched.world.rejected
    assert told.startswith(reason)
    assert watched.steps == []


def test_a_prompt_longer_than_the_model_attends_to_is_rejected() -> None:
    watched = Watched(strangers(100_000, answer=1), pages=20_000)
    assert [told for _, told in watched.world.rejected] == [
        "prompt and answer have 100001 tokens, more than model.max_len=100000"
    ]


def test_a_prompt_as_long_as_the_model_attends_to_is_not() -> None:
    world = World(plot_of("full", device=(20_000, 0, 0), has_storage=False))
    assert world.scheduler.prefill._never_fits(strangers(99_999, answer=1)[0]) is None


# -- answers -----------------------------------------------------------------------------------


def test_the_first_token_comes_with_the_prompt_and_the_others_one_a_step() -> None:
    watched = Watched(strangers(20, answer=4))
    assert [decodes for _, decodes in watched.steps] == [[], [0], [0], [0]]
    ((req, end_ns),) = watched.world.finished
    assert (req.num_parts, req.decoded) == (0, 4)
    assert end_ns - req.first_token_ns == 3 * STEP_NS


def test_an_answer_of_one_token_needs_no_decoding() -> None:
    watched = Watched(strangers(20, answer=1))
    assert [decodes for _, decodes in watched.steps] == [[]]


@pytest.mark.parametrize(
    ("answer", "backs_up_answers", "copied"), [(20, 1, 4), (20, 0, 2), (1, 0, 2)]
)
def test_a_prompt_is_backed_up_however_short_its_answer(
    answer: int, backs_up_answers: int, copied: int
) -> None:
    world = World(plot_of("full", backs_up_answers=bool(backs_up_answers)))
    world.serve(strangers(20, answer=answer))
    assert world.cache.tree.residency.resident[HOST][FULL] == copied


EAGER = {"new_token_ratio": 0.0, "new_token_ratio_floor": 0.0, "chunk_tokens": 256}


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_every_retraction_is_counted_and_what_it_lost_is_computed_again(kind: str) -> None:
    watched = Watched(strangers(*[20] * 6, answer=60), kind, pages=24, **EAGER)
    reqs = [req for req, _ in watched.world.finished]
    assert len(reqs) == 6
    counters = watched.counters
    assert counters["scheduler/retracted_count"] == sum(req.retractions for req in reqs) > 0
    recomputed = sum(req.recomputed_len for req in reqs)
    assert counters["cache/recomputed_tokens"] == recomputed > 0
    assert counters["cache/computed_tokens"] == sum(req.computed_len for req in reqs) == 120
    assert all(req.decoded == 60 for req in reqs)


def test_of_two_that_have_decoded_as_much_the_longer_prompt_is_sent_back() -> None:
    watched = Watched(strangers(16, 40, answer=60), pages=17, **EAGER)
    retracted = {req.request.id: req.retractions for req, _ in watched.world.finished}
    assert retracted[0] == 0
    assert retracted[1] > 0


def test_whoever_has_decoded_least_is_sent_back() -> None:
    watched = Watched(strangers(40, 16, answer=60, apart_ns=10 * STEP_NS), pages=19, **EAGER)
    retracted = {req.request.id: req.retractions for req, _ in watched.world.finished}
    assert retracted[0] == 0
    assert retracted[1] > 0


def test_whoever_was_sent_back_goes_on_where_it_was() -> None:
    watched = Watched(strangers(16, 40, answer=60), pages=17, **EAGER)
    (req,) = (req for req, _ in watched.world.finished if req.request.id == 1)
    again = watched.chunks(1)[-1]
    assert again[1] > 40  # its answer so far is part of its prompt now
    assert (req.num_parts, req.decoded) == (0, 60)  # and no token of it came twice

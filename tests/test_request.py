"""Prompts and answers, and the clock."""

import numpy as np
import pytest

from hicache.clock import SECOND_NS, SimulatedClock, WallClock, to_ns
from hicache.request import EMPTY_SPANS, Request, TokenSpans


def spans(*runs: tuple[int, int]) -> TokenSpans:
    return TokenSpans(*(np.array(column, np.int32) for column in zip(*runs, strict=True)))


def request(prompt: TokenSpans, output: TokenSpans) -> Request:
    return Request(id=4, session_id=0, arrival_ns=0, prompt=prompt, output=output)


def test_runs_of_ids_are_little_endian_words_one_after_the_other() -> None:
    tokens = spans((7, 2), (256, 1), (0, 3))
    assert tokens.to_bytes() == np.array([7, 8, 256, 0, 1, 2], "<i4").tobytes()
    assert len(tokens) == 6


def test_no_runs_are_no_tokens() -> None:
    assert EMPTY_SPANS.to_bytes() == b""
    assert len(EMPTY_SPANS) == len(EMPTY_SPANS.counts) == 0


def test_a_request_knows_how_long_its_prompt_and_its_answer_are() -> None:
    asked = request(spans((7, 2), (9, 3)), spans((1, 1)))
    assert (asked.prompt_len, asked.output_len) == (5, 1)
    assert (asked.parent_id, asked.think_ns, asked.stop_reason, asked.namespace) == (
        None,
        0,
        "",
        "",
    )


def test_an_empty_prompt_or_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="request 4 has an empty prompt"):
        request(EMPTY_SPANS, spans((1, 1)))
    with pytest.raises(ValueError, match="request 4 has an empty answer"):
        request(spans((1, 1)), EMPTY_SPANS)


def test_seconds_are_rounded_to_the_nearest_nanosecond() -> None:
    assert [to_ns(seconds) for seconds in (1.5, 0.6e-9, 0.4e-9)] == [3 * SECOND_NS // 2, 1, 0]


def test_simulated_time_jumps_forward_and_never_back() -> None:
    clock = SimulatedClock()
    assert clock.now() == 0
    clock.wait_until(50)
    clock.wait_until(20)
    assert clock.now() == 50


def test_real_time_begins_at_nothing_goes_on_and_is_waited_for() -> None:
    clock = WallClock()
    first = clock.now()
    assert first >= 0
    clock.wait_until(first)  # has passed
    clock.wait_until(clock.now() + 1_000_000)
    assert clock.now() >= first + 1_000_000

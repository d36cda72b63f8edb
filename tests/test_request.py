"""Requests, spans of tokens, and clocks."""

import pickle

import numpy as np
import pytest

from hicache.clock import SECOND_NS, SimulatedClock, WallClock, to_ns
from hicache.request import EMPTY_SPANS, Request, TokenSpans


def spans(*runs):
    return TokenSpans(*(np.array(column, np.int32) for column in zip(*runs, strict=True)))


def request(prompt, output):
    return Request(id=4, session_id=0, arrival_ns=0, prompt=prompt, output=output)


def test_spans_of_tokens_are_little_endian_words():
    tokens = spans((7, 2), (256, 1), (0, 3))
    assert tokens.to_bytes() == np.array([7, 8, 256, 0, 1, 2], "<i4").tobytes()
    assert pickle.loads(pickle.dumps(tokens)).to_bytes() == tokens.to_bytes()
    assert len(tokens) == 6
    assert EMPTY_SPANS.to_bytes() == b""
    assert len(EMPTY_SPANS) == len(EMPTY_SPANS.counts) == 0


def test_a_request_has_the_lengths_of_its_prompt_and_answer_and_neither_is_empty():
    made = request(spans((7, 2), (9, 3)), spans((1, 1)))
    assert (made.prompt_len, made.output_len) == (5, 1)
    assert (made.parent_id, made.think_ns, made.stop_reason, made.namespace) == (None, 0, "", "")
    for empty, (prompt, output) in {
        "prompt": (EMPTY_SPANS, spans((1, 1))), "answer": (spans((1, 1)), EMPTY_SPANS)
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"request 4 has an empty {empty}"):
            request(prompt, output)


def test_seconds_are_rounded_to_the_nearest_nanosecond():
    assert [to_ns(seconds) for seconds in (1.5, 0.6e-9, 0.4e-9)] == [3 * SECOND_NS // 2, 1, 0]


def test_simulated_time_jumps_forward_and_never_back():
    clock = SimulatedClock()
    assert clock.now() == 0
    clock.wait_until(50)
    clock.wait_until(20)
    assert clock.now() == 50


def test_a_wall_clock_waits_until_the_given_time():
    clock = WallClock()
    first = clock.now()
    assert first >= 0
    clock.wait_until(first)
    clock.wait_until(clock.now() + 1_000_000)
    assert clock.now() >= first + 1_000_000

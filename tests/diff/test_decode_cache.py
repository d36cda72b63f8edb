"""Retraction on a decode engine, driven as the comparison with SGLang's queues drives it."""

from experiments.diff.decode_cache import Ours
from experiments.diff.protocol import Pools
from hicache.cache.kinds import FULL
from hicache.cache.tree.node import DEVICE
from tests.scheduler.world import fresh, request_of


def engine(device_tokens: int, page_size: int = 64, **more: int) -> Ours:
    sizes = {"device_tokens": device_tokens, "host_tokens": 0, "max_len": 8192}
    return Ours(Pools(page_size=page_size, has_storage=False, **sizes, **more))


def asked(*requests, device_tokens=1 << 16):
    """A decode engine that has admitted these requests."""
    ours = engine(device_tokens)
    for request in requests:
        assert ours.ask(request)[1]
    return ours


def test_a_request_resumes_if_its_kv_and_the_reserved_tokens_fit():
    # at its first admission, it would also have to leave room for the answer of the other one
    ours = asked(fresh(0, 640, 1000), fresh(1, 640, 4096), device_tokens=6080)
    ours.decode(0, 200)
    ours.decode(1, 300)
    assert ours.retract() == 0
    assert ours.ask(fresh(2, 640, 10))[0] == [0]


def test_requests_resume_in_the_order_in_which_they_were_retracted():
    ours = asked(*(fresh(number, 640, 1000) for number in range(3)))
    for number, steps in enumerate((100, 50, 200)):
        ours.decode(number, steps)
    assert [ours.retract(), ours.retract()] == [1, 0]
    assert ours.ask(fresh(3, 640, 10))[0] == [1, 0]


def test_a_request_that_resumes_leaves_its_answer_to_the_cache():
    prompt, answer = list(range(640)), list(range(1000, 1400))
    ours = asked(request_of(0, prompt, answer), fresh(1, 640, 1000))
    ours.decode(1, 300)
    ours.decode(0, 200)
    assert ours.retract() == 0
    assert ours.ask(fresh(2, 640, 10))[0] == [0]
    # 13 pages of 840 tokens
    assert ours.ask(request_of(3, prompt + answer, [1, 2])) == [[], True, 832, 0, 0, 832]


def test_a_retraction_makes_room_for_20_tokens_of_each_request_that_still_decodes():
    ours = engine(4096, page_size=4)
    for number in range(10):  # whose KV fills the device
        assert ours.ask(fresh(number, 400, 10))[1]
        ours.finish(number)
    for number in range(10, 14):
        assert ours.ask(fresh(number, 400, 10))[1]
    assert ours.retract() == 13
    assert ours._engine.cache.pools[DEVICE][FULL].num_free >= 15  # pages of 60 tokens


def test_of_equal_requests_the_last_one_is_retracted():
    ours = asked(*(fresh(number, 640, 1000) for number in range(3)))
    assert [ours.retract(), ours.retract()] == [2, 1]


def test_copies_of_retracted_requests_have_no_limit_beside_a_cache():
    # SGLang's host pool, a fifth of the device's 1,024 pages here, is used without a cache
    ours = asked(*(fresh(number, 4096, 1000) for number in range(5)))
    assert [ours.retract() for _ in range(4)] == [4, 3, 2, 1]
    assert list(ours._decode.saved) == [4, 3, 2, 1]  # 256 pages


def test_prompts_with_states_share_no_pages_while_they_decode():
    # only the state at their end arrives, so the cache keeps nothing of them before they end
    for num_states, num_shared in ((0, 10), (32, 0)):
        ours = engine(1 << 16, num_states=num_states)
        before = ours._engine.cache.pools[DEVICE][FULL].num_free
        for number in range(2):
            assert ours.ask(request_of(number, list(range(640)), [7000 + number] * 9))[1]
        held = before - ours._engine.cache.pools[DEVICE][FULL].num_free
        assert held == 20 - num_shared


def test_a_prompt_with_windows_promises_nothing_of_its_last_window():
    # as in SGLang, which sends the last 1,024 tokens before the last one whole, from a page's begin
    for length, promised in ((3400, 2240), (3200, 0)):  # up to 2,368 and 2,112 tokens could hit
        ours = engine(1 << 16, window_len=1024, swa_tokens=1 << 16)
        assert ours.ask(request_of(0, list(range(2300)), [7000] * 9)) == [[], True, 0, 0, 0, 0]
        later = request_of(1, list(range(length)), [7000] * 9)
        assert ours.ask(later) == [[], True, promised, 0, 0, promised]

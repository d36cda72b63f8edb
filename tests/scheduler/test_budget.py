"""What a request may cost the window pool, to the token (reports 004; sglang PRs 27391, 32379)."""

import pytest

from hicache.policies.window_charge import swa_budget_for_req
from hicache.scheduler.admission import ceil_page


@pytest.mark.parametrize(
    ("extend", "chunk", "window", "page", "wanted"),
    [
        (64, None, 128, 16, 144),
        (200, None, 256, 32, 288),
        (300, None, 128, 16, 316),
        (200, 50, 64, 8, 72),
        (300, 500, 64, 64, 364),
        (0, None, 128, 16, 144),
    ],
)
@pytest.mark.parametrize("form", ["reports", "no_host_term", "double"])
def test_without_a_host_hit_the_budget_is_the_larger_of_chunk_and_window_and_a_page(
    form: str, extend: int, chunk: int | None, window: int, page: int, wanted: int
) -> None:
    budget = swa_budget_for_req(form, extend=extend, chunk=chunk, window=window, page=page)
    assert budget == wanted


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("no_host_term", 144),
        ("reports", 144 + 112),
        ("double", 144 + 2 * 112),
    ],
)
def test_pages_to_load_back_are_charged_once_rounded_up(form: str, wanted: int) -> None:
    budget = swa_budget_for_req(
        form, extend=64, chunk=None, window=128, page=16, swa_host_hit_length=100
    )
    assert budget == wanted


@pytest.mark.parametrize(
    ("extend", "max_new", "chunk", "window", "page", "wanted"),
    [
        (64, 512, None, 128, 16, 144),
        (64, 32, None, 128, 16, 112),
        (10, 20, None, 512, 8, 38),
        (300, 512, None, 128, 16, 316),
        (200, 512, 50, 64, 8, 72),
        (2000, 256, 1024, 512, 16, 1040),
        (0, 512, None, 128, 16, 144),
        (0, 40, None, 128, 16, 56),
    ],
)
def test_the_later_form_charges_no_more_window_than_prompt_and_answer_fill(
    extend: int, max_new: int, chunk: int | None, window: int, page: int, wanted: int
) -> None:
    budget = swa_budget_for_req(
        "sglang_0_5_23",
        extend=extend,
        chunk=chunk,
        window=window,
        page=page,
        max_new=max_new,
    )
    assert budget == wanted


def test_the_later_form_charges_a_host_hit_rounded_up() -> None:
    budget = swa_budget_for_req(
        "sglang_0_5_23",
        extend=64,
        chunk=None,
        window=128,
        page=16,
        swa_host_hit_length=1,
        max_new=512,
    )
    assert budget == 144 + 16


@pytest.mark.parametrize(("tokens", "wanted"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_tokens_are_rounded_up_to_pages(tokens: int, wanted: int) -> None:
    assert ceil_page(tokens, 64) == wanted


def test_unless_told_otherwise_nothing_is_loaded_back_and_no_answer_expected() -> None:
    assert swa_budget_for_req("sglang_0_5_23", extend=20, chunk=None, window=128, page=16) == 36

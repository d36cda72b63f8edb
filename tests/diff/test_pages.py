import numpy as np

from experiments.diff.pages import page_names

TOKENS = np.arange(20, dtype=np.int32)


def test_a_page_is_named_by_all_tokens_up_to_its_end() -> None:
    names = page_names(TOKENS, 4)
    assert len(set(names)) == 5
    assert page_names(TOKENS[:11], 4) == names[:2]  # whole pages alone
    assert page_names(TOKENS[:3], 4) == []
    other = TOKENS.copy()
    other[0] = 99
    assert not set(page_names(other, 4)) & set(names)
    assert all(0 < name < 1 << 64 for name in names)


def test_names_continue_after_a_page() -> None:
    names = page_names(TOKENS, 4)
    assert page_names(TOKENS[8:], 4, names[1]) == names[2:]
    assert page_names(TOKENS[8:], 4) != names[2:]

"""Random walks over every mix of kinds, page sizes, write policies and pool sizes.

Each walk checks the laws, the oracle's matches and the content of every page after each operation,
and that nothing is left when all has ended (`tests/cache/walk.py`).
"""

import pytest

from tests.cache.walk import Walk, random_setting

NUM_WALKS = 150
NUM_SOAK_WALKS = 5000


@pytest.mark.parametrize("block", range(10))
def test_random_walks_keep_every_law_and_agree_with_the_oracle(block: int) -> None:
    for seed in range(block, NUM_WALKS, 10):
        Walk(random_setting(seed)).run(100)


@pytest.mark.parametrize("seed", [904, 1241])
def test_a_last_page_is_loaded_after_the_back_up_that_reads_its_target(seed: int) -> None:
    Walk(random_setting(seed)).run(250)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(10))
def test_thousands_of_long_walks_keep_every_law(block: int) -> None:
    for seed in range(NUM_WALKS + block, NUM_WALKS + NUM_SOAK_WALKS, 10):
        Walk(random_setting(seed)).run(250)

"""What scenarios have found and no other test holds, as small as it was made."""

import pytest

from tests.fuzz.scenario import PLAIN
from tests.fuzz.trial import try_choices

# a reader told of its last page alone, so that who looks at every batch saw them between jumps only
BATCHES = {
    "a policy that goes on with a part": (
        {"prefetch.stop": "tests.fuzz.policies:FirstQuarter", "storage.batch_pages": "1"},
        24,
    ),
    "complete pages that await no window": (
        {"kinds": "full_swa", "prefetch.await_sidecars": "False"},
        24,
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_batch_that_is_read_is_told(name: str) -> None:
    choices, limit = BATCHES[name]
    slow = {"workload.start": "warm_storage", "storage.speed": "slow"}
    try_choices(PLAIN | slow | choices, limit)

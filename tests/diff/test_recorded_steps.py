"""Our engine's steps compared with recorded steps of SGLang's and vLLM's own schedulers."""

import pytest

from experiments.diff.in_flight import differences
from experiments.diff.simulator import SimulatorSide
from tests.diff.recorded_steps import CASES, arrival, case, read


@pytest.mark.parametrize("name", CASES)
def test_our_steps_equal_the_recorded_steps_of_the_engine(name: str) -> None:
    pools, requests, options = case(name)
    side = SimulatorSide(pools, options)
    num_come = 0
    for count, theirs in read(name):
        new = range(num_come, num_come + count)
        ours = side.step([arrival(each, requests[each]) for each in new])
        num_come += count
        assert differences(theirs, ours) == [], (theirs, ours)
    side.close()

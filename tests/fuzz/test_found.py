"""Scenarios that have failed once: `found.yaml` holds them, with what was wrong."""

from pathlib import Path

import pytest
import yaml

from hicache.observe.invariants import BrokenLawError
from tests.fuzz.scenario import choices_of
from tests.fuzz.trial import try_choices
from tests.scheduler.world import World, fresh, plot_of

FOUND = yaml.safe_load(Path(__file__).with_name("found.yaml").read_text())


@pytest.mark.parametrize("name", FOUND)
def test_scenario_that_failed_once_passes(name: str) -> None:
    _, limit, *words = FOUND[name].split()
    try_choices(choices_of(words), int(limit))


def test_wait_for_storage_that_goes_on_after_the_start_of_its_request_breaks_a_law() -> None:
    world = World(plot_of("full"))
    world.scheduler.prefill._end_wait = lambda req, now_ns: None
    request = fresh(0, 100, 1)
    world.warm([request])
    with pytest.raises(
        BrokenLawError, match=r"law 9: request .* still counted as waiting for storage"
    ):
        world.serve([request])

"""What a machine's profile says of our copy kernel is what the kernel is."""

from pathlib import Path

import pytest

from hicache.kernels import copy
from hicache.kernels.table import TILE_WORDS, WORD_BYTES
from hicache.models import CopyKernelConfig, Figure
from hicache.runs.schema import config_of

PROFILES = Path(__file__).parents[2] / "conf" / "hardware"


@pytest.mark.parametrize("name", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_a_profile_holds_for_the_tile_and_the_warps_that_are_compiled(name):
    launched = config_of(f"hardware={name}").hardware.copy_kernel
    assert launched.tile_bytes == TILE_WORDS * WORD_BYTES
    assert launched.warps == copy.NUM_WARPS


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"link_programs": 0}, "link_programs must be at least 1, got 0"),
        ({"to_host": Figure(value=0.0)}, r"to_host must be positive .* got 0\.0"),
    ],
)
def test_a_profile_that_cannot_be_launched_is_refused(changes, sentence):
    known = {"link_programs": 4, "to_device": Figure(value=1e9), "to_host": Figure(value=1e9)}
    with pytest.raises(ValueError, match=sentence):
        CopyKernelConfig(**known | changes)

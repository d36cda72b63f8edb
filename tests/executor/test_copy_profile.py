"""The profile of every machine describes the copy kernel that is compiled."""

from pathlib import Path

import pytest

from hicache.kernels import copy
from hicache.kernels.table import TILE_WORDS, WORD_BYTES
from hicache.models import CopyKernelConfig, Figure, HardwareConfig
from tests.models.test_shapes import load

PROFILES = sorted(Path(__file__).parents[2].glob("conf/hardware/*.yaml"))


def test_hardware_profiles_have_the_tile_bytes_and_warps_of_the_compiled_kernel():
    for path in PROFILES:
        launched = load(HardwareConfig, "hardware", path.stem).copy_kernel
        assert launched.tile_bytes == TILE_WORDS * WORD_BYTES
        assert launched.warps == copy.NUM_WARPS
    assert PROFILES


def test_a_copy_kernel_profile_without_programs_or_a_rate_is_refused():
    rate, none = Figure(value=1e9), Figure(value=0.0)
    with pytest.raises(ValueError, match="link_programs must be at least 1, got 0"):
        CopyKernelConfig(link_programs=0, to_device=rate, to_host=rate)
    with pytest.raises(ValueError, match=r"to_host must be positive .* got 0\.0"):
        CopyKernelConfig(link_programs=4, to_device=rate, to_host=none)

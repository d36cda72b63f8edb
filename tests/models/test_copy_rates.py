"""The rate of a copy between host and device, by its path and the size of its pieces."""

import pytest

from hicache.models import CopyKernelConfig, Figure, HardwareConfig, RateTable
from hicache.models.copy_rates import CopyPath, pcie_rate

KERNEL, ENGINE = CopyPath.kernel, CopyPath.copy_engine


@pytest.mark.parametrize(
    ("link_programs", "piece_bytes", "path", "to_device", "rate"),
    [
        # few programs move what each of them moves
        (1, 10**6, KERNEL, True, 12e9),
        (2, 10**6, KERNEL, True, 24e9),
        (2, 10**6, KERNEL, False, 40e9),
        (4, 10**6, KERNEL, True, 35e9),
        (None, 10**6, KERNEL, True, 35e9),
        (None, 10**6, KERNEL, False, 48e9),
        # linear from the origin and between sizes of the table, and at most the rate of the link
        (None, 2048, ENGINE, True, 2e9),
        (None, 4096, ENGINE, True, 4e9),
        (None, 34816, ENGINE, True, 28e9),
        (None, 50176, ENGINE, True, 40e9),
        (None, 10**6, ENGINE, False, 50e9),
        (1, 10**6, ENGINE, True, 50e9),
    ],
)
def test_the_pcie_rate_depends_on_path_piece_size_programs_and_direction(
    link_programs, piece_bytes, path, to_device, rate
):
    machine = HardwareConfig(
        copy_kernel=CopyKernelConfig(
            link_programs=link_programs, to_device=Figure(value=12e9), to_host=Figure(value=20e9)
        ),
        pcie_bandwidth=Figure(value=50e9),
        copy_engine=RateTable(size=[4096, 65536], rate=[4e9, 52e9]),
        kernel_to_device=RateTable(size=[128, 4096], rate=[10e9, 35e9]),
        kernel_to_host=RateTable(size=[128, 4096], rate=[20e9, 48e9]),
    )
    assert pcie_rate(machine, piece_bytes, path, to_device=to_device) == rate

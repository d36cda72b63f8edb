"""The rate of a copy between host and device, by its path and the size of its pieces."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.models import CopyKernelConfig, Figure, HardwareConfig, RateTable
from hicache.models.copy_rates import CopyPath, pcie_rate


def machine(link_programs: int | None = None) -> HardwareConfig:
    return HardwareConfig(
        copy_kernel=CopyKernelConfig(
            link_programs=link_programs, to_device=Figure(value=12e9), to_host=Figure(value=20e9)
        ),
        pcie_bandwidth=Figure(value=50e9),
        copy_engine=RateTable(size=[4096, 65536], rate=[4e9, 52e9]),
        kernel_to_device=RateTable(size=[128, 4096], rate=[10e9, 35e9]),
        kernel_to_host=RateTable(size=[128, 4096], rate=[20e9, 48e9]),
    )


@pytest.mark.parametrize(
    ("link_programs", "to_device", "rate"),
    [(None, True, 35e9), (1, True, 12e9), (2, True, 24e9), (4, True, 35e9), (2, False, 40e9)],
)
def test_few_programs_move_what_each_of_them_moves(
    *, link_programs: int | None, to_device: bool, rate: float
) -> None:
    few = machine(link_programs)
    assert pcie_rate(few, 10**6, CopyPath.kernel, to_device=to_device) == rate
    assert pcie_rate(few, 10**6, CopyPath.copy_engine, to_device=to_device) == 50e9


@pytest.mark.parametrize(
    ("piece_bytes", "path", "to_device", "rate"),
    [
        (2048, CopyPath.copy_engine, True, 2e9),
        (34816, CopyPath.copy_engine, True, 28e9),
        (10**6, CopyPath.copy_engine, False, 50e9),
        (10**6, CopyPath.kernel, True, 35e9),
        (10**6, CopyPath.kernel, False, 48e9),
    ],
)
def test_the_pcie_rate_depends_on_piece_path_and_direction(
    *, piece_bytes: int, path: CopyPath, to_device: bool, rate: float
) -> None:
    assert pcie_rate(machine(), piece_bytes, path, to_device=to_device) == rate


@pytest.mark.parametrize(("piece", "rate"), [(1, 5), (2, 10), (3, 15), (6, 40), (8, 60), (99, 60)])
def test_a_table_of_rates_is_linear_between_its_points(piece: int, rate: float) -> None:
    machine: Any = SimpleNamespace(
        copy_engine=RateTable(size=[2, 4, 8], rate=[10, 20, 60]),
        copy_kernel=None,
        pcie_bandwidth=Figure(value=1e9),
    )
    assert pcie_rate(machine, piece, CopyPath.copy_engine) == rate

"""How fast the devices of an engine copy pages to and from the host, from a machine's figures."""

from collections.abc import Mapping
from enum import Enum
from math import inf

from hicache.models.cost import Rates
from hicache.models.formats import CODE_BITS, PLAIN
from hicache.models.machines import HardwareConfig
from hicache.models.shapes import LayerKind, ModelConfig

STAGED_PARTS = 4  # groups of layers of a staged load-back


class CopyPath(Enum):
    copy_engine = "copy_engine"
    kernel = "kernel"
    staged = "staged"  # a kernel on the device, and the copy engine between host and a buffer there


def copy_rates(
    model: ModelConfig,
    hardware: HardwareConfig,
    path: CopyPath,
    *,
    tp: int,
    page_size: int,
    form: str = PLAIN,
    coded_share: float = 1.0,
) -> dict[str, float]:
    """Return the bytes per second of the links of an engine whose `tp` devices copy in parallel.

    The links are `to_device`, `to_host` and `host_memory`, and `both_ways` if the machine limits
    the sum of both directions. `form` is the number format of pages on the host, and `coded_share`
    the part of its bytes that a page keeps there.
    """
    # a device's part of one layer's page is contiguous. A staged copy crosses the link in pieces of
    # several layers: a quarter of them to the device, all layers to the host
    layer_page = model.full_layer_token_bytes * page_size
    piece = layer_page * model.kv_copies(LayerKind.full, tp) // tp
    piece = max(round(piece * coded_share), 1)
    pieces = [piece, piece]
    if path is CopyPath.staged:
        num_layers = max(model.num_full_layers, 1)
        pieces = [piece * -(-num_layers // STAGED_PARTS), piece * num_layers]
    num_hosts = -(-tp // hardware.devices_per_host)
    rates = {
        "to_device": tp * pcie_rate(hardware, pieces[0], path, to_device=True, form=form),
        "to_host": tp * pcie_rate(hardware, pieces[1], path, to_device=False, form=form),
        "host_memory": num_hosts * hardware.host_bandwidth.value,
    }
    if hardware.both_ways_bandwidth.value:
        rates["both_ways"] = tp * hardware.both_ways_bandwidth.value
    return rates


def shared_load_rate(rates: Mapping[str, float]) -> float:
    """Return the bytes per second to the device during a copy to the host.

    It is a fair share of the rate of both directions; `rates` are those of `copy_rates`.
    """
    both = rates.get("both_ways", inf)
    return min(rates["to_device"], max(both / 2, both - rates["to_host"]))


def pcie_rate(
    hardware: HardwareConfig,
    piece_bytes: int,
    path: CopyPath,
    *,
    to_device: bool = True,
    form: str = PLAIN,
) -> float:
    """Return the bytes per second at which one device copies contiguous pieces from or to the host.

    `piece_bytes` is the size of a piece. With the path `copy_engine`, each piece has a fixed cost,
    so small pieces are slow. With `kernel`, small pieces are fast too, but the number of GPU
    programs limits the rate. With `staged`, the copy engine moves the data to or from a device
    buffer, and a kernel copies it once more. `form` is the number format of pages on the host. A
    program converts as many elements of 4 bits a second as of 8, whose rate is measured.
    """
    limit = hardware.pcie_bandwidth.value
    if path is CopyPath.staged:
        across = pcie_rate(hardware, piece_bytes, CopyPath.copy_engine, to_device=to_device)
        return 1 / (1 / across + 2 / hardware.state_bandwidth.value)
    if path is CopyPath.copy_engine:
        table, name = hardware.copy_engine, "copy_engine"
    elif to_device:
        table, name = hardware.kernel_to_device, "kernel_to_device"
    else:
        table, name = hardware.kernel_to_host, "kernel_to_host"
    launched = hardware.copy_kernel
    if path is CopyPath.kernel and launched.link_programs is not None:
        program = launched.to_device if to_device else launched.to_host
        value = program.value
        if form != PLAIN:
            program = launched.coded_to_device if to_device else launched.coded_to_host
            if program.value <= 0:
                raise ValueError(
                    f"hardware.copy_kernel.coded_to_device and coded_to_host of {hardware.name} "
                    f"must be known to copy coded pages, got {program.value}"
                )
            value = program.value * min(CODE_BITS[form] / 8, 1.0)
        limit = min(limit, launched.link_programs * value)
    curve = Rates(table, name)
    # the rate of a piece below the smallest size grows with the piece
    rate = min(piece_bytes / table.size[0], 1.0) * curve.at(piece_bytes)
    return min(rate, limit) * hardware.link_factor.value

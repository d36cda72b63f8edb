"""What the machines can do that run models.

The numbers live in `conf/hardware/*.yaml`, each with its source.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RateTable:
    """A rate that depends on a size: linear between points, constant outside them.

    `status` is measured or modelled, and `source` says by whom or from what.
    """

    size: tuple[float, ...] = ()
    rate: tuple[float, ...] = ()  # a second
    source: str = "???"
    status: str = "modelled"

    def __post_init__(self) -> None:
        for name in ("size", "rate"):  # YAML knows no tuples
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.size) != len(self.rate):
            raise ValueError(
                f"a rate table needs one rate for each size, "
                f"got {len(self.rate)} rates for {len(self.size)} sizes"
            )
        if any(low >= high for low, high in zip(self.size, self.size[1:], strict=False)):
            raise ValueError(f"the sizes of a rate table must rise, got {list(self.size)}")
        if any(rate <= 0 for rate in self.rate):
            raise ValueError(f"the rates of a rate table must be positive, got {list(self.rate)}")
        _check_status("a rate table", self.status)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number about a machine, with where it is from."""

    value: float = 0.0
    source: str = "???"
    status: str = "modelled"

    def __post_init__(self) -> None:
        _check_status("a figure", self.status)


def _check_status(what: str, status: str) -> None:
    if status not in ("measured", "modelled"):
        raise ValueError(f"status of {what} must be measured or modelled, got {status!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyKernelConfig:
    """How our copy kernel is launched across the link of a machine, and what a program of it moves.

    The real executor launches so many programs, and the simulation lets so many move what one of
    them moves, each with `tile_bytes` on their way in `warps` warps.
    """

    link_programs: int | None = None  # none: as many as the kernel takes by itself, without a cap
    tile_bytes: int = 65536  # what the kernel is compiled for, and the figures hold for
    warps: int = 16  # of one program
    to_device: Figure = Figure(source="not known")  # bytes a second of one program
    to_host: Figure = Figure(source="not known")  # likewise, the other way

    def __post_init__(self) -> None:
        if self.link_programs is None:
            return
        if self.link_programs < 1:
            raise ValueError(
                f"hardware.copy_kernel.link_programs must be at least 1, got {self.link_programs}"
            )
        for name, figure in (("to_device", self.to_device), ("to_host", self.to_host)):
            if figure.value <= 0:
                raise ValueError(
                    f"hardware.copy_kernel.{name} must be positive where link_programs is given, "
                    f"got {figure.value}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareConfig:
    """What one machine can do. Rates are of one device: flops, bytes, tokens a second."""

    name: str = "???"  # of the machine, in tables
    table: str | None = None  # a CSV of curves and figures that were measured, in place of ours
    num_devices: int = 8  # in one domain of fast links
    devices_per_host: int = 8  # that share its memory
    device_memory_bytes: Figure = field(default_factory=Figure)  # of one device
    activation_bytes: Figure = field(default_factory=Figure)  # of a device, kept from the cache
    step_s: Figure = field(default_factory=Figure)  # what a step costs with nothing to compute
    extend_s: Figure = field(default_factory=Figure)  # what each sequence that it extends adds
    tile_tokens: int = 1  # each sequence's tokens are multiplied in whole tiles of so many

    gemm_bf16: RateTable = field(default_factory=RateTable)  # by tokens
    gemm_fp8: RateTable = field(default_factory=RateTable)  # likewise
    weight_bandwidth: Figure = field(default_factory=Figure)  # of weights read once a step
    moe_narrow: RateTable = field(default_factory=RateTable)  # by tokens an expert gets
    moe_wide: RateTable = field(
        default_factory=RateTable
    )  # likewise, experts wider than 640 on a device
    # likewise, experts of two matrices
    moe_two_matrix: RateTable = field(default_factory=RateTable)

    attention_d64: RateTable = field(default_factory=RateTable)  # by prompt length
    attention_d128: RateTable = field(default_factory=RateTable)  # likewise, heads wider than 64
    attention_window: RateTable = field(default_factory=RateTable)  # by window length
    decode_bandwidth: RateTable = field(default_factory=RateTable)  # by bytes of KV read in a layer

    delta_rate: Figure = field(default_factory=Figure)  # state elements × tokens
    mamba_rate: Figure = field(default_factory=Figure)  # likewise
    conv_rate: Figure = field(default_factory=Figure)  # channels × tokens
    state_bandwidth: Figure = field(default_factory=Figure)  # of states read and written

    all_reduce_s: Figure = field(default_factory=Figure)  # before the first byte
    link_bandwidth: Figure = field(default_factory=Figure)  # between devices, one way

    pcie_bandwidth: Figure = field(default_factory=Figure)  # one way
    # of copies to and from a device together; 0: neither direction slows the other
    both_ways_bandwidth: Figure = Figure(source="not known: neither direction slows the other")
    copy_engine: RateTable = field(default_factory=RateTable)  # by contiguous bytes
    kernel_to_device: RateTable = field(default_factory=RateTable)  # likewise, of a copy kernel
    kernel_to_host: RateTable = field(default_factory=RateTable)  # likewise
    copy_kernel: CopyKernelConfig = field(default_factory=CopyKernelConfig)
    host_bandwidth: Figure = field(default_factory=Figure)  # of one host
    copy_slowdown: Figure = field(default_factory=Figure)  # compute takes this times as long

"""The capabilities of machines.

`conf/hardware/*.yaml` has the numbers, each with its source.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RateTable:
    """A rate per second as a function of a size.

    `rate[i]` is the rate at `size[i]`. Between these sizes the rate is linear, and outside it is
    constant. `status` is "measured" or "modelled". `source` says where the numbers are from.
    """

    size: tuple[float, ...] = ()
    rate: tuple[float, ...] = ()  # per second
    source: str = "???"
    status: str = "modelled"

    def __post_init__(self) -> None:
        for name in ("size", "rate"):  # YAML has no tuples
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.size) != len(self.rate):
            raise ValueError(
                f"a rate table needs one rate for each size, "
                f"got {len(self.rate)} rates for {len(self.size)} sizes"
            )
        if any(low >= high for low, high in zip(self.size, self.size[1:], strict=False)):
            raise ValueError(f"the sizes of a rate table must increase, got {list(self.size)}")
        if any(rate <= 0 for rate in self.rate):
            raise ValueError(f"the rates of a rate table must be positive, got {list(self.rate)}")
        _check_status("a rate table", self.status)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
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
    """The settings and speeds of the GPU kernel that copies pages between host and device.

    A real run launches `link_programs` programs (thread blocks) per copy. The simulation multiplies
    `link_programs` by the rate of one program.
    """

    # Number of programs (thread blocks) that one copy between host and device launches. None means
    # the kernel's own choice, and no limit on its rate.
    link_programs: int | None = None
    # Bytes that each program of the copy kernel has in flight; the measured rates hold for this
    # size.
    tile_bytes: int = 65536
    warps: int = 16  # Number of warps per program (thread block) of the copy kernel.
    # Bytes/s that one program (thread block) of the copy kernel moves from host to device.
    to_device: Figure = Figure(source="not known")
    # Bytes/s that one program (thread block) of the copy kernel moves from device to host.
    to_host: Figure = Figure(source="not known")
    # Coded bytes/s that one program moves from host to device while it decodes them.
    coded_to_device: Figure = Figure(source="not known")
    # Coded bytes/s that one program moves from device to host while it codes them.
    coded_to_host: Figure = Figure(source="not known")

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
                    f"hardware.copy_kernel.{name} must be positive if link_programs is set, "
                    f"got {figure.value}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareConfig:
    """The memory sizes and speeds of one machine; all rates are those of one device."""

    name: str = "???"  # Name of the machine, shown in tables.
    # CSV file of your own measurements; its rows replace the machine's values of the same names,
    # for example pcie_bandwidth. None means the values of the chosen machine.
    table: str | None = None
    # Number of devices that one fast interconnect joins, which is the largest possible
    # tensor-parallel size.
    num_devices: int = 8
    devices_per_host: int = 8  # Number of devices that share the memory of one host.
    device_memory_bytes: Figure = field(default_factory=Figure)  # Memory of one device in bytes.
    # Memory of one device, in bytes, that is reserved for activations and the framework.
    activation_bytes: Figure = field(default_factory=Figure)
    # Fixed time of every step in seconds, whatever it computes.
    step_s: Figure = field(default_factory=Figure)
    # Time in seconds that each prompt adds to a step, besides that of its tokens.
    extend_s: Figure = field(default_factory=Figure)
    # Time in seconds of a kernel that has next to nothing to do; each layer takes some ten of them.
    kernel_s: Figure = field(default_factory=Figure)
    # Time in seconds of such a kernel in a captured graph, as decoding replays it. 0 means that
    # decoding launches kernels one by one.
    graph_kernel_s: Figure = field(default_factory=Figure)
    # Time in seconds that the processor spends on each running request in a step. With
    # `compat.rules.asynchronous` it passes beside the device's time, which hides the shorter one.
    request_s: Figure = field(default_factory=Figure)
    # Factor on the time of steps with prompts, besides their constant part and loads; `hicache
    # calibrate` fits it. 1 means what the curves say.
    prefill_factor: Figure = Figure(value=1.0, source="not fitted: the curves as they are")
    # Factor on the rates of copies between host and device; `hicache calibrate` fits it. 1 means
    # what the curves say.
    link_factor: Figure = Figure(value=1.0, source="not fitted: the curves as they are")
    # Tokens per tile of a matrix multiplication; the prompt tokens of each sequence are rounded up
    # to whole tiles. 1 means no rounding.
    tile_tokens: int = 1

    # Rate of bf16 matrix multiplication in flop/s, as a curve over the tokens in a step.
    gemm_bf16: RateTable = field(default_factory=RateTable)
    # Rate of fp8 matrix multiplication in flop/s, as a curve over the tokens in a step.
    gemm_fp8: RateTable = field(default_factory=RateTable)
    # Bandwidth in bytes/s at which a step reads the weights.
    weight_bandwidth: Figure = field(default_factory=Figure)
    # Matrix-multiplication rate in flop/s of gated bf16 experts with an intermediate size of up to
    # 640, as a curve over the tokens per expert.
    moe_narrow: RateTable = field(default_factory=RateTable)
    # Matrix-multiplication rate in flop/s of gated bf16 experts with an intermediate size above
    # 640, as a curve over the tokens per expert.
    moe_wide: RateTable = field(default_factory=RateTable)
    # Matrix-multiplication rate in flop/s of experts without a gate (two matrices), as a curve over
    # the tokens per expert.
    moe_two_matrix: RateTable = field(default_factory=RateTable)
    # As `hardware.moe_narrow`, of fp8 experts.
    moe_fp8_narrow: RateTable = field(default_factory=RateTable)
    # As `hardware.moe_wide`, of fp8 experts.
    moe_fp8_wide: RateTable = field(default_factory=RateTable)
    # As `hardware.moe_wide`, of experts with fewer than 8 bits per weight, such as mxfp4.
    moe_mxfp4: RateTable = field(default_factory=RateTable)
    # Matrix-multiplication rate in flop/s of experts with many tokens each, as a curve over the
    # width that tensor parallelism leaves of an expert on one device.
    moe_slice: RateTable = field(default_factory=RateTable)

    # Rate of prefill attention with heads of at most 64 elements in flop/s, as a curve over the
    # prompt length in tokens.
    attention_d64: RateTable = field(default_factory=RateTable)
    # Rate of prefill attention with heads of more than 64 elements in flop/s, as a curve over the
    # prompt length in tokens.
    attention_d128: RateTable = field(default_factory=RateTable)
    # Maximum rate of prefill attention in sliding-window layers in flop/s, as a curve over the
    # window length in tokens.
    attention_window: RateTable = field(default_factory=RateTable)
    # Bandwidth in bytes/s at which decoding reads KV, as a curve over the bytes that one layer
    # reads.
    decode_bandwidth: RateTable = field(default_factory=RateTable)

    # Prefill rate of delta-rule layers: tokens per second times the elements of the state that each
    # token updates.
    delta_rate: Figure = field(default_factory=Figure)
    # Prefill rate of Mamba layers: tokens per second times the elements of the state that each
    # token updates.
    mamba_rate: Figure = field(default_factory=Figure)
    # Prefill rate of the short convolution in recurrent layers, in channels x tokens per second.
    conv_rate: Figure = field(default_factory=Figure)
    # Bandwidth in bytes/s at which recurrent states are read and written.
    state_bandwidth: Figure = field(default_factory=Figure)
    # Bandwidth in bytes/s at which the short kernels between matrices (norms, rotary embedding,
    # activation) read and write.
    short_bandwidth: Figure = field(default_factory=Figure)

    # Least time of one all-reduce in seconds.
    all_reduce_s: Figure = field(default_factory=Figure)
    # Rate of an all-reduce over two devices in bytes/s, latency included, as a curve over the bytes
    # that each device has.
    all_reduce_2: RateTable = field(default_factory=RateTable)
    # As `hardware.all_reduce_2`, over three or four devices.
    all_reduce_4: RateTable = field(default_factory=RateTable)
    # As `hardware.all_reduce_2`, over more devices.
    all_reduce_8: RateTable = field(default_factory=RateTable)

    # Maximum bandwidth between host and one device in bytes/s, in one direction.
    pcie_bandwidth: Figure = field(default_factory=Figure)
    # Maximum bandwidth of simultaneous copies to and from one device in bytes/s, both directions
    # added up. 0 means that the directions do not slow each other.
    both_ways_bandwidth: Figure = Figure(source="not known: neither direction slows the other")
    # Rate of the GPU's copy engine (cudaMemcpy) between host and device in bytes/s, as a curve over
    # the contiguous bytes per copy.
    copy_engine: RateTable = field(default_factory=RateTable)
    # Rate of the copy kernel from host to device in bytes/s, as a curve over the contiguous bytes
    # per piece.
    kernel_to_device: RateTable = field(default_factory=RateTable)
    # Rate of the copy kernel from device to host in bytes/s, as a curve over the contiguous bytes
    # per piece.
    kernel_to_host: RateTable = field(default_factory=RateTable)
    copy_kernel: CopyKernelConfig = field(default_factory=CopyKernelConfig)
    # Memory bandwidth of one host in bytes/s, shared by copies and storage.
    host_bandwidth: Figure = field(default_factory=Figure)
    # Factor by which computing takes longer while copies run beside it; 1 means no slowdown.
    copy_slowdown: Figure = field(default_factory=Figure)

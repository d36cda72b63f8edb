"""Reads the machine code of Triton kernels that other projects ship: fla-core, SGLang and vLLM.

    pip install --no-deps fla-core sglang vllm    (400 MB; no GPU, none of what they depend on)
    python -m experiments.studies.third_party_kernels [NAME ...]

prints a table for sm_90 and the installed Triton. All configurations of an autotuned kernel are
compiled. Those of fla-core that have an oracle here can also be checked:

    python -m hicache.workbench.check experiments.studies.third_party_kernels:Softmax

SGLang and vLLM import much more than their kernels need. So their modules of kernels are imported
alone: other modules of these packages are stand-ins whose attributes are all false.
"""

import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from itertools import groupby
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language
from torch import Tensor

from hicache.workbench import codegen
from hicache.workbench.codegen import Report
from hicache.workbench.own import Arguments, Sizes

REAL = "sglang.kernels.ops", "vllm.v1.attention.ops", "vllm.v1.kv_offload.cpu"
KIB = 1 << 10
BF16 = torch.bfloat16
TOKENS, HEADS, KV_HEADS, DIM, PAGE = 8192, 32, 8, 128, 16


class Absent:
    """What a stand-in answers: it is false, and so is what is read of it; it decorates nothing."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> "Absent":
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]):
            return arguments[0]
        return self if arguments or options else False


def absent(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent()


class Hopper(Absent):
    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


QUANT_MODES = "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD"
ANSWERS: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {"triton": triton, "tl": triton.language},
    "vllm.platforms": {"current_platform": Hopper()},
    "vllm.model_executor.layers.quantization.utils.quant_utils": {
        "get_fp8_min_max": lambda: (-448.0, 448.0)
    },
    "vllm.v1.kv_cache_interface": {
        "KVQuantMode": IntEnum("KVQuantMode", QUANT_MODES, start=0),
        "is_quantized_kv_cache": lambda *_: False,
    },
}


class Alone:
    """Imports modules of kernels without the packages around them."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in ("sglang", "vllm"):
            return None
        found = PathFinder.find_spec(package)
        if found is None or not found.submodule_search_locations:
            return None
        file = Path(found.submodule_search_locations[0]).joinpath(*name.split(".")[1:])
        is_outside = not any(each.startswith(name) or name.startswith(each) for each in REAL)
        if is_outside or not (file.is_dir() or file.with_suffix(".py").exists()):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if not file.is_dir():
            return spec_from_file_location(name, file.with_suffix(".py"))
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(file)]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(ANSWERS.get(spec.name, {}), __getattr__=absent)
        return module

    def exec_module(self, module: ModuleType) -> None: ...


if not any(isinstance(each, Alone) for each in sys.meta_path):
    sys.meta_path.insert(0, Alone())


class Launched:
    """A launch of kernels at the sizes of a model, to be compiled and read only."""

    outputs: tuple[str, ...] = ()
    rtol = atol = 0.0
    sizes: dict[str, Sizes] = {"8,192 tokens": {}}  # noqa: RUF012

    def draw(self, random: Random) -> Sizes:
        return {}

    def make(self, sizes: Sizes, generator: torch.Generator) -> Arguments:
        return {}

    def launch(self) -> None: ...

    def oracle(self) -> Arguments:
        return {}


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class GatedDelta(Launched):
    """The states of fla-core's chunked rule, as in a layer of Qwen3-Next."""

    def launch(self) -> None:
        module = import_module("fla.ops.common.chunk_delta_h")
        keys, gates = torch.zeros(1, TOKENS, 16, DIM, dtype=BF16), torch.zeros(1, TOKENS, 32)
        values = keys.repeat(1, 1, 2, 1)
        module.chunk_gated_delta_rule_fwd_h(
            keys, values.clone(), values, gates, initial_state=torch.zeros(1, 32, DIM, DIM),
            output_final_state=True,
        )  # fmt: skip


class SglangDecode(Launched):
    """A decode of 16 sequences over a pool of tokens."""

    def launch(self) -> None:
        module = import_module("sglang.kernels.ops.attention.decode_attention")
        batch, splits = 16, 8
        query = torch.zeros(batch, HEADS, DIM, dtype=BF16)
        pool = torch.zeros(2, TOKENS, KV_HEADS, DIM, dtype=BF16)
        mixed = torch.zeros(batch, HEADS, splits, DIM)
        module.decode_attention_fwd_grouped(
            query, *pool, torch.empty_like(query), i32(*range(batch + 1)), i32(*range(TOKENS)),
            mixed, mixed[..., 0].contiguous(), torch.ones(batch, dtype=torch.int32), splits,
            0.1, 1.0,
        )  # fmt: skip


class SglangCopyPages(Launched):
    sizes = {"pages of 64 KiB": {}}  # noqa: RUF012

    def launch(self) -> None:
        module = import_module("sglang.kernels.ops.kvcache.copy_pages")
        words, ids = torch.zeros(16 * 8 * KIB, dtype=torch.int64), i32(*range(16))
        module._copy_pages_kernel[(16, 4)](words, ids, ids, 8 * KIB, 1, 1, BLOCK=module._BLOCK)


class SglangMoveTokens(Launched):
    sizes = {"rows of 2 KiB": {}}  # noqa: RUF012

    def launch(self) -> None:
        module = import_module("sglang.kernels.ops.kvcache.cache_move")
        addresses, ids = torch.zeros(64, dtype=torch.int64), torch.arange(64)
        module.copy_all_layer_kv_cache_tiled[(64, 4)](
            addresses, addresses, ids, ids, 64, num_locs_upper=256, BYTES_PER_TILE=128, num_warps=4,
            num_stages=2,
        )  # fmt: skip


class SglangTrackStates(Launched):
    """Copies of Mamba states on write, over all layers."""

    sizes = {"states of 2 MiB": {}}  # noqa: RUF012

    def launch(self) -> None:
        module = import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
        taps, states = torch.zeros(2, 2, 8192, 3, dtype=BF16), torch.zeros(2, 2, 32, DIM, DIM)
        chunk = module._TRACK_CHUNK_BYTES
        module.track_mamba_state_if_needed_kernel[(528,)](
            taps, states, i32(0), torch.ones(1, dtype=torch.bool), i32(1),
            taps.stride(0), taps.stride(1), states.stride(0), states.stride(1), 1, 2,
            conv_state_numel_per_row=taps.stride(1), ssm_state_numel_per_row=states.stride(1),
            CONV_CHUNK=chunk // 2, SSM_CHUNK=chunk // 4,
            NUM_CONV_CHUNKS=-(-taps.stride(1) * 2 // chunk),
            NUM_SSM_CHUNKS=-(-states.stride(1) * 4 // chunk), BS_POW2=1,
            BLOCK_SIZE=module._TRACK_BLOCK_SIZE, check_freed_slots=False,
        )  # fmt: skip


class VllmAttention(Launched):
    sizes = {"prefill": {"rows": TOKENS}, "decode": {"rows": 1}}  # noqa: RUF012

    def make(self, sizes: Sizes, generator: torch.Generator) -> Arguments:
        return {"query": torch.zeros(sizes["rows"], HEADS, DIM, dtype=BF16)}

    def launch(self, query: Tensor) -> None:  # type: ignore[override]
        module = import_module("vllm.v1.attention.ops.triton_unified_attention")
        pool = torch.zeros(2, TOKENS // PAGE, PAGE, KV_HEADS, DIM, dtype=BF16)
        parts = torch.zeros(len(query), HEADS, 16, DIM)
        module.unified_attention(
            query, *pool, torch.empty_like(query), i32(0, len(query)), len(query), i32(TOKENS),
            TOKENS, 0.1, causal=True, window_size=(-1, -1), softcap=0.0, q_descale=None,
            block_table=i32(*range(TOKENS // PAGE))[None], k_descale=None, v_descale=None,
            seq_threshold_3D=8, num_par_softmax_segments=16, softmax_segm_output=parts,
            softmax_segm_max=parts[..., 0].contiguous(),
            softmax_segm_expsum=parts[..., 0].contiguous(),
        )  # fmt: skip


class VllmAppend(Launched):
    def launch(self) -> None:
        module = import_module("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
        keys = torch.zeros(TOKENS, KV_HEADS, DIM, dtype=BF16)
        pool = torch.zeros(2, TOKENS // PAGE, PAGE, KV_HEADS, DIM, dtype=BF16)
        one = torch.ones(1)
        module.triton_reshape_and_cache_flash(
            keys, keys.clone(), *pool, torch.arange(TOKENS), "auto", one, one
        )


class VllmSwapBlocks(Launched):
    sizes = {"blocks of 16 KiB": {}}  # noqa: RUF012

    def launch(self) -> None:
        module = import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
        jobs = torch.zeros(64, dtype=torch.int64)
        module._swap_blocks_kernel[(12,)](jobs, jobs, jobs, 64, BYTES_PER_CHUNK=8192)


class Rows:
    """An autotuned kernel of fla-core over rows [T, D], which `check` can run."""

    outputs = ("out",)
    rtol, atol = 1e-5, 1e-6
    sizes: dict[str, Sizes] = {"8,192 rows": {"rows": TOKENS, "dim": 128}}  # noqa: RUF012

    def draw(self, random: Random) -> Sizes:
        return {"rows": random.randint(1, 40), "dim": random.choice((16, 64, 128))}

    def make(self, sizes: Sizes, generator: torch.Generator) -> Arguments:
        x = torch.randn(1, sizes["rows"], sizes["dim"], generator=generator)
        return {"x": x, "out": self.expected(x).contiguous()}

    def launch(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.computed(x))

    def oracle(self, x: Tensor, out: Tensor) -> Arguments:
        return {"out": self.expected(x.double()).float()}

    def computed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def expected(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def fla(module: str, name: str) -> Any:
    return getattr(import_module(f"fla.{module}"), name)


class Softmax(Rows):
    def computed(self, x: Tensor) -> Tensor:
        result: Tensor = fla("ops.utils.softmax", "softmax_fwd")(x)
        return result

    def expected(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class LogSumExp(Rows):
    def computed(self, x: Tensor) -> Tensor:
        result: Tensor = fla("ops.utils.logsumexp", "logsumexp_fwd")(x)
        return result

    def expected(self, x: Tensor) -> Tensor:
        return x.logsumexp(-1)


class LocalSums(Rows):
    """Sums of gates within chunks of 64 tokens; D is the number of heads."""

    def computed(self, x: Tensor) -> Tensor:
        result: Tensor = fla("ops.utils.cumsum", "chunk_local_cumsum_scalar")(x, 64)
        return result

    def expected(self, x: Tensor) -> Tensor:
        chunks = torch.split(x, 64, dim=1)
        return torch.cat([each.cumsum(1) for each in chunks], dim=1)


class UnitRows(Rows):
    def computed(self, x: Tensor) -> Tensor:
        result: Tensor = fla("modules.norm.l2norm", "l2norm_fwd")(x)[0]
        return result

    def expected(self, x: Tensor) -> Tensor:
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Swish(Rows):
    def computed(self, x: Tensor) -> Tensor:
        result: Tensor = fla("modules.activations.ops", "swish_fwd")(x)
        return result

    def expected(self, x: Tensor) -> Tensor:
        return F.silu(x)


CASES = (
    SglangCopyPages, SglangMoveTokens, SglangTrackStates, VllmSwapBlocks, VllmAppend,
    SglangDecode, VllmAttention, GatedDelta, LocalSums, Softmax, LogSumExp, Swish,
)  # fmt: skip


def main(names: Sequence[str]) -> None:
    print(f"triton {triton.__version__}, sm_90\n")
    print("| kernel | configs | that spill | registers | loads | stores | KiB in flight an SM |")
    print("|---|---:|---:|---:|---|---|---:|")
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        reports = codegen.launched_by(f"{__spec__.name}:{case.__name__}")
        by_kernel = sorted(reports, key=lambda each: each.name.partition(" [")[0])
        for name, same in groupby(by_kernel, lambda each: each.name.partition(" [")[0]):
            print(row(f"{case.__name__}: `{name.partition(',')[0]}`", list(same)), flush=True)


def row(name: str, reports: Sequence[Report]) -> str:
    flights = [each.sm_bytes // KIB for each in reports]
    cells = [
        name,
        str(len(reports)),
        str(sum(each.spill_accesses > 0 for each in reports)),
        span(each.registers for each in reports),
        widths(each.payload_loads for each in reports),
        widths(each.stores for each in reports),
        span(flights) if max(flights) else "no steady loop",
    ]
    return f"| {' | '.join(cells)} |"


def span(values: Iterable[int]) -> str:
    few = sorted(set(values))
    return f"{few[0]}" if len(few) == 1 else f"{few[0]} to {few[-1]}"


def widths(accesses: Iterable[dict[int, int]]) -> str:
    bits = sorted({width for each in accesses for width in each})
    return f"{', '.join(map(str, bits))} bit" if bits else "none"


if __name__ == "__main__":
    main(sys.argv[1:])

"""A coding kernel of one's own: rows of bf16 to int8 with a scale of fp32, one program a row.

    cd docs/examples
    python -m hicache.workbench.check my_transcode:RowsToInt8
    python -m hicache.workbench.codegen --kernel my_transcode:RowsToInt8
    python -m hicache.workbench.bench --kernel my_transcode:RowsToInt8 --dry-run

Its scales are no powers of two: what was decoded is not always coded to the same bytes again.
"""

from typing import ClassVar

import torch
import triton
import triton.language as tl


@triton.jit
def _rows_to_int8_kernel(x_ptr, codes_ptr, scales_ptr, num_rows, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    while row < num_rows:
        x = tl.load(x_ptr + row * DIM + column).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30) / 127
        rounded = (x / scale + 12582912.0).to(tl.int32, bitcast=True)  # to the nearest integer
        tl.store(codes_ptr + row * DIM + column, rounded.to(tl.int8))
        tl.store(scales_ptr + row, scale)
        row += tl.num_programs(0)


class RowsToInt8:
    """x [rows, dim] bf16 → codes [rows, dim] int8, scales [rows] fp32."""

    outputs = ("codes", "scales")
    rtol, atol = 0.0, 1.0  # a value between two codes may be rounded to either
    sizes: ClassVar = {"a page of 64 tokens × 8 heads": {"rows": 512, "dim": 128}}

    def draw(self, random):
        """Sizes of a small case."""
        return {"rows": random.randint(1, 40), "dim": random.choice((16, 64, 128))}

    def make(self, sizes, generator):
        """All arguments."""
        x = torch.randn(sizes["rows"], sizes["dim"], generator=generator).bfloat16()
        return {"x": x, "codes": torch.empty_like(x, dtype=torch.int8), "scales": x[:, 0].float()}

    def launch(self, x, codes, scales):
        """Code all rows with four programs."""
        _rows_to_int8_kernel[(4,)](x, codes, scales, len(x), DIM=x.shape[1])

    def oracle(self, x, codes, scales):
        """The same by torch."""
        scales = x.float().abs().amax(1).clamp(min=1e-30) / 127
        return {"codes": (x.float() / scales[:, None]).round().to(torch.int8), "scales": scales}

"""Right and wrong autotuned kernels, as a user gives them to `check` and `codegen` in a file."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024) for warps in (2, 4)
]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def _double(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = 3 if WRONG and BLOCK == 1024 else 2
    tl.store(out_ptr + place, factor * tl.load(x_ptr + place, mask=place < n), mask=place < n)


@triton.autotune(configs=[*CONFIGS, triton.Config({"BLOCK": 2048})], key=["n"])
@triton.jit
def _double_small(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 1024)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, 2 * tl.load(x_ptr + place, mask=place < n), mask=place < n)


@triton.jit
def _double_in_a_loop(x_ptr, out_ptr, n, WRONG: tl.constexpr):
    for place in range(n):
        tl.store(out_ptr + place.to(tl.int64), 2 * tl.load(x_ptr + place))


@triton.jit
def _double_of_nothing(x_ptr, out_ptr, n, WRONG: tl.constexpr):
    tl.store(out_ptr + n.absent, tl.load(x_ptr))


class Doubled:
    outputs = ("out",)
    rtol = atol = 0.0
    sizes = {"long": {"n": 1 << 20}}  # noqa: RUF012
    kernel, wrong = _double, False

    def draw(self, random):
        return {"n": random.randint(1, 3000)}

    def make(self, sizes, generator):
        x = torch.randn(sizes["n"], generator=generator)
        return {"x": x, "out": torch.empty_like(x)}

    def launch(self, x, out):
        def grid(meta):
            return (triton.cdiv(len(x), meta.get("BLOCK", len(x))),)

        self.kernel[grid](x, out, len(x), WRONG=self.wrong)

    def oracle(self, x, out):
        return {"out": 2 * x}


class WrongInLargeBlocks(Doubled):
    wrong = True


class Small(Doubled):
    kernel = _double_small


class Looped(Doubled):
    kernel = _double_in_a_loop


class Absent(Doubled):
    kernel = _double_of_nothing

"""Say which claims of README.md and docs/kernels.md a measurement confirms, and which it refutes.

python -m experiments.gpu.claims                       the claims, and what decides each
python -m experiments.gpu.claims bench.json contest.json     with the verdict of a bench on a GPU

A claim is about a ratio of two bandwidths that the bench measures, or about a number that it notes.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """A sentence that holds if a measured ratio lies between two limits."""

    sentence: str
    page: str
    of: str  # "op: case" of a record, a ceiling, or a note
    over: str  # likewise; empty for a note
    least: float
    most: float = math.inf


README, KERNELS, PAGE = "README.md", "hicache/kernels/README.md", "docs/kernels.md"
LINK, BACK = "ceiling: all SMs to_device", "ceiling: all SMs to_host"
DEVICE, LARGEST = "ceiling: device copy_", 512 << 20
SGLANG = "experiments.gpu.sglang_peers:"
WAYS = {"to_device": LINK, "to_host": BACK}
ONCE = "slots: 1 slots, conv and SSM"
# of hicache/kernels/README.md: what is claimed, of which number, over which, at least
COPIES = [
    *(
        (f"{rows} are copied at {least} of a plain copy", f"pages: device, {rows}", DEVICE, least)
        for rows, least in (
            ("page 16, rows of 2048 B", 0.92),
            ("page 1, rows of 2048 B", 0.80),
            ("page 16, rows of 256 B", 0.85),
        )
    ),
    *(
        (f"a change of layout costs at most 5 %, page {page}",
         f"layout: layer-first to page-first, page {page}",
         f"pages: device, page {page}, rows of 2048 B", 0.95)
        for page in (16, 64)
    ),
    *(
        (f"{n} programs fill the link {way}, page {page}",
         f"{way}: page {page}, {n} programs", WAYS[way], 0.90 if n == 2 else 0.97)
        for way in WAYS for page in (16, 64) for n in (2, 4)
    ),
    *(
        (f"4 programs reach 0.9 of the copy engine {way}",
         f"{way}: page 64, 4 programs", f"ceiling: copy engine {way}", 0.90)
        for way in WAYS
    ),
    ("8 programs fill the link with token pages", "to_device: page 1, 8 programs", LINK, 0.90),
    ("8 states are copied at 0.88 of a plain copy",
     "slots: 8 slots, conv and SSM", "slots: copy_ of as many bytes", 0.88),
    ("taps are copied 1.15 times as fast as by accesses of 16 bits",
     "slots: 8 slots, conv", "slots: 8 slots, conv, 16-bit peer", 1.15),
    ("one launch for a state is 4 times as fast as a launch for each tensor",
     ONCE, f"{ONCE}, a launch for each tensor", 4.0),
    *(
        (f"copies {way} are at least {least:g} times as fast as those of {peer}",
         f"contest: {way}, {LARGEST}, ours", f"contest: {way}, {LARGEST}, {peer}", least)
        for way, peer, least in (
            ("to_device", "vllm_blocks", 1.0),
            ("to_device", "sgl_warps", 2.0),
            ("to_host", "sgl_warps", 1.5),
            *((way, SGLANG + name, 0.98) for way in WAYS for name in ("tma", "registers")),
        )
    ),
]  # fmt: skip
CLAIMS = (
    *(Claim(sentence, KERNELS, of, over, least) for sentence, of, over, least in COPIES),
    Claim(
        "page tables of 256 requests take 6 µs",
        KERNELS, "page table, 256 requests, µs", "", 0, 6,
    ),
    Claim(
        "a launch of all layers takes the host at most 60 µs",
        KERNELS, "host time of a launch of 8 MiB, all layers, µs", "", 0, 60,
    ),
    Claim(
        "copies within the device reach 0.92 of a plain copy",
        README, "pages: device, page 64, rows of 2048 B", "ceiling: device copy_", 0.92,
    ),
    Claim(
        "a load-back by 4 programs is as fast as all multiprocessors",
        README, "to_device: page 64, 4 programs", LINK, 0.97,
    ),
    Claim(
        "a back-up by 2 programs is as fast as all multiprocessors",
        README, "to_host: page 64, 2 programs", BACK, 0.97,
    ),
    Claim(
        "a back-up in int8 by 4 programs reads at least 1.8 times what the link moves",
        PAGE, "encode: to_host, bfloat16 to int8, items of (16, 8, 128), 4 programs", BACK, 1.8,
    ),
    Claim(
        "the kernel moves pieces of 256 bytes as fast as the link",
        PAGE, "sweep: to_device 1 256 0 4", LINK, 0.95,
    ),
    Claim(
        "a load-back by 4 programs keeps two thirds of its rate beside a decode step",
        PAGE, "4 programs to_device beside decode, kept", "", 0.6,
    ),
    Claim(
        "the copy engine keeps its rate beside a decode step",
        PAGE, "copy engine, one piece, to_device beside decode, kept", "", 0.95,
    ),
    Claim(
        "a load-back of int8 with 4 programs is as fast as the link",
        PAGE, "load: int8 pages, 4 programs", LINK, 0.95,
    ),
    Claim(
        "with 1 program decoding is slower than copying",
        PAGE, "load: int8 pages, 1 programs", "load: plain pages, 1 programs", 0, 0.9,
    ),
    Claim(
        "a load-back of all layers in one launch is as fast as the link",
        KERNELS, "load: plain pages, 4 programs", LINK, 0.97,
    ),
    Claim(
        "states and taps do not slow a load-back down",
        KERNELS, "load: plain pages, states and taps, 4 programs", LINK, 0.97,
    ),
    Claim(
        "batched memcpy of pieces of 16 KiB is less than half as fast as the kernel",
        PAGE, "sweep: copy engine to_device 16384", LINK, 0, 0.5,
    ),
    Claim(
        "batched memcpy of pieces of 128 KiB and more is as fast as the kernel",
        PAGE, "sweep: copy engine to_device 131072", LINK, 0.95,
    ),
    Claim(
        "a back-up with checksums, by 2 programs, has more than half of the link",
        KERNELS, "checksum: to_host, with checksum", "checksum: to_host, plain", 0.5,
    ),
    Claim(
        "appending a prompt is as fast as copying within the device",
        KERNELS, "append: prefill, ours", "ceiling: device copy_", 0.8,
    ),
    Claim(
        "decode attention of 64 sequences is at most 1.15 times slower than FlashInfer's",
        KERNELS, "attend: decode of 64 sequences of 8,192, ours",
        "attend: decode of 64 sequences of 8,192, FlashInfer", 1 / 1.15,
    ),
    Claim(
        "decode attention of one sequence is as fast as FlashInfer's",
        KERNELS, "attend: decode of 1 sequence of 8,192, ours",
        "attend: decode of 1 sequence of 8,192, FlashInfer", 0.95,
    ),
    Claim(
        "the scan is at least 10 times slower than a chunked one",
        KERNELS, "scan: 2048 tokens, ours", "scan: 2048 tokens, flash-linear-attention", 0, 0.1,
    ),
    Claim(
        "the copy engine hardly slows products down",
        PAGE, "decode slowed by copy engine, one piece, to_device", "", 0, 1.1,
    ),
    Claim(
        "a load-back by 4 programs slows a decode step by some 10 %",
        PAGE, "decode slowed by 4 programs to_device", "", 1.05, 1.15,
    ),
    Claim(
        "a back-up by 2 programs slows a decode step by less than 10 %",
        PAGE, "decode slowed by 2 programs to_host", "", 0, 1.1,
    ),
    Claim(
        "a back-up by 4 programs slows a decode step by more than 10 %",
        PAGE, "decode slowed by 4 programs to_host", "", 1.1,
    ),
)  # fmt: skip


def measured(bench: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a bench by the names that claims use."""
    # a bench of before 2026-11-27 has goals beside its notes
    found: dict[str, float] = {each["what"]: each["got"] for each in bench.get("goals", ())}
    found |= bench["notes"]
    for cell in bench["contest"]:
        its = cell.get("parameters", cell)
        name = f"contest: {its['direction']}, {cell['num_bytes']}, {its['kernel']}"
        found[name] = cell["gb_per_s"]
    for record in bench["records"]:
        name = f"{record['op']}: {record['case']}"
        if record["op"] == "sweep":  # page size, bytes of a row, 1 if in a row, programs; or a size
            name = " ".join([name, *map(str, record["parameters"].values())])
        found[name] = record["gb_per_s"]
    return found


def judged(claim: Claim, numbers: dict[str, float]) -> tuple[float, bool | None]:
    """Return the measured ratio and whether the claim holds; NaN and None if not measured."""
    value, base = numbers.get(claim.of), numbers.get(claim.over) if claim.over else 1.0
    if value is None or base is None:
        return math.nan, None
    return value / base, claim.least <= value / base <= claim.most


def main() -> int:
    """Print the claims. Return 1 if the bench refutes one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bench", type=Path, nargs="*", help="JSON files of a bench on a GPU")
    options = parser.parse_args()
    numbers = dict[str, float]()
    for path in options.bench:
        numbers |= measured(json.loads(path.read_text()))
    verdicts = []
    for claim in CLAIMS:
        ratio, holds = judged(claim, numbers)
        verdicts.append(holds)
        limits = f"{claim.least:g} to {claim.most:g}"
        what = claim.of + (f" over {claim.over}" if claim.over else "")
        word = {True: "holds", False: "FALLS", None: "not measured"}[holds]
        got = "" if holds is None else f" got {ratio:.3f}"
        print(f"{word:12} {claim.sentence} ({claim.page})\n{'':12} {what}: {limits}{got}")
    return 1 if False in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())

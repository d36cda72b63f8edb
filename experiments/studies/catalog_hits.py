"""Compare the hits of LRU and Belady on a Mooncake trace with those of `kvcache-simulator`.

python -m experiments.studies.catalog_hits PYTHON TRACE

PYTHON is an interpreter that has the package (see `experiments.studies.catalog`). Both programs
take the block ids of the trace literally and keep only the prompt's blocks. Both touch the last
block of a prompt first, and count the last half of the requests. Hits are compared token by token.
The model is Llama-3.1-8B, with 64 MiB per block. Capacities that the first half does not fill are
left out.
"""

import argparse
import gzip
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hicache.cli.console import console
from hicache.workload.mooncake import BLOCK_TOKENS
from hicache.workload.oracle import Visit, Visits, infinite, lru_curve, min_hits

BUDGETS_GIB = (64, 128, 256, 512, 1024, 2048)
BLOCK_BYTES = BLOCK_TOKENS * 131_072
MODEL = "llama-3.1-8b"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="the interpreter that has kvcache-simulator 0.1.3")
    parser.add_argument("trace", type=Path, help="a Mooncake trace, .jsonl or .jsonl.gz")
    args = parser.parse_args()
    theirs = _theirs(args.python, args.trace)
    visits = literal_visits(list(_rows(args.trace)))
    curve = lru_curve(visits, page_bytes=BLOCK_BYTES)
    table = Table("GiB", "LRU", "theirs", "Belady", "theirs")
    is_equal = True
    for point in theirs["points"]:
        blocks = point["cacheBlocks"]
        lru = round(curve.hit_rate(blocks * BLOCK_BYTES) * curve.prompt_tokens)
        ours = (lru, min_hits(visits, blocks))
        said = [point["results"][name]["hitTokens"] for name in ("lru", "optimal")]
        is_equal &= list(ours) == said
        shares = [f"{tokens / visits.prompt_tokens:.4f} ({tokens:,})" for tokens in ours]
        table.add_row(str(point["gib"]), shares[0], f"{said[0]:,}", shares[1], f"{said[1]:,}")
    without_limit = infinite(visits)
    is_equal &= without_limit == theirs["ceiling"]["hitTokens"]
    console().print(table)
    console().print(f"without limit: {without_limit:,} of {visits.prompt_tokens:,} tokens")
    return int(not is_equal)


def literal_visits(rows: Sequence[tuple[int, Sequence[int]]]) -> Visits:
    numbers: dict[tuple[int, int], int] = {}
    visits = []
    for prompt_len, ids in rows:
        chain, node = [], -1
        for each in ids:
            node = numbers.setdefault((node, each), len(numbers))
            chain.append(node)
        visits.append(Visit(np.array(chain, np.int64), len(chain), len(chain), prompt_len))
    return Visits(
        visits=visits,
        num_pages=len(numbers),
        page_size=BLOCK_TOKENS,
        first_counted=len(visits) // 2,
    )


def _rows(trace: Path) -> Iterator[tuple[int, list[int]]]:
    read = gzip.open if trace.suffix == ".gz" else open
    with read(trace, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield record["input_length"], record["hash_ids"]


def _theirs(python: str, trace: Path) -> dict[str, Any]:
    budgets = ",".join(map(str, BUDGETS_GIB))
    command = [python, "-m", "kvcache_sim", "run", "--trace", str(trace), "--model", MODEL]
    command += ["--block-size", str(BLOCK_TOKENS), "--budgets-gib", budgets]
    command += ["--policies", "lru,optimal", "--backend", "python", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    raise SystemExit(main())

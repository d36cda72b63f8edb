"""Find the changes of a server's settings that are worth most, from a log of its requests.

hicache advise mine.jsonl model=llama3_8b hardware=h100
hicache advise mine.jsonl model=qwen3_next_80b --engine vllm cache.host_gib=128 --minutes 10

The log may be any trace (docs/traces.md). The settings are those of the server today; if they name
no host cache and no storage, it has none. The program checks the log, and replays windows of it
with one change after another: sizes of the host cache, storage, what is written to the host, how
long a request waits for storage, and where states are kept. A change is worth it if the weak end of
its 95 % interval still improves the metric by --worth. The best one is kept, and the others are
tried again on top of it, until none is worth it or the time is over.
"""

import json
import sys
from collections.abc import Sequence
from os import cpu_count
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.curve import numbers
from hicache.cli.engine_flags import COMPAT
from hicache.runs.grid import new_dir

SIZES_GIB = (64.0, 256.0, 1024.0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache advise", __doc__)
    add = parser.add_argument
    add("log", help="a trace, or a setting such as workload=mooncake_conversation")
    add("overrides", nargs="*", help="the server today: settings, as for hicache run")
    add("--engine", choices=COMPAT, default="sglang", help="whose options are named and imitated")
    add("--minutes", type=float, default=5.0, help="time that the program may take")
    add("--gib", type=numbers, default=SIZES_GIB, help="sizes of the host cache to try")
    add("--storage", default="nvme", help="storage to try, such as mooncake_rdma")
    add(
        "--metric",
        help="what to improve, a key of summary.json; by default TTFT, or GPU time if overloaded",
    )
    add("--worth", type=float, default=0.02, help="least improvement, as a fraction")
    add("--windows", type=int, default=5, help="number of windows of the log")
    add(
        "--workers",
        type=int,
        default=cpu_count() or 1,
        help="parallel runs; by default one per core",
    )
    add("--full", action="store_true", help="try every combination (slow)")
    add("--out-dir", type=Path, help="where results lie; an interrupted search continues there")
    add("--json", action="store_true", help="print an object")
    options = parser.parse_intermixed_args(arguments)
    with in_one_sentence():
        # pandas and SciPy, which the help does not need
        from hicache.cli.advice import advise, as_dict, as_markdown
        from hicache.cli.tables.intervals import LEAST_BLOCKS

        log = options.log if "=" in options.log else f"workload.path={options.log}"
        if options.windows < LEAST_BLOCKS:
            raise ValueError(f"--windows must be at least {LEAST_BLOCKS}, got {options.windows}")
        out_dir = options.out_dir or new_dir("advise")
        advice = advise(options, [log, *options.overrides], out_dir)
        text = as_markdown(advice, options.log)
        packed = json.dumps(as_dict(advice, options.log), indent=2)
        (out_dir / "advice.md").write_text(f"{text}\n")
        (out_dir / "advice.json").write_text(f"{packed}\n")
        print(packed if options.json else text)
        sys.stderr.write(f"{out_dir}\n")

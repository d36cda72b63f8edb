"""Compare a run with a server's measurements of the same requests.

hicache validate RUN measured.jsonl

RUN is the directory of a run. measured.jsonl holds one JSON object for each request of the server:
arrival, ttft and latency in seconds, prompt and output in tokens, and device_hit, host_hit and
storage_hit in tokens if known. Hits are in percent of the prompt tokens. Errors of hits are in
percentage points, all others in percent; the last row is the median error of TTFT by request.
docs/published.md compares published measurements with simulated ones.
"""

from collections.abc import Sequence
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.results.requests_file import read_requests
from hicache.results.server_log import compare_measured, read_measured


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache validate", __doc__)
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("measured", type=Path, help="log of the server")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        run, log = read_requests(options.run), read_measured(options.measured)
        table = compare_measured(run, log)
    if len(run) != len(log):
        print(f"{len(log):,} requests were measured and {len(run):,} simulated: rates differ by it")
    print(table.to_string(index=False, na_rep="", float_format="{:.4g}".format))

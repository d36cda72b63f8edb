"""Copy a trace of any form without its text, names and ids: hicache anonymize FILE OUT

The copy has one row per request in the form of blocks (docs/traces.md): times, lengths, and hashes
of its blocks of 16 tokens with everything before them. The key of the hashes is random and not
stored. A chat is cut into tokens as workload.tokenizer says. Waits for sub-agents are left out.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.config import TraceConfig
from hicache.request import TOKEN_BYTES, Request
from hicache.runs.schema import config_of
from hicache.workload.trace import Trace
from hicache.workload.workload import form_of, parsed

BLOCK_TOKENS = 16


def rows(requests: Sequence[Request]) -> Iterator[dict[str, object]]:
    key = secrets.token_bytes(32)

    def hashed(value: bytes) -> str:
        return blake2b(value, key=key, digest_size=8).hexdigest()

    for request in requests:
        row: dict[str, object] = {
            "timestamp": round(request.arrival_ns / 1e6),
            "input_length": request.prompt_len,
            "output_length": request.output_len,
            "hash_ids": [*_blocks(request.prompt.to_bytes(), hashed)],
            "request_id": hashed(b"r%d" % request.id),
        }
        if request.parent_id is not None:
            row["parent"] = hashed(b"r%d" % request.parent_id)
        if request.namespace:
            row["namespace"] = hashed(request.namespace.encode())
        yield row


def _blocks(tokens: bytes, hashed: Callable[[bytes], str]) -> Iterator[str]:
    digest, size = "", BLOCK_TOKENS * TOKEN_BYTES
    for begin in range(0, len(tokens), size):
        digest = hashed(digest.encode() + tokens[begin : begin + size])
        yield digest


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache anonymize", __doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path, help="a new file")
    parser.add_argument("overrides", nargs="*", help="settings of the workload")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        config = config_of("workload=trace", f"workload.path={options.file}", *options.overrides)
        assert isinstance(config.workload, TraceConfig)
        trace = Trace(options.file, odd_rows=config.workload.odd_rows)
        workload = parsed(trace, form_of(trace), config.workload, config.seed)
        with options.out.open("x") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows(workload.requests))
        print(f"{workload.description}")
        print(*workload.notes, sep="\n", end="\n" if workload.notes else "")

"""Traces in the format of the Mooncake FAST'25 release (github.com/kvcache-ai/Mooncake).

Each line is a JSON object: `timestamp` (ms), `input_length` and `output_length` (tokens),
`hash_ids` (one id per block of the prompt, including a last partial block). An optional `namespace`
separates tenants. `session_id`, or `chat_id` and `parent_chat_id` (-1 or null for no parent), link
the turns of a session, as in Qwen-Bailian's traces. The token at offset o of block b has the id n b
+ o, with n tokens per block.

Mooncake's blocks hold 512 tokens. Other traces use other sizes, leave the last partial block out,
or name blocks by long hashes.
"""

from collections.abc import Iterator
from pathlib import Path

from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.rows import Row, load_rows
from hicache.workload.trace import integer, name_of, names_of, number, read_records, text

BLOCK_TOKENS = 512


def load_mooncake(
    path: Path, config: WorkloadConfig, *, block_tokens: int | None = BLOCK_TOKENS
) -> list[Request]:
    """Load a trace in Mooncake's format as requests in order of arrival, the first at time 0.

    Each line of the trace names the blocks of one prompt by ids. `block_tokens` is the number of
    tokens per block; None means that the loader infers it from prompt lengths and numbers of ids.
    A request continues the earlier request that the trace names. If the trace names neither
    sessions nor parents, the loader takes the latest earlier request whose full blocks are a prefix
    of the new prompt. That prefix must have at least two blocks and more than
    `config.system_tokens` tokens.

    Raises:
        TraceError: a line is malformed; the message names the file and the line.
    """
    return load_rows(path, _rows(path), config, block_tokens=block_tokens)


def _rows(path: Path) -> Iterator[Row]:
    for line, record in read_records(path):
        where = f"{path}, line {line}"
        parent = name_of(record, "parent_chat_id", "parent", where=where)
        yield Row(
            where=where,
            arrival_ns=round(number(record, "timestamp", where=where) * 1e6),
            prompt_len=integer(record, "input_length", least=1, where=where),
            output_len=integer(record, "output_length", least=1, where=where),
            blocks=names_of(record, "hash_ids", where=where),
            namespace=text(record, "namespace", where=where),
            session=name_of(record, "session_id", where=where),
            name=name_of(record, "chat_id", "request_id", where=where),
            parent=None if parent == -1 else parent,
        )

"""Traces in the format of the Mooncake FAST'25 release (github.com/kvcache-ai/Mooncake).

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`
(one id for each block of the prompt, and one for what is left). An optional `namespace` separates
tenants. `session_id`, or `chat_id` and `parent_chat_id` (none: -1 or null), say who continues whom,
as in Qwen-Bailian's traces. The token at offset o of block b of n tokens has the id n b + o.

Mooncake's blocks hold 512 tokens; other traces have others, and leave the last partial block out or
call blocks by long hashes.
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
    """Requests of the trace in order of arrival; the first comes at 0. O(blocks).

    The parent of a request is the one it names, or else the latest earlier one whose full blocks,
    at least two and more than `config.system_tokens`, all prefix its own. Without `block_tokens`
    it is the one power of two that suits every line.

    Raises:
        TraceError: with file and line number, for a line that cannot be understood.
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

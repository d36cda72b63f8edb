"""Traces in the format of the Mooncake FAST'25 release (github.com/kvcache-ai/Mooncake).

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`
(one id for each block of the prompt, and one for what is left). An optional `namespace` separates
tenants. `session_id`, or `chat_id` and `parent_chat_id` (none: -1 or null), say who continues whom,
as in Qwen-Bailian's traces. The token at offset o of block b of n tokens has the id n b + o.

Mooncake's blocks hold 512 tokens; other traces have others, and leave the last partial block out or
call blocks by long hashes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.rows import Name, Row, from_first, rows_to_requests
from hicache.workload.trace import Record, TraceError, integer, name_of, number, read_records, text

BLOCK_TOKENS = 512
SIZES = tuple(1 << power for power in range(16))  # that a trace may be found to have


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
    rows = from_first(path, _rows(path))
    if block_tokens is None:
        block_tokens = _found_size(path, rows)
    if not _suits(rows, block_tokens, 1):
        _check_counts(rows, block_tokens)
    return rows_to_requests(rows, config, block_tokens=block_tokens)


def _rows(path: Path) -> Iterator[Row]:
    for line, record in read_records(path):
        where = f"{path}, line {line}"
        parent = name_of(record, "parent_chat_id", "parent", where=where)
        yield Row(
            where=where,
            arrival_ns=round(number(record, "timestamp", where=where) * 1e6),
            prompt_len=integer(record, "input_length", least=1, where=where),
            output_len=integer(record, "output_length", least=1, where=where),
            blocks=_block_ids(record, where),
            namespace=text(record, "namespace", where=where),
            session=name_of(record, "session_id", where=where),
            name=name_of(record, "chat_id", "request_id", where=where),
            parent=None if parent == -1 else parent,
        )


def _block_ids(record: Record, where: str) -> list[Name]:
    blocks = record.get("hash_ids")
    if not isinstance(blocks, list):
        raise TraceError(f"{where}: hash_ids must be a list of block ids, got {blocks!r}")
    for block in blocks:
        if type(block) is not int and not isinstance(block, str):
            raise TraceError(f"{where}: a block id must be an integer or text, got {block!r}")
    return blocks


def _suits(rows: Sequence[Row], block_tokens: int, partial: int) -> bool:
    """Whether all lines have as many blocks as that, with the partial one (0) or without (1)."""
    sizes = [row.prompt_len + (1 - partial) * (block_tokens - 1) for row in rows]
    return all(
        size // block_tokens == len(row.blocks) for size, row in zip(sizes, rows, strict=True)
    )


def _check_counts(rows: Sequence[Row], block_tokens: int) -> None:
    for row in rows:
        wanted = -(-row.prompt_len // block_tokens)
        if len(row.blocks) != wanted:
            raise TraceError(
                f"{row.where}: {row.prompt_len} prompt tokens need {wanted} blocks of "
                f"{block_tokens} tokens, got {len(row.blocks)} hash_ids"
            )


def _found_size(path: Path, rows: Sequence[Row]) -> int:
    """The one block size that suits all lines, with the partial block or else without it."""
    for partial in (0, 1):
        found = [size for size in SIZES if _suits(rows, size, partial)]
        if len(found) == 1:
            return found[0]
    longest = max(rows, key=lambda row: row.prompt_len)
    raise TraceError(
        f"{path}: no single block size fits every line ({longest.where} has {longest.prompt_len} "
        f"tokens in {len(longest.blocks)} blocks): set workload.block_tokens"
    )

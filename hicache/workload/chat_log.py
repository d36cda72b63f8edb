"""Text logs of chats in OpenAI's format and of plain prompts: one request per line.

A line holds `messages` (each with a `role` and a `content`) or a text `prompt` or `input`, and
`created` or `timestamp` (a number of seconds or a date). The answer is the last message of the
assistant, `choices` as an API returns them, or a text `response`, `output` or `completion`; without
the text, `usage.completion_tokens` gives its length. `session_id` names conversations. In a log
without it, a request continues an earlier one if it begins with that request's messages and an
answer to them; plain prompts are compared block by block.

Only the lengths and equality of texts leave this module. A hash covers each block and all tokens
before it, with a random key that is never stored, and the hashes become numbers in order of
appearance. The files that a run writes, and the stored copy of a parsed trace, contain only these
numbers.
"""

import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.user_code import loaded, user_code
from hicache.workload.rows import Row, from_first, rows_to_requests
from hicache.workload.trace import Record, TraceError, date_ns, integer, name_of, read_records, text

BLOCK_TOKENS = 16
# a stand-in for a tokenizer: one token per four letters of a word, and per other sign
PIECES = re.compile(r"\s?\w{1,4}|\s?[^\w\s]|\s+")
Encode = Callable[[str], Sequence[int | str]]


def load_chat_log(path: Path, config: WorkloadConfig) -> list[Request]:
    """Load a text log of chats or prompts as requests in order of arrival.

    Each line of the log is a JSON object that holds the text of one request. The first request
    arrives at time 0.

    Raises:
        TraceError: a line is malformed; the message names the file and the line.
        ValueError: the tokenizer that `config` names cannot be loaded.
    """
    histories: dict[str, _History] = {}
    rows = from_first(path, _rows(path, _encoder(config.tokenizer), histories))
    if histories and not any(row.session is not None for row in rows):
        _name_parents(rows, histories)
    return rows_to_requests(rows, config, block_tokens=BLOCK_TOKENS)


def _hugging_face(name: str) -> Encode:
    try:
        tokenizers = import_module("tokenizers")
    except ImportError as error:
        raise ValueError(
            f"workload.tokenizer={name} needs a package that is missing: pip install tokenizers"
        ) from error
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    kind = tokenizers.Tokenizer
    try:
        loaded = kind.from_file(str(path)) if path.is_file() else kind.from_pretrained(name)
    except Exception as error:  # the package raises no narrower type
        raise ValueError(f"workload.tokenizer={name} cannot be loaded: {error}") from error
    return lambda said: cast(list[int], loaded.encode(said, add_special_tokens=False).ids)


class _History(NamedTuple):
    # keyed hashes of the whole text up to a place, which find the request that another continues
    asked: bytes  # up to the end of the prompt
    answered: bytes  # up to the end of its answer
    # both for each message of the assistant in the prompt, the last message first
    turns: list[tuple[bytes, bytes]]


def _name_parents(rows: Sequence[Row], histories: Mapping[str, _History]) -> None:
    latest: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        row.name = index
        history = histories.get(row.where)
        if history is None:
            continue
        # The parent is the latest row that shares the most messages with this row. A parent whose
        # answer is repeated exactly takes precedence: logs often keep the reasoning in an answer,
        # which clients leave out of the next prompt.
        known = (latest.get(key) for asked, answered in history.turns for key in (answered, asked))
        row.parent = next((parent for parent in known if parent is not None), None)
        latest[history.asked] = latest[history.answered] = index


def _encoder(tokenizer: str | None) -> Encode:
    if tokenizer is None:
        return PIECES.findall
    if ":" not in tokenizer:
        return _hugging_face(tokenizer)
    encode = loaded("workload.tokenizer", tokenizer)

    def checked(text: str) -> Sequence[int | str]:
        with user_code(f"workload.tokenizer={tokenizer}"):
            tokens = encode(text)
        # tokenizers of transformers return a dict by default
        if not isinstance(tokens, list | tuple):
            raise ValueError(
                f"workload.tokenizer={tokenizer} must return a list of tokens, got {_kind(tokens)}"
            )
        return tokens

    return checked


def _rows(path: Path, encode: Encode, histories: dict[str, _History]) -> Iterator[Row]:
    salt = secrets.token_bytes(32)
    numbers: dict[bytes, int] = {}
    tenants: dict[str, int] = {}
    for line, record in read_records(path):
        where = f"{path}, line {line}"
        tenant = text(record, "namespace", where=where)
        prompt: list[int | str] = []
        said = _first_text(record, "prompt", "input")
        if said is not None and "messages" not in record:
            answer = _first_text(record, "response", "output", "completion")
            prompt += encode(said)
        else:
            messages = _messages(record, where)
            answer = _answer(record, messages, where)
            for message in messages:
                prompt += [*encode(f"<{message['role']}>"), *encode(_content(message, where))]
            # the answer follows this marker when the next prompt repeats it
            prompt += encode("<assistant>")
            histories[where] = _history(tenant, messages, answer, salt, where)
        if answer is None:
            usage = record.get("usage")
            counted = cast(Record, usage) if isinstance(usage, dict) else {}
            output_len = integer(counted, "completion_tokens", least=1, where=where)
        else:
            output_len = max(len(encode(answer)), 1)
        yield Row(
            where=where,
            arrival_ns=_time_ns(record, where),
            prompt_len=max(len(prompt), 1),
            output_len=output_len,
            blocks=[numbers.setdefault(digest, len(numbers)) for digest in _digests(prompt, salt)],
            namespace=f"tenant-{tenants.setdefault(tenant, len(tenants))}" if tenant else "",
            session=name_of(record, "session_id", "conversation_id", where=where),
        )


def _history(
    tenant: str, messages: Sequence[Record], answer: str | None, salt: bytes, where: str
) -> _History:
    def hashed(before: bytes, role: object, said: str) -> bytes:
        message = json.dumps([role, said]).encode()
        return blake2b(before + message, key=salt, digest_size=16).digest()

    digest = hashed(b"", "tenant", tenant)
    turns: list[tuple[bytes, bytes]] = []
    for message in messages:
        asked, digest = digest, hashed(digest, message["role"], _content(message, where))
        if message["role"] == "assistant":
            turns.append((asked, digest))
    return _History(digest, hashed(digest, "assistant", answer or ""), turns[::-1])


def _digests(tokens: Sequence[int | str], salt: bytes) -> Iterator[bytes]:
    digest = b""
    for begin in range(0, len(tokens), BLOCK_TOKENS):
        block = repr(list(tokens[begin : begin + BLOCK_TOKENS])).encode()
        digest = blake2b(digest + block, key=salt, digest_size=16).digest()
        yield digest


def _messages(record: Record, where: str) -> list[Record]:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise TraceError(
            f"{where}: messages must be a list with at least one message, got {_kind(messages)}"
        )
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TraceError(
                f"{where}: a message must be an object with a role, got {_kind(message)}"
            )
    return cast(list[Record], list(messages))


def _answer(record: Record, messages: list[Record], where: str) -> str | None:
    choices = record.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if isinstance(message, dict):
        return _content(cast(Record, message), where)
    kept = _first_text(record, "response", "output", "completion")
    if kept is not None:
        return kept
    if messages[-1]["role"] != "assistant" or len(messages) == 1:
        return None
    return _content(messages.pop(), where)


def _first_text(record: Record, *names: str) -> str | None:
    found = (record[name] for name in names if isinstance(record.get(name), str))
    return cast(str | None, next(found, None))


def _content(message: Record, where: str) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is not None and not isinstance(content, str | list):
        raise TraceError(f"{where}: content must be text or a list, got {_kind(content)}")
    told = content if isinstance(content, str) else json.dumps(content or "", sort_keys=True)
    return told + (json.dumps(calls, sort_keys=True) if calls else "")


def _time_ns(record: Record, where: str) -> int:
    value = record.get("created", record.get("timestamp"))
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return round(value * 1e9)
    try:
        return date_ns(cast(str, value))
    except (TypeError, ValueError):
        # the value may be private text, so the message does not show it
        raise TraceError(
            f"{where}: created or timestamp must be a number of seconds or a date, got "
            f"{_kind(value)}"
        ) from None


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"

"""Text logs of chats in OpenAI's formats and of plain prompts: one request per row.

A row holds `messages` (each with a `role` and a `content`), the `input` of OpenAI's Responses, or a
text `prompt` or `text_input`, and `created` or `timestamp` (a number of seconds or a date). `tools`
and instructions come first in the prompt. The answer is the last message of the assistant,
`choices` or `output` as an API returns them, or a text `response`, `output` or `completion`.
`session_id` names conversations. In a log without it, a request continues an earlier one if it
begins with that request's messages and an answer to them; plain prompts are compared block by
block. ShareGPT's conversations have no times: each message of the model is a request. Rows of
aiperf may have a `delay` (ms) after the answer before them, and list the `turns` of a session.

`usage` gives the length of an answer whose text is missing or has hidden reasoning, and the tokens
of images. Where it differs from the text by more than 10 %, the run says so.

Only the lengths and equality of texts leave this module. A hash covers each block and all tokens
before it, with a random key that is never stored, and the hashes become numbers in order of
appearance. The files that a run writes, and the stored copy of a parsed trace, contain only these
numbers, and the ids of sessions.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import Meta, Struct, field

from hicache.config import TraceConfig
from hicache.request import Request
from hicache.user_code import loaded, user_code
from hicache.workload.rows import (
    UNIT_NOTE,
    UNITS_NS,
    Row,
    draw_starts,
    from_first,
    rows_to_requests,
)
from hicache.workload.trace import Count, Name, Number, OddRow, Time, Trace, time_ns

IMAGE_TOKENS = 1000  # of an image, where the usage that the log gives does not say it
BLOCK_TOKENS = 16
# a stand-in for a tokenizer: one token per four letters of a word, and per other sign
PIECES = re.compile(r"\s?\w{1,4}|\s?[^\w\s]|\s+")
MOST_DIFFERENT = 0.1  # relative difference from `usage` that is not reported
# types of parts that are no text
MEDIA = {
    *("image", "image_url", "input_image", "audio", "audio_url", "input_audio"),
    *("video", "video_url", "input_video", "file", "input_file", "document"),
}
MODEL = ("assistant", "model", "gpt", "chatgpt", "bing", "bard")  # roles of the model
ROLE = re.compile(r"<\w+>")
DATA_URL = re.compile(r"(data:[\w.+-]+/[\w.+-]+;base64,[\w+/=]+)")
Encode = Callable[[str], Sequence[int | str]]
Token = int | str | bytes


class Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None  # in Responses
    output_tokens: Count | None = None
    completion_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None

    @property
    def num_reasoning(self) -> int:
        details = self.completion_tokens_details or self.output_tokens_details or {}
        found = details.get("reasoning_tokens")
        return found if isinstance(found, int) else 0


class Message(Struct):
    role: str = ""
    content: Any = None
    type: str = ""
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: Any = None
    # of a Responses item
    name: Any = None
    arguments: Any = None
    output: Any = None
    # of a ShareGPT message
    sender: str = field(name="from", default="")
    value: Any = None


Messages = Annotated[list[Message], Meta(min_length=1)]


class Choice(Struct):
    message: Message | None = None
    delta: Message | None = None  # of a stream
    text: str | None = None


class Chat(Struct):
    messages: Messages | None = None
    input: str | Messages | None = None
    prompt: str | None = None
    text_input: str | None = None
    # of aiperf
    text: str | None = None
    texts: list[Any] | None = None
    image: Any = None
    images: list[Any] | None = None
    audio: Any = None
    audios: list[Any] | None = None
    video: Any = None
    videos: list[Any] | None = None
    role: str | None = None
    delay: Number | None = None  # ms
    message_mode: str | None = None
    turns: Annotated[list["Chat"], Meta(min_length=1)] | None = None
    conversations: Messages | None = None
    tools: Any = None
    functions: Any = None
    instructions: Any = None
    system: Any = None
    created: Time | None = None
    created_at: Time | None = None
    timestamp: Time | None = None
    response: Any = None
    output: Any = None
    completion: Any = None
    choices: list[Choice] | None = None
    usage: Usage | None = None
    output_length: Count | None = None
    session_id: Name | None = None
    conversation_id: Name | None = None
    id: Name | None = None
    previous_response_id: Name | None = None
    namespace: str | None = None
    cache_salt: str | None = None
    model: str | None = None


def load_chat_log(trace: Trace, config: TraceConfig, *, seed: int = 0) -> list[Request]:
    """Load a text log of chats or prompts as requests in order of arrival.

    Each row of the log is a JSON object that holds the text of one request, or of one conversation
    of ShareGPT. The first request arrives at time 0. Conversations without times start at random,
    drawn with `seed`.

    Raises:
        TraceError: too many rows are odd; the message names the file and the first ones.
        ValueError: the tokenizer that `config` names cannot be loaded.
    """
    reader = _Reader(trace, config)
    rows = [row for rows in trace.read(Chat, reader.rows) for row in rows]
    draw_starts(trace, rows, config, seed)
    reader.report_usage()
    rows = from_first(trace, rows, config)
    if reader.histories and not any(row.session is not None for row in rows):
        _name_parents(rows, reader.histories)
        trace.remark("sessions inferred: a chat continues the one whose messages it repeats")
    return rows_to_requests(trace, rows, config, block_tokens=BLOCK_TOKENS)


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


def _name_parents(rows: Sequence[Row], histories: dict[str, _History]) -> None:
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
                f"workload.tokenizer={tokenizer} must return a list of tokens, got "
                f"a {type(tokens).__name__}"
            )
        return tokens

    return checked


class _Answer(NamedTuple):
    text: str | None
    reasoning: str  # generated before the text, and not repeated in later prompts


class _Reader:
    def __init__(self, trace: Trace, config: TraceConfig) -> None:
        self.histories: dict[str, _History] = {}  # by place of the row
        self._trace, self._config = trace, config
        self._encode = _encoder(config.tokenizer)
        self._salt = secrets.token_bytes(32)
        self._numbers: dict[bytes, int] = {}
        self._tenants: dict[tuple[str, str], int] = {}  # by namespace and model
        self._media: dict[bytes, int] = {}  # tokens of each image, by its keyed hash
        self._responses: dict[Name, list[Message]] = {}  # by id: prompt and answer
        self._differing: dict[str, list[tuple[int, int]]] = {}  # what usage says, and what was read

    def rows(self, where: str, record: Chat) -> list[Row]:
        if isinstance(record.response, dict):  # the object that the API returned
            told = msgspec.convert(record.response, Chat)
            record.choices, record.output = told.choices, told.output
            record.usage, record.id = record.usage or told.usage, record.id or told.id
        if record.conversations is not None:
            return self._conversation(where, record, record.conversations)
        if record.turns is not None:
            return self._turns(where, record, record.turns)
        plain = next((x for x in (record.prompt, record.text_input, record.input) if x), None)
        messages, answer = [*(record.messages or ())], _answer(record)
        if isinstance(record.input, list):
            messages = _expanded(record.input)
        elif record.created_at is not None and isinstance(record.input, str):
            messages = [Message(role="user", content=record.input)]
        usage = record.usage or Usage()
        is_counted = bool(usage.prompt_tokens or usage.input_tokens)
        parts = _aiperf_parts(record)
        if not (messages or parts or isinstance(plain, str) or is_counted):
            raise OddRow("the row has no messages, no prompt and no usage")
        if record.previous_response_id is not None:
            earlier = self._responses.get(record.previous_response_id)
            if earlier is None:
                self._trace.outside += 1
            messages = [*(earlier or ()), *messages]
            self._trace.spend(len(messages))
        if answer is None and len(messages) > 1 and _role(messages[-1]) == "assistant":
            answer = _said(messages.pop())
        if record.id is not None and messages and record.messages is None:
            said = Message(role="assistant", content=answer.text if answer else "")
            self._responses[record.id] = [*messages, said]
        opening = [x for x in (record.tools, record.functions) if x]
        opening += [x for x in (record.instructions, record.system) if x]
        if not messages:
            return [self._row(where, record, [*opening, plain or "", *parts], answer)]
        # the answer follows the last marker when the next prompt repeats it
        pieces = [x for m in messages for x in (f"<{_role(m)}>", _content(m))]
        row = self._row(where, record, [*opening, *pieces, "<assistant>"], answer)
        tenant = record.namespace or ""
        self.histories[where] = _history(tenant, messages, answer, self._salt)
        return [row]

    def _turns(self, where: str, record: Chat, turns: list[Chat]) -> list[Row]:
        rows: list[Row] = []
        system: list[object] = []
        for turn in turns:
            pieces = [*system, f"<{turn.role or 'user'}>", *_aiperf_parts(turn)]
            system = pieces if turn.role == "system" and not rows and turn.delay is None else []
            if system:  # it is no request of its own
                continue
            turn.session_id = where if record.session_id is None else record.session_id
            turn.message_mode = "delta"
            rows.append(self._row(where, turn, [*pieces, "<assistant>"], None))
        if not rows:
            raise OddRow("the session has no turn of the user")
        self._trace.num_rows += len(rows) - 1
        return rows

    def _conversation(self, where: str, record: Chat, messages: list[Message]) -> list[Row]:
        rows: list[Row] = []
        pieces: list[object] = []
        for message in messages:
            if _role(message) == "assistant" and pieces:
                self._trace.spend(sum(len(_as_text(piece)) for piece in pieces) // BLOCK_TOKENS)
                row = self._row(where, record, [*pieces, "<assistant>"], _said(message))
                row.arrival_ns = None
                row.session = row.session_name = str(where if record.id is None else record.id)
                rows.append(row)
            pieces += [f"<{_role(message)}>", _content(message)]
        if not rows:
            raise OddRow("the conversation has no answer of the model")
        self._trace.num_rows += len(rows) - 1
        return rows

    def _row(
        self, where: str, record: Chat, pieces: Sequence[object], answer: _Answer | None
    ) -> Row:
        usage = record.usage or Usage()
        counted = usage.prompt_tokens or usage.input_tokens
        prompt = self._prompt(pieces, counted)
        prompt_len = len(prompt)
        if counted and all(not x or (isinstance(x, str) and ROLE.fullmatch(x)) for x in pieces):
            prompt_len = counted  # the log leaves the text out
        self._compare("prompt", counted, prompt_len)
        space = record.namespace or record.cache_salt or ""
        tenant = self._tenants.setdefault((space, record.model or ""), len(self._tenants))
        session = record.conversation_id if record.session_id is None else record.session_id
        digests = _digests(prompt, self._salt)
        return Row(
            where=where,
            arrival_ns=self._arrival_ns(record),
            delay_ns=round((record.delay or 0) * UNITS_NS["ms"]),
            is_delta=record.message_mode == "delta",
            prompt_len=max(prompt_len, 1),
            output_len=self._answer_len(record, usage, answer),
            blocks=[self._numbers.setdefault(each, len(self._numbers)) for each in digests],
            namespace=f"tenant-{tenant}" if space or tenant else "",
            session=session,
            session_name="" if session is None else str(session),
            is_repeated=not (answer and answer.reasoning),
        )

    def _arrival_ns(self, record: Chat) -> int | None:
        when = record.created if record.created is not None else record.created_at
        unit = self._config.time_unit or "s"
        if when is None:
            when = record.timestamp
            aiperf = (record.output_length, record.delay, record.message_mode, record.text)
            if any(each is not None for each in aiperf):
                unit = self._config.time_unit or "ms"
            if isinstance(when, float) and self._config.time_unit is None:
                self._trace.remark(UNIT_NOTE.format(unit))
        if when is None:
            of_sessions = (*aiperf, record.conversations, record.session_id)
            if all(each is None for each in of_sessions):
                raise OddRow("created or timestamp must be a number or a date")
            return None
        return time_ns(when, UNITS_NS[unit], "created or timestamp")

    def _answer_len(self, record: Chat, usage: Usage, answer: _Answer | None) -> int | None:
        counted = usage.completion_tokens or usage.output_tokens or record.output_length
        if answer is None or answer.text is None:
            return counted
        read = len(self._encode(answer.text)) + len(self._encode(answer.reasoning))
        self._compare("answer", counted, read)
        is_hidden = bool(answer.reasoning or usage.num_reasoning or not read)
        return counted if counted and is_hidden else max(read, 1)

    def _prompt(self, pieces: Sequence[object], counted: int | None) -> list[Token]:
        parts = [part for piece in pieces for part in _parts(piece)]
        texts = [self._encode(part) if isinstance(part, str) else None for part in parts]
        media = [blake2b(x, key=self._salt).digest() for x in parts if isinstance(x, bytes)]
        new = [each for each in dict.fromkeys(media) if each not in self._media]
        if new:
            # usage counts the images that no earlier prompt had, and the text
            known = sum(map(len, filter(None, texts))) + sum(self._media.get(x, 0) for x in media)
            left = 0 if counted is None else max(counted - known, 0) // len(new)
            self._media |= dict.fromkeys(new, left or IMAGE_TOKENS)
        prompt: list[Token] = []
        images = iter(media)
        for tokens in texts:
            if tokens is None:
                image = next(images)
                prompt += [image] * self._media[image]
            else:
                prompt += tokens
        return prompt

    def _compare(self, what: str, counted: int | None, read: int) -> None:
        if counted and abs(counted - read) > MOST_DIFFERENT * counted:
            self._differing.setdefault(what, []).append((counted, read))

    def report_usage(self) -> None:
        for what, found in self._differing.items():
            counted, read = (sum(column) for column in zip(*found, strict=True))
            self._trace.remark(
                f"usage counts {counted:,} {what} tokens in {len(found):,} rows where the texts "
                f"have {read:,}, more than {MOST_DIFFERENT:.0%} off (workload.tokenizer)"
            )
            self._trace.differing += len(found)


def _history(
    tenant: str, messages: Sequence[Message], answer: _Answer | None, salt: bytes
) -> _History:
    def hashed(before: bytes, role: str, said: str) -> bytes:
        message = json.dumps([role, said]).encode()
        return blake2b(before + message, key=salt, digest_size=16).digest()

    digest = hashed(b"", "tenant", tenant)
    turns: list[tuple[bytes, bytes]] = []
    for message in messages:
        asked, digest = digest, hashed(digest, _role(message), _as_text(_content(message)))
        if _role(message) == "assistant":
            turns.append((asked, digest))
    said = "" if answer is None else answer.text or ""
    return _History(digest, hashed(digest, "assistant", said), turns[::-1])


def _digests(tokens: Sequence[Token], salt: bytes) -> Iterator[bytes]:
    digest = b""
    for begin in range(0, len(tokens), BLOCK_TOKENS):
        block = repr(list(tokens[begin : begin + BLOCK_TOKENS])).encode()
        digest = blake2b(digest + block, key=salt, digest_size=16).digest()
        yield digest


def _role(message: Message) -> str:
    role = message.role or message.sender
    if not role:
        # items of Responses: what the model produced, and what tools returned
        role = "assistant" if message.type in ("function_call", "reasoning") else "tool"
        if not message.type:
            raise OddRow("a message must be an object with a role")
    return "assistant" if role in MODEL else role


def _expanded(items: Sequence[Message]) -> list[Message]:
    # hidden reasoning has no text
    return [each for each in items if each.type != "reasoning" or each.content]


def _content(message: Message) -> object:
    content = message.value if message.content is None else message.content
    if content is not None and not isinstance(content, str | list):
        raise OddRow("content must be text or a list")
    others = [message.tool_calls, message.name and message.arguments, message.output]
    calls = "".join(_as_text(each) for each in others if each)
    return [*_as_list(content), calls] if calls else content


def _as_list(content: object) -> list[object]:
    return content if isinstance(content, list) else [] if content is None else [content]


def _as_text(value: object) -> str:
    # the text of parts alone, so that an answer equals its repetition in another format
    if isinstance(value, str):
        return value
    parts = [part for part in _parts(value) if part]
    return "".join(x if isinstance(x, str) else blake2b(x).hexdigest() for x in parts)


def _parts(value: object) -> Iterator[str | bytes]:
    """Yield the texts of a content, and the contents of its images and other media as bytes."""
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict) and str(part.get("type")) in MEDIA:
            yield json.dumps(part, sort_keys=True).encode()
        elif part is not None:
            text = part.get("text") if isinstance(part, dict) else part
            text = text if isinstance(text, str) else json.dumps(part, sort_keys=True)
            for number, piece in enumerate(DATA_URL.split(text)):
                yield piece.encode() if number % 2 else piece


def _aiperf_parts(record: Chat) -> list[object]:
    # texts first; one entry may name several contents
    def contents(kind: str) -> Iterator[object]:
        for each in [getattr(record, kind), *(getattr(record, f"{kind}s") or ())]:
            yield from _as_list(each.get("contents") if isinstance(each, dict) else each)

    media = [
        {"type": kind, kind: x} for kind in ("image", "audio", "video") for x in contents(kind)
    ]
    return [*contents("text"), *media]


def _answer(record: Chat) -> _Answer | None:
    if record.choices:
        first = record.choices[0]
        said = first.message or first.delta
        return _said(said) if said is not None else _Answer(first.text, "")
    for value in (record.response, record.output, record.completion):
        if isinstance(value, str):
            return _Answer(value, "")
        if isinstance(value, list) and value:  # the items of Responses
            items = [each for each in value if isinstance(each, dict)]
            kinds = [each.get("type") == "reasoning" for each in items]
            held = [each.get("content") or each.get("arguments") for each in items]
            reasoning, told = (
                "".join(_as_text(x) for x, is_reasoning in zip(held, kinds, strict=True)
                        if x and is_reasoning is wanted)
                for wanted in (True, False)
            )  # fmt: skip
            return _Answer(told, reasoning)
    return None


def _said(message: Message) -> _Answer:
    reasoning = message.reasoning_content or message.reasoning or ""
    return _Answer(_as_text(_content(message)), _as_text(reasoning))

"""Logs of chats: prompts keep their shared prefixes, and their texts are kept nowhere."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.runs.job import run_job
from hicache.runs.schema import config_of
from hicache.workload import kept
from hicache.workload.trace import TraceError
from tests.workload.traces import ids, session_starts, shared_len, whole, write_lines
from tests.workload.traces import load_requests as load

SYSTEM = {
    "role": "system",
    "content": "You answer briefly, politely and only in whole sentences. " * 9,
}
ASK = {
    "role": "user",
    "content": "Which marmalade suits a Wensleydale of eleven months, and why? " * 4,
}
ANSWER = {"role": "assistant", "content": "Quince, for its tartness: it cuts through the fat. " * 3}
AGAIN = {"role": "user", "content": "And which wine?"}
OTHER = {"role": "user", "content": "How far is the moon from Halifax in furlongs, roughly? " * 4}

LOG: list[dict[str, Any]] = [
    {"created": 1700000000, "messages": [SYSTEM, ASK, ANSWER]},
    {"created": 1700000003.5, "messages": [SYSTEM, OTHER], "usage": {"completion_tokens": 12}},
    {
        "created": 1700000009,
        "messages": [SYSTEM, ASK, ANSWER, AGAIN],
        "choices": [{"message": {"role": "assistant", "content": "A dry cider would do."}}],
    },
]


def letters(text: str) -> list[int]:
    return list(text.encode())


LETTERS = f"{__name__}:letters"


def as_a_mapping(text: str) -> dict[str, list[int]]:
    return {"input_ids": letters(text)}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "log.jsonl", LOG)


def test_a_log_is_read_with_its_lengths_and_shared_prefixes(log):
    first, other, second = load(log, tokenizer=LETTERS)
    assert [r.arrival_ns for r in (first, other, second)] == [0, 3_500_000_000, 9_000_000_000]
    said = [len(str(message["content"])) for message in (SYSTEM, ASK, ANSWER, AGAIN, OTHER)]
    marks = [len(f"<{role}>") for role in ("system", "user", "assistant")]
    assert first.prompt_len == said[0] + said[1] + sum(marks)
    assert (first.output_len, other.output_len) == (said[2], 12)
    assert second.output_len == len("A dry cider would do.")
    assert second.prompt_len == first.prompt_len + said[2] + said[3] + marks[1] + marks[2]
    # all requests share whole blocks of 16 tokens of the system prompt
    common = (said[0] + sum(marks[:2])) // 16 * 16
    assert shared_len(ids(first.prompt), ids(other.prompt)) == common
    assert (second.parent_id, other.parent_id) == (0, None)
    assert shared_len(whole(first), ids(second.prompt)) == first.prompt_len + first.output_len


def test_without_a_tokenizer_a_token_has_about_four_letters(log):
    plain, again, lettered = load(log), load(log), load(log, tokenizer=LETTERS)
    for few, same, many in zip(plain, again, lettered, strict=True):
        assert 2.5 < many.prompt_len / few.prompt_len < 5
        assert np.array_equal(whole(few), whole(same))
    assert plain[2].parent_id == 0


def test_sessions_that_a_log_names_are_kept(tmp_path):
    named = [line | {"session_id": name} for line, name in zip(LOG, "aba", strict=True)]
    found = load(write_lines(tmp_path / "log.jsonl", named))
    assert session_starts(found) == [0, 1, 0]


def test_no_text_of_a_log_is_written_to_disk(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(kept, "user_cache_path", lambda _: cache)
    named = [line | {"namespace": "Cholmondeley"} for line in LOG]
    path = write_lines(tmp_path / "log.jsonl", named)
    out_dir = tmp_path / "run"
    config = config_of(
        f"workload.path={path}", "tracker.wandb_mode=disabled", "prefetch.threshold=1"
    )
    run_job(config, out_dir, is_job=True)
    written = [file for top in (out_dir, cache) for file in top.rglob("*") if file.is_file()]
    assert len(written) >= 8
    for file in written:
        contents = file.read_bytes()
        for word in (b"marmalade", b"Wensleydale", b"furlongs", b"Quince", b"cider", b"Cholmond"):
            assert word not in contents, file


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"messages": []}, "messages must be a list that is not empty"),
        ({"messages": "Quince"}, "messages must be a list or null, got text"),
        ({"messages": ["Quince"]}, r"messages\[0\] must be an object, got text"),
        ({"messages": [{"content": "Quince"}]}, "must be an object with a role"),
        ({"created": 1_700_000_000, "messages": [ASK]}, "no answer tokens"),
        (
            {"messages": [ASK], "choices": [{"message": "Quince"}]},
            r"choices\[0\].message must be an object or null, got text",
        ),
        ({"created": "Quince"}, "created or timestamp must be a number or a date"),
        ({"created": float("inf")}, "not JSON"),
        ({"created": 1.7e12}, "its time is after the year 2106"),
        ({"messages": [{"role": "user", "content": 5}, ANSWER]}, "content must be text or a list"),
    ],
)
def test_an_invalid_line_is_refused_without_its_texts(tmp_path, line, told):
    changed = {"created": 1, "messages": [ASK, ANSWER]} | line
    path = write_lines(tmp_path / "log.jsonl", [LOG[0], changed])
    with pytest.raises(TraceError, match=rf"log\.jsonl, line 2: .*{told}") as caught:
        load(path)
    assert "Quince" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokenizer", "told"),
    [
        ("nowhere:encode", r"workload\.tokenizer=nowhere:encode cannot be loaded"),
        ("json:nothing", r"workload\.tokenizer=json:nothing cannot be loaded"),
        (f"{__name__}:as_a_mapping", ":as_a_mapping must return a list of tokens, got a dict"),
    ],
)
def test_an_invalid_tokenizer_is_refused(log, tokenizer, told):
    with pytest.raises(ValueError, match=told):
        load(log, tokenizer=tokenizer)


def test_questions_about_shared_documents_are_not_turns_of_a_conversation(tmp_path):
    def ask(created: int, document: str, question: str, *more: dict[str, Any]) -> dict[str, Any]:
        asked = {"role": "user", "content": 99 * document + question}
        return {"created": created, "messages": [SYSTEM, asked, *more], "response": "So it is."}

    answer = {"role": "assistant", "content": "So it is."}
    log = [ask(time, "abcd "[time % 5], f"{time}?") for time in range(40)]
    log.append(ask(90, "b", "1?", answer, AGAIN))
    log.append(ask(95, "b", "1?", {**answer, "content": "It was edited."}, AGAIN))
    path = write_lines(tmp_path / "log.jsonl", log)
    assert [r.parent_id for r in load(path)] == [None] * 40 + [1, 1]


def test_a_turn_continues_the_request_with_the_answer_that_it_repeats(tmp_path):
    def ask(created: int, response: str, *more: dict[str, Any]) -> dict[str, Any]:
        return {"created": created, "messages": [SYSTEM, ASK, *more], "response": response}

    once = {"role": "assistant", "content": "Quince."}
    log = [ask(0, "Quince."), ask(1, "Damson."), ask(2, "Port.", once, AGAIN), {**LOG[1]}]
    log[3]["created"] = 3
    path = write_lines(tmp_path / "log.jsonl", log)
    assert [r.parent_id for r in load(path)] == [None, None, 0, None]


SAID = "the cache keeps the prompt and the answer of every request that the engine serves"
TOKENIZER = Path(__file__).parent / "fixtures" / "tokenizer.json"


def test_plain_prompts_are_read_with_their_answers(tmp_path):
    log = [
        {"timestamp": 0, "prompt": SAID, "response": "So it is."},
        {"timestamp": 5, "prompt": f"{SAID}So it is. {SAID}", "completion": "Yes."},
        {"timestamp": 6, "input": SAID[::-1], "usage": {"completion_tokens": 4}},
    ]
    found = load(write_lines(tmp_path / "log.jsonl", log), tokenizer=LETTERS)
    said = len(SAID)
    assert [(r.prompt_len, r.output_len) for r in found] == [
        (said, 9),
        (2 * said + 10, 4),
        (said, 4),
    ]
    assert [r.parent_id for r in found] == [None, 0, None]
    assert shared_len(whole(found[0]), ids(found[1].prompt)) == said + 9


class StandIn:
    """The methods of `tokenizers.Tokenizer` that the reader uses, without special tokens."""

    @classmethod
    def from_file(cls, path: str) -> "StandIn":
        assert Path(path) == TOKENIZER
        return cls()

    @classmethod
    def from_pretrained(cls, name: str) -> "StandIn":
        raise OSError(f"there is no {name}")

    def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(ids=text.split())


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "log.jsonl", [{"timestamp": 0, "prompt": SAID, "output": SAID}])


@pytest.mark.parametrize("name", [TOKENIZER, TOKENIZER.parent])
def test_a_tokenizer_of_hugging_face_is_loaded_from_its_file_or_folder(prompt, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=StandIn))
    (found,) = load(prompt, tokenizer=str(name))
    assert (found.prompt_len, found.output_len) == (15, 15)
    with pytest.raises(ValueError, match=r"workload\.tokenizer=nowhere .*: there is no nowhere"):
        load(prompt, tokenizer="nowhere")


def test_tokens_are_counted_with_the_package_of_hugging_face(prompt):
    (found,) = load(prompt, tokenizer=str(TOKENIZER))
    assert (found.prompt_len, found.output_len) == (15, 15)


def test_a_missing_tokenizer_package_is_named(prompt, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="is missing: pip install tokenizers"):
        load(prompt, tokenizer="Qwen/Qwen3-8B")

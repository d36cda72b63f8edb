"""The recorder beside publishers of KV events, and the replay of what it wrote."""

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from hicache.cli import anonymize, record
from hicache.cli.record import END, Recording, Subscriber
from hicache.runs.schema import config_of
from hicache.workload.workload import load_workload
from tests.record.traffic import BLOCK, requests

zmq = pytest.importorskip("zmq")
ROOT = Path(__file__).parents[2]


def free_address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def recorded(folder, *options, engine="light", python=sys.executable, env=None):
    """Record the traffic of a publisher, and return what recording.json says."""
    events, replay = free_address(), free_address()
    recorder = [sys.executable, record.__file__, str(folder), "--events", events]
    recording = subprocess.Popen([*recorder, "--replay", replay], stderr=subprocess.DEVNULL)
    traffic = [python, "-m", "tests.record.traffic", engine, events, replay, *options]
    try:
        subprocess.run(traffic, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    finally:
        recording.send_signal(signal.SIGTERM)
    assert recording.wait() == 0
    return json.loads((folder / "recording.json").read_text())


def replayed(path):
    config = config_of(f"workload.path={path}")
    return load_workload(config.workload, data_dir=None, seed=0).requests


def lengths(found):
    return sorted((each.prompt_len, each.output_len) for each in found)


def shared(prompts):
    """Return, sorted, how many whole blocks each prompt shares with any earlier one."""
    seen, found = set(), []
    for prompt in prompts:
        names = [bytes(prompt[: end + 1]) for end in range(4 * BLOCK - 1, len(prompt), 4 * BLOCK)]
        found.append(sum(name in seen for name in names))
        seen.update(names)
    return sorted(found)


def assert_equal_to_sent(folder):
    found, sent = replayed(folder), requests()
    assert lengths(found) == sorted((len(prompt), len(answer)) for prompt, answer in sent)
    as_bytes = (b"".join(x.to_bytes(4, "little") for x in prompt) for prompt, _ in sent)
    assert shared(each.prompt.to_bytes() for each in found) == shared(as_bytes)


def test_a_recording_has_the_requests_tokens_and_prefixes_that_were_sent(tmp_path):
    said = recorded(tmp_path)
    assert said["lost"] == []
    assert_equal_to_sent(tmp_path)
    text = "".join(each.read_text() for each in tmp_path.glob("*.jsonl"))
    assert "token_ids" not in text


def test_lost_messages_a_restart_and_a_jump_of_the_clock_are_mended_and_counted(tmp_path):
    said = recorded(tmp_path, "--drop", "20", "--restart", "--jump", "3600")
    counts = said["counts"]
    assert counts["replayed_batches"] >= 1
    assert (counts["lost_batches"], counts["server_restarts"], counts["clock_jumps"]) == (0, 1, 1)
    assert len(said["lost"]) == 2
    assert_equal_to_sent(tmp_path)


def test_messages_that_the_server_no_longer_has_are_counted_as_lost(tmp_path):
    counts = recorded(tmp_path, "--drop", "20", "--kept", "1")["counts"]
    assert counts["lost_batches"] > 0
    assert counts["batches"] + counts["lost_batches"] in (98, 99)  # the last one may be lost


def test_messages_without_a_number_are_counted_as_bad_batches(tmp_path):
    recording, replay = Recording(tmp_path), free_address()
    subscriber = Subscriber(recording, "inproc://unused", None)
    subscriber._replay_at = replay
    subscriber.socket.close()
    subscriber.socket = mock.Mock(recv_multipart=lambda: [b"no number"])
    subscriber.take()

    def answer(server):
        name, *_ = server.recv_multipart()
        for frames in ([b"no number"], [b"", END.to_bytes(8, "big"), b""]):
            server.send_multipart([name, *frames])

    with zmq.Context.instance().socket(zmq.ROUTER) as server:
        server.bind(replay)
        answering = threading.Thread(target=answer, args=(server,))
        answering.start()
        assert subscriber._answers(0) == []
        answering.join()
    assert recording.counts["bad_batches"] == 2


def test_lines_that_a_full_disk_refuses_are_counted_and_leave_no_half_line(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    recording = Recording(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        for number in range(20):
            recording.events.write([number, []])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    lines = (tmp_path / "events-000001.jsonl").read_text().splitlines()
    recording.events.close()
    assert all(json.loads(line)[1] == [] for line in lines)
    assert 0 < len(lines) == 20 - recording.counts["unwritten_lines"]
    assert "disk full" in " ".join(recording.sentences())


def test_a_recorder_that_is_started_again_continues_its_hashes_and_files(tmp_path):
    first, second = Recording(tmp_path), Recording(tmp_path)
    first.events.write([1, []])
    first.next["a"] = 5
    first.save()
    first.events.close()
    second = Recording(tmp_path)
    second.events.write([2, []])
    second.events.close()
    assert first.hashed(b"x") == second.hashed(b"x")
    assert second.next == {"a": 5}
    assert len([*tmp_path.glob("events-*.jsonl")]) == 2


def test_an_anonymous_copy_has_the_same_requests_and_prefixes_and_no_text(tmp_path):
    source = Path(__file__).parents[1] / "workload/fixtures/chat_completions.jsonl"
    anonymize.main([str(source), str(tmp_path / "copy.jsonl")])
    ours, copy = replayed(source), replayed(tmp_path / "copy.jsonl")
    assert [(x.prompt_len, x.output_len, x.parent_id) for x in ours] == [
        (x.prompt_len, x.output_len, x.parent_id) for x in copy
    ]
    assert shared(x.prompt.to_bytes() for x in ours) == shared(x.prompt.to_bytes() for x in copy)
    assert set(json.loads((tmp_path / "copy.jsonl").read_text().splitlines()[0])) <= {
        *("timestamp", "input_length", "output_length", "hash_ids", "request_id", "parent"),
        "namespace",
    }

"""The recorder of published KV events, and the replay of its recordings."""

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from hicache.cli import anonymize, record
from hicache.cli.record import END, Recording, Subscriber
from hicache.runs.schema import config_of
from hicache.workload.engine_logs import STORED_FIELDS
from hicache.workload.workload import load_workload
from tests.record.traffic import BLOCK, requests

zmq = pytest.importorskip("zmq")
ROOT = Path(__file__).parents[2]


def free_address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def recorder(folder, *options):
    command = [sys.executable, record.__file__, str(folder), *options]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def lines_of(folder, stem="events"):
    files = sorted((folder / stem).glob("*.jsonl"))
    return [line for each in files for line in each.read_text().splitlines()]


def recorded(
    folder, *options, engine="light", python=sys.executable, env=None, kill=False, most=None
):
    """Record the traffic of a publisher, and return what recording.json says.

    With `kill`, the recorder is killed and started again after 30 lines; with `most`, its disk
    takes files of at most so many bytes.
    """
    events, replay = free_address(), free_address()
    addresses = ["--events", events, "--replay", replay]
    recording = recorder(folder, *addresses)
    if most is not None:
        resource.prlimit(recording.pid, resource.RLIMIT_FSIZE, (most, most))
    traffic = [python, "-m", "tests.record.traffic", engine, events, replay, *options]
    with subprocess.Popen(traffic, cwd=ROOT, env=env, stdout=subprocess.DEVNULL) as sending:
        try:
            while kill and len(lines_of(folder)) < 30 and sending.poll() is None:
                time.sleep(0.02)
            if kill:
                recording.kill()
                recording.wait()
                recording = recorder(folder, *addresses)
            assert sending.wait() == 0
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


def assert_equal_to_sent(path, sent=None):
    found, sent = replayed(path), sent or requests()
    assert lengths(found) == sorted((len(prompt), len(answer)) for prompt, answer in sent)
    as_bytes = (b"".join(x.to_bytes(4, "little") for x in prompt) for prompt, _ in sent)
    assert shared(each.prompt.to_bytes() for each in found) == shared(as_bytes)


def test_a_recording_has_the_requests_tokens_and_prefixes_that_were_sent(tmp_path):
    said = recorded(tmp_path)
    assert said["lost"] == []
    assert_equal_to_sent(tmp_path / "events")
    text = "".join(each.read_text() for each in tmp_path.rglob("*.jsonl"))
    assert "token_ids" not in text


def test_lost_messages_a_restart_and_a_clock_jump_are_repaired_and_counted(tmp_path):
    said = recorded(tmp_path, "--drop", "20", "--restart", "--jump", "3600")
    counts = said["counts"]
    assert counts["replayed_batches"] >= 1
    assert (counts["lost_batches"], counts["server_restarts"], counts["clock_jumps"]) == (0, 1, 1)
    assert len(said["lost"]) == 2
    assert_equal_to_sent(tmp_path / "events")


def test_messages_that_the_server_no_longer_has_are_counted_as_lost(tmp_path):
    counts = recorded(tmp_path, "--drop", "20", "--kept", "1")["counts"]
    assert counts["lost_batches"] > 0
    assert counts["batches"] + counts["lost_batches"] in (98, 99)  # the last one may be lost


def test_a_recorder_killed_and_started_again_repeats_and_misses_no_event(tmp_path):
    said = recorded(tmp_path, "--drop", "20", kill=True)
    assert said["counts"]["batches"] == said["counts"]["events_lines"] == len(lines_of(tmp_path))
    assert said["lost"] == ["the recorder was started 2 times"]
    assert_equal_to_sent(tmp_path / "events")


def test_a_recorder_on_a_full_disk_keeps_running_and_counts_unwritten_lines(tmp_path):
    said = recorded(tmp_path, most=6000)
    counts, rows = said["counts"], [json.loads(line) for line in lines_of(tmp_path)]
    assert 0 < len(rows) == counts["batches"] - counts["unwritten_lines"] < counts["batches"]
    assert "disk full" in " ".join(said["lost"])


STORED = {  # in the order of vLLM 0.23's arrays
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [*range(32)],
    "block_size": 16,
    "lora_id": 3,
    "medium": "GPU",
    "lora_name": "adapter",
    "extra_keys": [["adapter"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
}
REMOVED = {"block_hashes": [11], "medium": "CPU", "group_idx": 1}


def test_events_as_arrays_are_recorded_as_those_that_are_objects(tmp_path):
    import msgspec

    events = [("BlockStored", STORED), ("BlockRemoved", REMOVED), ("AllBlocksCleared", {})]
    objects = [{"type": name, **fields} for name, fields in events]
    arrays = [[name, *fields.values()] for name, fields in events]
    salted = [[*arrays[0][:7], {"cache_salt": "salt"}]]  # as SGLang's were
    recording = Recording(tmp_path)
    for number, each in enumerate((objects, arrays, salted)):
        payload = msgspec.msgpack.encode([1.0, each])
        recording.batch("server", number, payload, is_replayed=False)
    recording.batch("server", 3, msgspec.msgpack.encode([1.0, [7]]), is_replayed=False)
    recording.events.close()
    named, unnamed, with_salt = (json.loads(line)[1] for line in lines_of(tmp_path))
    assert named == unnamed
    stored, removed, cleared = named
    assert (stored["lora_name"], stored["group_idx"]) == (recording.hashed("adapter"), 1)
    assert stored["extra_keys"] == [recording.hashed("['adapter']"), None]
    assert "token_ids" not in stored
    assert (removed["medium"], removed["parent_block_hash"]) == ("CPU", None)
    assert cleared == {"type": "AllBlocksCleared"}
    assert with_salt[0]["cache_salt"] == recording.hashed("salt")
    assert with_salt[0]["medium"] == "GPU"
    assert recording.faults == {"bad_batches": 1}
    assert record.STORED == STORED_FIELDS  # the recorder runs without the rest of the package


class Server:
    """A server that answers replay requests with one batch of an event for each of `times` (s)."""

    def __init__(self, recording, times):
        import msgspec

        self.subscriber = record.Subscriber(recording, free_address(), "replay")
        self.subscriber.socket.close()
        event = {"type": "BlockStored", "block_hashes": [1], "block_size": 16}
        self.batches = [msgspec.msgpack.encode([each, [event]]) for each in times]
        self.subscriber._answers = lambda begin: [*enumerate(self.batches)][begin:]


def test_an_unseen_restart_of_a_server_is_found_by_the_time_of_its_batches(tmp_path):
    recording = Recording(tmp_path)
    old, new = Server(recording, [1.0, 2.0]), Server(recording, [8.0, 9.0, 9.5, 9.7])
    old.subscriber.catch_up(2)
    old.subscriber._answers = new.subscriber._answers
    old.subscriber.catch_up(4)  # two more than the old server had sent
    recording.events.close()
    assert [json.loads(line)[0] for line in lines_of(tmp_path)] == [1, 2, 8, 9, 9.5, 9.7]
    assert recording.faults == {"server_restarts": 1}


def test_a_clock_jump_while_messages_are_lost_is_counted_once(tmp_path):
    recording = Recording(tmp_path)
    server = Server(recording, [100.0, 3700.1, 3700.2])
    recording.batch("a", 0, server.batches[0], is_replayed=False)
    recording.batch("a", 1, server.batches[1], is_replayed=True)
    recording.batch("a", 2, server.batches[2], is_replayed=False)
    recording.events.close()
    assert recording.faults == {"clock_jumps": 1}
    assert [json.loads(x)[0] for x in lines_of(tmp_path)] == pytest.approx([100] * 3, abs=5)


def test_messages_without_a_number_are_counted_as_bad_batches(tmp_path):
    recording, replay = Recording(tmp_path), free_address()
    subscriber = Subscriber(recording, "inproc://unused", replay)
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
    lines = (tmp_path / "events/000001.jsonl").read_text().splitlines()
    recording.events.close()
    assert all(json.loads(line)[1] == [] for line in lines)
    assert 0 < len(lines) == 20 - recording.counts["unwritten_lines"]
    assert "disk full" in " ".join(recording.sentences())


def test_a_recorder_that_is_started_again_continues_its_hashes_and_files(tmp_path):
    first = Recording(tmp_path)
    first.save()
    first.events.write([1, [], 4, "a", 3601])
    first.events.close()
    with (tmp_path / "events/000001.jsonl").open("a") as file:
        file.write("[2, [")  # the machine stopped here
    second = Recording(tmp_path)
    second.events.write([2, [], 5, "a", 3602])
    second.events.close()
    assert first.hashed(b"x") == second.hashed(b"x")
    assert (second.next, second.sent, second.counts["starts"]) == ({"a": 5}, {"a": 3601}, 2)
    assert [json.loads(line)[0] for line in lines_of(tmp_path)] == [1, 2]


def test_a_hash_key_that_a_full_disk_cut_off_is_replaced(tmp_path):
    (tmp_path / "key").touch()
    assert Recording(tmp_path).hashed(b"x") != Recording(tmp_path / "other").hashed(b"x")
    assert (tmp_path / "key").stat().st_size == 32


# the second log shares blocks between sessions
@pytest.mark.parametrize("name", ["chat_completions", "vllm_kv_events"])
def test_an_anonymous_copy_has_the_same_requests_and_prefixes_and_no_text(tmp_path, name):
    source = Path(__file__).parents[1] / f"workload/fixtures/{name}.jsonl"
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

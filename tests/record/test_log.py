"""The recorder on SGLang's request log, and on pages of Prometheus.

The fixture was written by SGLang 0.5.23's own logger (tests/record/served.py): a request that was
received, and the first six of `requests()` that were finished.
"""

import json
import shutil
import signal
from pathlib import Path

import prometheus_client
import pytest

from hicache.cli.record import Recording, new_lines
from tests.record.test_record import assert_equal_to_sent, lines_of, recorder
from tests.record.traffic import requests

LINES = (
    (Path(__file__).parent / "fixtures/sglang_0_5_23_requests.log")
    .read_bytes()
    .splitlines(keepends=True)
)


def read(log, folder):
    recording = Recording(folder)
    for line in new_lines(log, recording):
        recording.logged(line)
    recording.requests.close()
    return recording


@pytest.fixture
def log(tmp_path):
    (tmp_path / "server").mkdir()
    return tmp_path / "server" / "requests.log"


def test_a_log_that_is_rotated_while_no_recorder_runs_gives_each_request_once(log, tmp_path):
    log.write_bytes(b"".join(LINES[:3]) + LINES[3][:100])
    read(log, tmp_path / "out")  # ends without a state, as after kill -9
    log.write_bytes(b"".join(LINES[:5]))
    shutil.move(log, f"{log}.2026-11-27_14")
    log.write_bytes(b"".join(LINES[5:]))
    recording = read(log, tmp_path / "out")
    assert recording.faults == {}
    assert recording.counts["requests_lines"] == 6
    assert_equal_to_sent(tmp_path / "out/requests", requests()[:6])
    text = "".join(lines_of(tmp_path / "out", "requests"))
    assert "secret" not in text
    assert "r5" not in text


def test_a_log_read_at_once_gives_the_requests_that_were_sent(log, tmp_path):
    log.write_bytes(b"".join(LINES))
    read(log, tmp_path / "out")
    assert_equal_to_sent(tmp_path / "out/requests/000001.jsonl", requests()[:6])


def test_requests_of_two_tenants_share_no_prefix(log, tmp_path):
    salted = LINES[-1].replace(b'"cache_salt": null', b'"cache_salt": "a tenant"')
    log.write_bytes(LINES[-1] + salted)
    read(log, tmp_path / "out")
    first, second = map(json.loads, lines_of(tmp_path / "out", "requests"))
    assert first["hash_ids"] == second["hash_ids"]
    assert "namespace" not in first
    assert len(second["namespace"]) == 16


def test_lines_tokens_and_logs_that_cannot_be_read_are_counted(log, tmp_path):
    tokens = json.loads(LINES[-1][LINES[-1].index(b"{") :])["obj"]["input_ids"]
    cut = [*tokens[:40], "...", *tokens[41:]]  # --log-requests-level 2
    with_cut = LINES[-1].replace(json.dumps(tokens).encode(), json.dumps(cut).encode())
    without = LINES[-1].replace(json.dumps(tokens).encode(), b"null")
    broken = LINES[-1].replace(b"prompt_tokens", b"other_tokens")
    log.write_bytes(b"INFO:     Started server\n" + with_cut + without + broken)
    recording = read(log, tmp_path / "out")
    assert recording.faults == {"bad_log_lines": 1, "requests_without_tokens": 2}
    assert recording.counts["requests_lines"] == 2
    log.unlink()
    log.with_name("other").write_bytes(b"")
    shutil.copy(log.with_name("other"), log)
    recording.log_place[0] = 1  # a file that is no longer there
    assert list(new_lines(log, recording)) == []
    assert recording.counts["lost_logs"] == 1


def test_counters_of_prometheus_are_summed_over_labels_and_restarts(tmp_path):
    recording, registry = Recording(tmp_path), prometheus_client.CollectorRegistry()

    def scrape():
        recording.scraped(prometheus_client.generate_latest(registry).decode())

    def server():
        labels = {"labelnames": ["model"], "registry": registry}
        tokens = prometheus_client.Counter("sglang:prompt_tokens_total", "Sent", **labels)
        times = prometheus_client.Histogram("sglang:e2e_request_latency_seconds", "Time", **labels)
        slots = prometheus_client.Gauge("sglang:lora_pool_slots_total", "A gauge", **labels)
        slots.labels("x").set(9)
        return tokens, times

    tokens, times = server()
    tokens.labels('a "model" {of} ours').inc(100)
    scrape()
    tokens.labels('a "model" {of} ours').inc(20)
    tokens.labels("another").inc(3)
    times.labels("another").observe(0.5)
    scrape()
    assert recording.counted == {"sglang:prompt_tokens_total": 23}
    registry = prometheus_client.CollectorRegistry()
    tokens, times = server()
    tokens.labels("another").inc(4)
    times.labels("another").observe(0.5)
    scrape()
    assert recording.counted == {
        "sglang:prompt_tokens_total": 27,
        "sglang:e2e_request_latency_seconds_count": 0,
        "sglang:e2e_request_latency_seconds_sum": 0,
    }


def test_a_recording_says_which_requests_the_server_counted_and_the_log_lacks(log, tmp_path):
    registry, out = prometheus_client.CollectorRegistry(), tmp_path / "out"
    served = prometheus_client.Counter("sglang:num_requests_total", "Requests", registry=registry)
    log.touch()
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        recording = recorder(out, "--log", str(log), "--metrics", address, "--every", "0.1")
        while not (out / "counters.jsonl").exists():
            assert recording.poll() is None
        served.inc(7)
        log.write_bytes(b"".join(LINES))
        recording.send_signal(signal.SIGTERM)
        assert recording.wait() == 0
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    said = json.loads((out / "recording.json").read_text())
    assert said["counted"] == {"sglang:num_requests_total": 7}
    assert said["lost"] == ["the server counted 7 requests, and the recording has 6"]
    last = json.loads((out / "counters.jsonl").read_text().splitlines()[-1])
    assert last["sglang:num_requests_total"] == 7

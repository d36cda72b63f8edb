"""Publishes the KV events of known requests, by an engine's own publisher or by a light one.

python -m tests.record.traffic ENGINE EVENTS REPLAY [--drop N] [--restart] [--jump SECONDS]

`ENGINE` is light, vllm or sglang; the latter two run in an environment of `experiments.diff`.
"""

import argparse
import random
import sys
import time
from collections import deque
from functools import partial

BLOCK = 16
START_S = 1_700_000_000.0
GAP_S = 0.02  # between events: a block of an answer comes slower than one of a prompt


def requests():
    """Return the tokens of the prompt and of the answer of each request."""
    rng = random.Random(3)
    shared = [rng.randrange(50_000) for _ in range(4 * BLOCK)]
    found = []
    for place in range(40):
        head = shared if place % 2 else []
        prompt = [*head, *(rng.randrange(50_000) for _ in range(BLOCK * rng.randrange(2, 9)))]
        answer = [rng.randrange(50_000) for _ in range(BLOCK * rng.randrange(1, 3))]
        found.append((prompt, answer))
    return found


def stores():
    """Yield the fields of each stored event: the new blocks of a prompt, then its answer."""
    held = set()
    for prompt, answer in requests():
        tokens, parent, new = [*prompt, *answer], None, []
        for begin in range(0, len(tokens), BLOCK):
            name = hash((parent, tuple(tokens[begin : begin + BLOCK])))
            if begin >= len(prompt):  # one block of an answer at a time
                if new:
                    yield event(new)
                yield event([(parent, name, begin, tokens)])
                new = []
            elif name not in held:
                new.append((parent, name, begin, tokens))
            held.add(name)
            parent = name


def event(new):
    _, _, begin, tokens = new[0]
    names = [name for _, name, _, _ in new]
    return {
        "block_hashes": names,
        "parent_block_hash": new[0][0],
        "token_ids": tokens[begin : begin + BLOCK * len(names)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
    }


class Light:
    """A publisher with the wire format of both engines: topic, number in 8 bytes, and msgpack."""

    def __init__(self, events, replay, buffer_steps):
        import zmq

        self.pub = self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.pub.bind(events)
        self.router = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.bind(replay)
        self.sent, self.number = deque(maxlen=buffer_steps), 0

    def publish(self, at_s, fields):
        import msgspec

        payload = msgspec.msgpack.encode([at_s, [{"type": "BlockStored", **fields}], 0])
        self.pub.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.sent.append((self.number, payload))
        self.number += 1

    def serve(self, seconds):
        while self.router.poll(1000 * seconds):
            name, _, begin = self.router.recv_multipart()
            for number, payload in self.sent:
                if number >= int.from_bytes(begin, "big"):
                    self.router.send_multipart([name, b"", b"", number.to_bytes(8, "big"), payload])
            end = (-1).to_bytes(8, "big", signed=True)
            self.router.send_multipart([name, b"", b"", end, b""])

    def close(self):
        self.socket.close(linger=500)
        self.router.close(linger=500)


class Engine:
    """A publisher that is vLLM's or SGLang's own."""

    def __init__(self, engine, events, replay, buffer_steps):
        if engine == "vllm":
            from vllm.distributed import kv_events
        else:
            from experiments.diff.sglang import device  # noqa: F401 - before the package

            from sglang.srt.disaggregation import kv_events  # isort: skip
        self.kinds = kv_events
        self.publisher = kv_events.ZmqEventPublisher(
            0, endpoint=events.replace("127.0.0.1", "*"), replay_endpoint=replay,
            buffer_steps=buffer_steps,
        )  # fmt: skip
        self.engine = engine

    @property
    def pub(self):
        return self.publisher._pub

    @pub.setter
    def pub(self, socket):
        self.publisher._pub = socket

    def publish(self, at_s, fields):
        more = {"lora_name": None} if self.engine == "vllm" else {}
        event = self.kinds.BlockStored(**fields, **more)
        self.publisher.publish(self.kinds.KVEventBatch(ts=at_s, events=[event]))

    def serve(self, seconds):
        time.sleep(seconds)

    def close(self):
        self.publisher.shutdown()


class Dropping:
    """A socket that loses one of `every` messages."""

    def __init__(self, socket, every):
        self.socket, self.every, self.count = socket, every, 0

    def send_multipart(self, frames):
        self.count += 1
        if self.count % self.every:
            self.socket.send_multipart(frames)

    def close(self, **options):
        self.socket.close(**options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("events")
    parser.add_argument("replay")
    parser.add_argument("--drop", type=int)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--jump", type=float, default=0.0)
    parser.add_argument("--kept", type=int, default=10_000)
    options = parser.parse_args()

    def begin():
        kind = Light if options.engine == "light" else partial(Engine, options.engine)
        made = kind(options.events, options.replay, options.kept)
        made.serve(1.5)  # the recorder connects
        if options.drop:
            made.pub = Dropping(made.pub, options.drop)
        return made

    publisher, every = begin(), list(stores())
    for place, fields in enumerate(every):
        if place == len(every) // 2:
            publisher.serve(0.5)
            if options.restart:
                publisher.close()
                time.sleep(1)  # until the sockets are closed
                publisher = begin()
        late_s = options.jump if place >= len(every) // 2 else 0.0
        publisher.publish(START_S + GAP_S * place + late_s, fields)
        publisher.serve(GAP_S)
    publisher.serve(2)
    publisher.close()
    print(len(every))


if __name__ == "__main__":
    sys.exit(main())

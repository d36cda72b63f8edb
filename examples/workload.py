"""Replays two prompts that share their first 1,024 tokens. python examples/workload.py"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hicache.experiment import run
from hicache.runs.schema import config_of

# a block of 512 tokens has an id; equal ids are equal tokens after an equal beginning
ROWS = [
    {"timestamp": 0, "input_length": 2048, "output_length": 20, "hash_ids": [1, 2, 3, 4]},
    {"timestamp": 9000, "input_length": 2048, "output_length": 20, "hash_ids": [1, 2, 5, 6]},
]
with TemporaryDirectory() as folder:
    trace = Path(folder, "trace.jsonl")
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    result = run(config_of(f"workload.path={trace}", "model=llama3_8b"))
for record in result.records:
    print(f"request {record.id}: {record.device_hit_len} hits, {record.computed_len} computed")

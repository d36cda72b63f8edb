"""Replay one configuration in its own process, and print its cost and its metrics as JSON.

The program is started by its file name. `PYTHONPATH` decides which checkout of hicache it runs. It
prints "ready" before it replays, and waits for the end of its input.
"""

import json
import resource
import sys

from hydra import compose, initialize_config_dir

from hicache import experiment
from hicache.results.metrics import summarize
from hicache.runs import schema


def main(root: str, num_replays: str, *overrides: str) -> None:
    schema.register()
    with initialize_config_dir(f"{root}/conf", version_base="1.3"):
        config = schema.to_config(compose("config", list(overrides)))
    print("ready", flush=True)
    sys.stdin.read()  # until the other run of the pair is ready too
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(int(num_replays)):
        result = experiment.run(config)
    after = resource.getrusage(resource.RUSAGE_SELF)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told = {
        "processor_s": processor_s / int(num_replays),
        "peak_mb": after.ru_maxrss / 1024,
        "summary": summarize(result.records, result.measures),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))

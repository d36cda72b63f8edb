"""One run in a process of its own: what it cost and what came of it, as JSON.

Runs by its path, in whichever checkout is first on the module path, also in older ones.
"""

import json
import resource
import sys
from contextlib import suppress
from importlib import import_module

from hydra import compose, initialize_config_dir


def main(root: str, *overrides: str) -> None:
    """Run the configuration of a checkout's `conf/` with these overrides."""
    try:
        schema = import_module("hicache.cli.schema")
        metrics = import_module("hicache.results.metrics")
    except ModuleNotFoundError:  # before these rooms were made
        schema = import_module("experiments.schema")
        metrics = import_module("hicache.metrics")
    experiment = import_module("hicache.experiment")
    schema.register()
    with initialize_config_dir(f"{root}/conf", version_base="1.3"):
        config = schema.to_config(compose("config", list(overrides)))
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = experiment.run(config)
    after = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mb": after.ru_maxrss / 1024,
        "summary": metrics.summarize(result.records, result.measures),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        with suppress(ModuleNotFoundError):  # as above
            sys.exit(import_module("hicache.cli.job").explain(error))
        raise

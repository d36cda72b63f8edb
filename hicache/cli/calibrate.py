"""Estimate a server's constant latency, `scheduler.server_s`, from its log.

hicache calibrate measured.jsonl model=llama3_8b hardware=h100 parallel.tp=1

The log has the format of `hicache validate`; the settings name the model and the machine. For each
request without hits, the program subtracts the simulated prefill time from the measured TTFT. It
prints the tenth percentile, since requests that waited in the queue have larger differences.
"""

from collections.abc import Sequence
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.clock import SECOND_NS
from hicache.engine.deployment import deploy
from hicache.results.metrics import percentile
from hicache.results.server_log import HIT_COLUMNS, read_measured
from hicache.runs.schema import config_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache calibrate", __doc__)
    parser.add_argument("measured", type=Path, help="log of the server")
    parser.add_argument("overrides", nargs="*", help="settings: model, machine, chunk size")
    options = parser.parse_intermixed_args(arguments)
    with in_one_sentence():
        config = config_of(*options.overrides)
        cost, chunk = deploy(config).cost, config.scheduler.chunk_tokens
        log = read_measured(options.measured)
        cold = log[log[HIT_COLUMNS].sum(axis=1, skipna=False) == 0]
        if cold.empty:
            raise ValueError(
                f"{options.measured} has no request that is known to have hit nothing: give "
                "device_hit, host_hit or storage_hit, 0 if there were none"
            )
        ttft_s = (cold["first_token_ns"] - cold["arrival_ns"]) / SECOND_NS
        left_s = [
            measured - cost.prefill_s(0, length, chunk_tokens=chunk)
            for measured, length in zip(ttft_s, cold["prompt_len"].tolist(), strict=True)
        ]
        constant = percentile(left_s, 10)
    print(
        f"scheduler.server_s={max(0.0, constant):.4g}  # from {len(cold):,} requests without hits; "
        f"{config.model.name} on {config.tp} x {config.hardware.name}"
    )
    if constant < 0:
        print(f"# the simulation is slower than the server by {-constant:.4g} s and more")

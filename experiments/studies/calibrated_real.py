"""Shows how well a calibrated simulation predicts the real executor on a CPU at twice the load.

python -m experiments.studies.calibrated_real

In each repetition, the reference model serves 40 prompts at a light load. `hicache calibrate`'s fit
gets these requests, and a machine whose rates are guesses. Then other prompts come twice as often,
for real and simulated. Each real run is made twice, which shows how much the machine itself varies.
Its clock is the processor time of the process, since nothing is copied and other programs may run.
"""

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

from hicache import experiment
from hicache.cli.command import in_one_sentence, parser_of
from hicache.config import ExperimentConfig
from hicache.executor.real import io
from hicache.results.calibration import fitted, with_constants
from hicache.results.requests_file import columns_of
from hicache.runs.schema import config_of

REPETITIONS = 3
REQUESTS, GAP_MS, BLOCK = 40, 800, 16
FIT = ("scheduler.begin_s", "hardware.prefill_factor")
CURVES = ("gemm_bf16", "attention_d64", "attention_d128", "attention_window", "decode_bandwidth")
NUMBERS = ("delta_rate", "mamba_rate", "conv_rate", "weight_bandwidth", "state_bandwidth",
           "short_bandwidth")  # fmt: skip
SERVER = (
    *("model=tiny_hybrid", "hardware=h100", "storage=none", "cache.host_gib=0"),
    *("cache.page_size=16", "cache.device.tokens.full=32768", "cache.device.tokens.swa=32768"),
    *("cache.device.states=400", "scheduler.chunk_tokens=1024", "workload=trace"),
    *(f"workload.block_tokens={BLOCK}", "workload.arrivals=open", "workload.token_stride=1"),
)


def main() -> None:
    parser_of("python -m experiments.studies.calibrated_real", __doc__).parse_args()
    torch.set_num_threads(1)
    io.time = SimpleNamespace(monotonic_ns=time.process_time_ns, sleep=time.sleep)  # type: ignore
    with in_one_sentence(), TemporaryDirectory() as folder:
        print(pd.DataFrame([repeat(Path(folder), each) for each in range(REPETITIONS)]).to_string())


def repeat(folder: Path, seed: int) -> dict[str, float]:
    light, twice = (
        [*SERVER, f"hardware.table={guessed_rates(folder)}", f"workload.path={path}"]
        for path in (trace(folder, seed, GAP_MS), trace(folder, 10 + seed, GAP_MS / 2))
    )
    log = run(config_of(*light, "executor=torch", *light))
    constants = fitted(config_of(*light), log, FIT).values
    real = [run(config_of(*twice, "executor=torch", *twice)) for _ in range(2)]
    simulated = run(with_constants(config_of(*twice), constants))
    medians = [ttft_s(each) for each in real]
    return {
        "light_s": ttft_s(log),
        "real_s": medians[0],
        "again_s": medians[1],
        "simulated_s": ttft_s(simulated),
        "error_%": 100 * (ttft_s(simulated) / medians[0] - 1),
        "error_again_%": 100 * (ttft_s(simulated) / medians[1] - 1),
        **constants,
    }


def run(config: ExperimentConfig) -> pd.DataFrame:
    return pd.DataFrame(columns_of(experiment.run(config).records))


def ttft_s(frame: pd.DataFrame) -> float:
    return float((frame["first_token_ns"] - frame["arrival_ns"]).median()) * 1e-9


def guessed_rates(folder: Path) -> Path:
    rows = [f"{name},1024,10e9,a guess" for name in CURVES]
    rows += [f"{name},,10e9,a guess" for name in NUMBERS]
    path = folder / "cpu.csv"
    path.write_text("\n".join(["curve,size,rate,source", *rows]) + "\n")
    return path


def trace(folder: Path, seed: int, gap_ms: float) -> Path:
    """Write a trace of prompts of 64 to 960 tokens, of which later ones may repeat a beginning."""
    random = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    lines, at_ms, number = [], 0.0, 0
    for each in range(REQUESTS):
        at_ms += random.exponential(gap_ms)
        length = int(random.integers(4, 48))
        prompt = [*range(number, number + length)]
        number += length
        if each % 2 and each > 20:
            prompt = [*prompts[each - int(random.integers(1, 20))][:40], *prompt[: 2 + each % 9]]
        prompt = prompt[:60]
        prompts.append(prompt)
        lines.append({"timestamp": int(at_ms), "input_length": len(prompt) * BLOCK,
                      "output_length": 1, "hash_ids": prompt})  # fmt: skip
    path = folder / f"{seed}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


if __name__ == "__main__":
    main()

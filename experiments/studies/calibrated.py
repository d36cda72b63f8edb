"""Shows that `hicache calibrate` finds the constants of a server whose constants are known.

python -m experiments.studies.calibrated --draws 100

The server is this simulator with hidden constants, which differ in each draw. Each measured time
gets noise of 1 %. Its log has 200 requests of different lengths at a light load, of which half
repeat the beginning of an earlier one. The study prints for each constant the share of draws that
find it within 5 %, and whether logs are refused that lack what a constant needs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
from joblib import Parallel, delayed

from hicache import experiment
from hicache.cli.command import in_one_sentence, parser_of
from hicache.results.calibration import CONSTANTS, fitted, with_constants
from hicache.results.requests_file import columns_of
from hicache.runs.schema import config_of

NOISE = 0.01
BLOCK = 128
SERVER = (
    *("model=llama3_8b", "hardware=h100", "parallel.tp=1", "storage=none", "compat=vllm_0_33"),
    *("cache.device.tokens.full=40960", "cache.host.tokens.full=2000000"),
    *("workload=trace", f"workload.block_tokens={BLOCK}", "workload.arrivals=open"),
)
# what each log lacks: requests that overlap, hits on the host, different lengths
LACKING = ("pairs", "hits", "lengths")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.studies.calibrated", __doc__)
    parser.add_argument("--draws", type=int, default=100, help="number of servers")
    parser.add_argument("--jobs", type=int, default=1, help="number of draws at a time")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        ratios = Parallel(options.jobs)(delayed(draw)(seed) for seed in range(options.draws))
        print(table(ratios).to_string())
        for lacks in LACKING:
            try:
                draw(0, lacks=lacks)
                print(f"without {lacks}: not refused")
            except ValueError as error:
                print(f"without {lacks}: {error}")


def draw(seed: int, *, lacks: str = "") -> dict[str, float]:
    """Return, for each constant of a drawn server, what is fitted over what is true."""
    random = np.random.default_rng(seed)
    true = dict(zip(CONSTANTS, (
        random.uniform(0.02, 0.06), random.uniform(0.02, 0.06),
        random.uniform(0.7, 2.0), random.uniform(0.5, 1.2),
    ), strict=True))  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        path.write_text("".join(json.dumps(each) + "\n" for each in rows(random, lacks)))
        config = config_of(*SERVER, f"workload.path={path}", f"seed={seed}")
        found = experiment.run(with_constants(config, true))
    log = noisy(pd.DataFrame(columns_of(found.records)), random)
    values = fitted(config, log, CONSTANTS).values
    return {name: values[name] / true[name] for name in CONSTANTS}


def rows(random: np.random.Generator, lacks: str) -> list[Mapping[str, object]]:
    """Return 200 rows of a trace, every second of which begins as an earlier one does."""
    made: list[Mapping[str, object]] = []
    prompts: list[list[int]] = []
    at_ms, number = 0.0, 0
    for each in range(200):
        at_ms += 3000 if lacks == "pairs" else random.exponential(300)
        length = 16 if lacks == "lengths" else int(random.integers(2, 60))
        prompt = [*range(number, number + length)]
        number += length
        if each % 2 and lacks != "hits":
            new = prompt if lacks == "lengths" else prompt[: 2 + each % 9]
            prompt = [*prompts[each // 2 * 2 - 20 if each > 40 else 0], *new]
        prompts.append(prompt)
        made.append({"timestamp": int(at_ms), "input_length": len(prompt) * BLOCK,
                     "output_length": 1, "hash_ids": prompt})  # fmt: skip
    return made


def noisy(log: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
    """Return the log with noise on the time to each first token."""
    log = log[log["status"] == "finished"].sort_values("arrival_ns").reset_index(drop=True)
    factor = random.normal(1, NOISE, len(log))
    first_ns = log["arrival_ns"] + (log["first_token_ns"] - log["arrival_ns"]) * factor
    later_ns = first_ns.astype("int64") - log["first_token_ns"]
    return log.assign(
        first_token_ns=log["first_token_ns"] + later_ns, finish_ns=log["finish_ns"] + later_ns
    )


def table(ratios: Sequence[Mapping[str, float]]) -> pd.DataFrame:
    """Return, by constant, the share of draws within 5 % and the largest errors, in percent."""
    off = 100 * (pd.DataFrame(ratios) - 1).abs()
    within = 100 * (off <= 5).mean()
    return pd.DataFrame({"within 5 %, % of draws": within, "median error, %": off.median(),
                         "95th percentile, %": off.quantile(0.95)})  # fmt: skip


if __name__ == "__main__":
    main()

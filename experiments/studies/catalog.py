"""Compare the KV cache bytes of a sequence, by model, with the catalog of `kvcache-simulator`.

    python -m venv VENV && VENV/bin/pip install kvcache-simulator==0.1.3
    python -m experiments.studies.catalog VENV/bin/python

Our bytes follow from the config.json of each model in `model_configs.json`, which also names the
source. The bytes of the catalog come from the package, which runs in its own environment. KV and
index keys are bf16. Recurrent states have the precision of the config.json. Draft models are left
out.
"""

import argparse
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from hicache.cli.console import console
from hicache.models.hugging_face import derive_model
from hicache.models.shapes import ModelConfig

CONFIGS = Path(__file__).with_name("model_configs.json")
LENGTHS = (128, 1024, 131_072)
PLAIN = {"kv_dtype_bytes": 2, "dense_param_bytes": 2.0, "expert_param_bytes": 2.0}
# the state of a compressor, which the model keeps and the catalog does not count
LEFT_OUT = ("compressor",)
# for the package's own interpreter: {model: {precision of states: a list by length of bytes with
# states and without}}; null for a formula that its calculator does not have
ASK = """
import json, sys
from kvcache_sim.calculator import calculate_cache_size, load_models_data
data, found = load_models_data(), {}
for model in data["models"]:
    try:
        found[model["id"]] = {states: [[calculate_cache_size(
            model, tokens=tokens, precision="bf16_fp16", indexer_precision="bf16_fp16",
            recurrent_state_precision=states, include_linear_attention_state=has_states,
            models_data=data).total_bytes for has_states in (True, False)]
            for tokens in json.loads(sys.argv[1])] for states in ("fp32", "bf16_fp16")}
    except ValueError:
        found[model["id"]] = None
print(json.dumps(found))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="the interpreter that has kvcache-simulator 0.1.3")
    args = parser.parse_args()
    asked = subprocess.run(
        [args.python, "-c", ASK, json.dumps(LENGTHS)], capture_output=True, text=True, check=True
    )
    catalog = {name: each for name, each in json.loads(asked.stdout).items() if each}
    entries = json.loads(CONFIGS.read_text(encoding="utf-8"))
    table = Table("model", *(f"{length:,}" for length in LENGTHS), "without states", "equal")
    num_equal = num_compared = 0
    for name, theirs in catalog.items():
        if name not in entries:
            table.add_row(name, *[""] * (len(LENGTHS) + 1), "no config.json at hand")
            continue
        model = model_of(name, entries[name])
        states = "fp32" if model.state_dtype_bytes == 4 else "bf16_fp16"
        ours = totals(model)
        is_equal = ours == [tuple(pair) for pair in theirs[states]]
        num_compared, num_equal = num_compared + 1, num_equal + is_equal
        shown = [f"{with_states:,.0f}" for with_states, _ in ours]
        verdict = "yes" if is_equal else f"no: {theirs[states]}"
        table.add_row(name, *shown, f"{ours[-1][1]:,.0f}", verdict)
    console().print(table)
    console().print(
        f"{num_equal} of {num_compared} compared are equal; the catalog has {len(catalog)}"
    )
    return int(num_equal < num_compared)


def model_of(name: str, entry: Mapping[str, Any]) -> ModelConfig:
    return derive_model(entry["config"], {"name": name, "source": entry["source"], **PLAIN})


def totals(model: ModelConfig) -> list[tuple[float, float]]:
    found = []
    for length in LENGTHS:
        held = model.bytes_of(length)
        total = sum(size for part, size in held.items() if part not in LEFT_OUT)
        found.append((total, total - held.get("mamba", 0)))
    return found


if __name__ == "__main__":
    raise SystemExit(main())

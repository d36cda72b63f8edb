"""What public models say of themselves in their `config.json`, cut to what decides shapes.

Read in the package aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0), which keeps those texts. What
says no more than its absence (weights in bfloat16, untied embeddings) stands in one text or two.
"""

import json
from pathlib import Path
from typing import Any

TEXTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("config_texts.json").read_text()
)
LLAMA_8B = TEXTS["meta-llama/Meta-Llama-3.1-8B"]

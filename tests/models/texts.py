"""The `config.json` of public models, cut to the fields that decide their shapes.

Read in the package aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0), which keeps those texts. Fields
that state the default (weights in bfloat16, untied embeddings) stand in one or two texts only.
"""

import json
from pathlib import Path
from typing import Any

TEXTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("config_texts.json").read_text()
)
LLAMA_8B = TEXTS["meta-llama/Meta-Llama-3.1-8B"]

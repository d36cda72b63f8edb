"""Differences between releases in how vLLM's scheduler is built and how it reports copies.

| since | change |
|---|---|
| 0.22 | the connector's copies are numbered jobs; earlier releases are not supported |
| 0.25 | a job names its source and its target; before, one pair holds both |
| 0.28 | the CPU platform no longer switches hybrid models off |
| 0.30 | a KV tensor says where its layers lie; before, which layers share it |
"""

from inspect import signature
from typing import Any


def known(made: Any, **values: object) -> Any:
    """Call `made` with those of the `values` whose names are among its parameters."""
    names = signature(made).parameters
    return made(**{name: value for name, value in values.items() if name in names})


def on_device(job: Any, *, is_store: bool) -> Any:
    source, target = (job.src_spec, job.dst_spec) if hasattr(job, "src_spec") else job.transfer_spec
    return source if is_store else target

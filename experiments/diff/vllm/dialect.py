"""What differs from release to release in how vLLM's scheduler is made and heard.

| since | what changed |
|---|---|
| 0.22 | the connector's copies are jobs with numbers; earlier releases are not driven |
| 0.25 | a job names its source and its target; before, one pair holds both |
| 0.28 | the CPU's platform no longer switches hybrid models off by itself |
| 0.30 | a KV tensor says where its layers lie; before, which layers share it |
"""

from inspect import signature
from typing import Any


def known(made: Any, **values: object) -> Any:
    """An object of a class, of those values that this release knows."""
    names = signature(made).parameters
    return made(**{name: value for name, value in values.items() if name in names})


def on_device(job: Any, *, is_store: bool) -> Any:
    """The device's end of a copy: its blocks, by group."""
    source, target = (job.src_spec, job.dst_spec) if hasattr(job, "src_spec") else job.transfer_spec
    return source if is_store else target

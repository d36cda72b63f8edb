"""Configs as the command line composes them, and workloads made by hand."""

from collections.abc import Sequence

from hicache import experiment
from hicache.request import Request
from hicache.results.metrics import Result, summarize
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload
from tests.scheduler.world import request_of


def strangers(
    arrivals_ns: Sequence[int], prompt_lens: Sequence[int], output_lens: Sequence[int]
) -> Workload:
    """A workload of requests without common prefixes, by arrival and lengths in tokens."""
    requests = []
    token = 0
    for arrival, prompt_len, output_len in zip(arrivals_ns, prompt_lens, output_lens, strict=True):
        prompt = range(token, token + int(prompt_len))
        output = range(prompt.stop, prompt.stop + int(output_len))
        requests.append(request_of(len(requests), prompt, output, int(arrival)))
        token = output.stop
    return workload(requests)


def workload(requests: Sequence[Request]) -> Workload:
    """Requests in order of arrival as a workload."""
    return Workload(name="by hand", requests=requests)


def run(made: Workload, *overrides: str) -> Result:
    """The result of a workload made by hand under a composed config."""
    return experiment.run(config_of(*overrides), workload=made)


def summary(made: Workload, *overrides: str) -> dict[str, float | int]:
    """The summary of a run of this workload under a composed config."""
    result = run(made, *overrides)
    return summarize(result.records, result.measures)

"""Configs as the command line composes them, and workloads made by hand."""

from collections.abc import Sequence

import numpy as np

from experiments.launch.schema import config_of
from hicache import experiment
from hicache.request import Request, TokenSpans
from hicache.results.metrics import Result, summarize
from hicache.workload.build import Workload


def span(start: int, count: int) -> TokenSpans:
    """`count` consecutive token ids."""
    return TokenSpans(np.array([start], np.int32), np.array([count], np.int32))


def join(*parts: TokenSpans) -> TokenSpans:
    """One sequence after another."""
    return TokenSpans(
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.counts for part in parts]),
    )


def strangers(
    arrivals_ns: Sequence[int], prompt_lens: Sequence[int], output_lens: Sequence[int]
) -> Workload:
    """Requests that share nothing with one another."""
    requests = []
    token = 0
    for number, (arrival, prompt_len, output_len) in enumerate(
        zip(arrivals_ns, prompt_lens, output_lens, strict=True)
    ):
        requests.append(
            Request(
                id=number,
                session_id=number,
                arrival_ns=int(arrival),
                prompt=span(token, int(prompt_len)),
                output=span(token + int(prompt_len), int(output_len)),
            )
        )
        token += int(prompt_len) + int(output_len)
    return workload(requests)


def workload(requests: Sequence[Request]) -> Workload:
    """Requests in order of arrival as a workload."""
    return Workload(name="by hand", requests=requests)


def run(made: Workload, *overrides: str) -> Result:
    """The result of a workload made by hand under a composed config."""
    return experiment.run(config_of(*overrides), workload=made)


def summary(made: Workload, *overrides: str) -> dict[str, float | int]:
    """The summary of such a run."""
    result = run(made, *overrides)
    return summarize(result.records, result.measures)

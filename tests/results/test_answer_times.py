"""Inter-token latencies, end-to-end latencies and rates of a run."""

from math import fsum

import numpy as np
import pytest

from hicache import experiment
from hicache.clock import SECOND_NS
from hicache.results.metrics import Result, summarize
from hicache.results.recorder import Gaps
from hicache.results.requests_file import columns_of
from hicache.runs.schema import config_of

# a batch that grows and shrinks, with retractions for lack of pages
SMALL = (
    *("workload=shared_prefix", "workload.groups=2", "workload.prefix_tokens=64"),
    *("workload.answer_tokens=300", "workload.stage_rates=[40]", "workload.stage_s=1"),
    *("storage=none", "model=llama3_8b", "cache.device.tokens.full=8192"),
    "scheduler.new_token_ratio=0",
)


def run(*overrides: str) -> tuple[Result, dict[str, float]]:
    result = experiment.run(config_of(*SMALL, *overrides))
    return result, summarize(result.records, result.measures)


@pytest.mark.parametrize("batching", ["prefill_first", "mixed"])
def test_inter_token_latencies_add_up_to_the_decode_time_of_all_answers(batching: str) -> None:
    result, summary = run(f"scheduler.batching={batching}")
    assert summary["scheduler/retracted_count"] > 1
    decoded_ns = sum((each.finish_ns or 0) - (each.first_token_ns or 0) for each in result.records)
    num_gaps = sum(each.output_len - 1 for each in result.records)
    assert summary["request/itl_s_mean"] == pytest.approx(decoded_ns / num_gaps / SECOND_NS)


def test_inter_token_latencies_are_equal_if_steps_are_planned_one_by_one() -> None:
    keys = [f"request/itl_s_{name}" for name in ("mean", "p50", "p95", "p99")]
    jumps, steps = (run(f"engine.jump={jump}")[1] for jump in ("true", "false"))
    assert [jumps[key] for key in keys] == [steps[key] for key in keys]
    assert jumps["request/itl_s_p50"] < jumps["request/itl_s_p99"]  # prefills interrupt decodes


def test_gaps_of_one_to_a_hundred_seconds_have_their_ranks_as_percentiles() -> None:
    gaps = Gaps.of(np.arange(100, 0, -1) * SECOND_NS, np.ones(100, np.int64))
    found = {key.rpartition("_")[2]: value for key, value in gaps.seconds().items()}
    assert found == {"mean": 50.5, "p50": 50, "p95": 95, "p99": 99}


@pytest.mark.parametrize("compat", ["sglang_0_5_23", "vllm_0_33"])
def test_an_engine_that_plans_ahead_has_one_gap_for_each_token_after_the_first(compat: str) -> None:
    result, summary = run(f"compat={compat}")
    answers_s = fsum((each.tpot_ns or 0) * (each.output_len - 1) for each in result.records)
    mean_s = answers_s / sum(each.output_len - 1 for each in result.records) / SECOND_NS
    # it learns of the last token a step later
    assert mean_s * 0.9 < summary["request/itl_s_mean"] <= mean_s


def test_rates_divide_by_the_time_from_first_arrival_to_last_token() -> None:
    result, summary = run()
    records = result.records
    span_s = max(r.finish_ns or 0 for r in records) - min(r.arrival_ns for r in records)
    span_s /= SECOND_NS
    assert summary["throughput/requests_per_s"] == pytest.approx(len(records) / span_s)
    outputs = sum(each.output_len for each in records)
    prompts = sum(each.prompt_len for each in records)
    assert summary["throughput/output_tokens_per_s"] == pytest.approx(outputs / span_s)
    assert summary["throughput/total_tokens_per_s"] == pytest.approx((outputs + prompts) / span_s)


def test_the_table_of_requests_has_times_in_seconds() -> None:
    result, summary = run()
    columns = columns_of(result.records)
    assert np.mean(columns["e2e_s"]) == pytest.approx(summary["request/e2e_s_mean"])
    assert np.mean(columns["ttft_s"]) == pytest.approx(summary["request/ttft_s_mean"])
    times_per_token = [each for each in columns["tpot_s"] if each is not None]
    assert np.mean(times_per_token) == pytest.approx(summary["request/tpot_s_mean"])
    assert len(times_per_token) == sum(each.output_len > 1 for each in result.records)

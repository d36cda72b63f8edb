"""The summary of a finished run on the terminal: the origin of every token, and the latencies."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Column, Table
from rich.text import Text

from hicache.cache.prefix_cache import HIT_TIERS
from hicache.cache.tiers.transfer import FATES
from hicache.cli.console import console, machines_of, show_table
from hicache.observe.reasons import REASONS
from hicache.results import jobs, pipeline, speculation
from hicache.results.metrics import HANDOVER_PARTS, QUEUE_CAUSES, TTFT_PARTS
from hicache.results.verdict import CLEAN, in_short, loads, objections, stage_lines
from hicache.runs.job import Outcome
from hicache.runs.stored import read_json, read_summary

BAR_WIDTH = 28
TIERS = (*(f"{tier} hit" for tier in HIT_TIERS), "computed")
# shown after the above, if there are any
OTHERS = (
    ("recomputed after retraction", "cache/recomputed_tokens"),
    ("rejected", "cache/rejected_tokens"),
    ("aborted", "cache/aborted_tokens"),
)
OUTCOMES = {"drafts": speculation.outcome, "pipeline": pipeline.outcome, "jobs": jobs.outcome}
COLUMNS = ("mean", "p50", "p95", "p99")
TIMES = ("TTFT", "  queue", "  storage wait", "  load-back", "  prefill", "  transfer", "  restore")


def show_run(outcome: Outcome) -> None:
    summary, terminal = outcome.summary, console()
    terminal.print(_title(outcome))
    for note in outcome.notes:
        terminal.print(f"  {note}", soft_wrap=True, style="dim")
    show_table(terminal, _tokens(summary))
    show_table(terminal, _times(summary))
    for line in _lines(outcome):
        terminal.print(line, soft_wrap=True)
    found = objections([summary])
    for each in found:
        terminal.print(
            Text.assemble(("verdict    ", "bold"), (each.sentence, "red")), soft_wrap=True
        )
    if not found:
        terminal.print(f"verdict    {CLEAN}")
    terminal.print(
        f"wall time: {outcome.timing['wall_s']:.1f} s for the replay "
        f"({outcome.timing['requests_per_wall_s']:,.0f} requests per second), "
        f"{outcome.timing['total_wall_s']:.1f} s with reports",
        style="dim",
    )


def line_of(job: Path) -> str:
    summary, timing = read_summary(job), read_json(job / "timing.json")
    return (
        f"token hit rate {summary['cache/token_hit_rate']:.3f}, "
        f"TTFT mean {seconds(summary['request/ttft_s_mean'])}, "
        f"p95 {seconds(summary['request/ttft_s_p95'])}, {timing['wall_s']:.1f} s wall time "
        f"({in_short(objections([summary]))})"
    )


def seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def size(num_bytes: float) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def _title(outcome: Outcome) -> Text:
    config, summary = outcome.config, outcome.summary
    is_simulated = config.executor.kind == "simulated"
    where = machines_of(config) if is_simulated else "this machine (real execution)"
    return Text.assemble(
        "\n",
        (config.name, "bold"),
        f"  {config.workload.kind} on {config.model.name}, "
        f"{where}, storage {config.storage.kind}, "
        f"prefetch {config.prefetch.stop}, seed {config.seed}\n"
        f"{summary['request/count']:,} requests: {summary['request/finished_count']:,} finished, "
        f"{summary['request/rejected_count']:,} rejected, "
        f"{summary['request/aborted_count']:,} aborted",
    )


def _tokens(summary: Mapping[str, float]) -> Table:
    table = _table("Where every prompt token came from", ("tokens", "share"))
    table.add_column("", width=BAR_WIDTH)
    keys = {name: f"cache/{name.replace(' ', '_')}_tokens" for name in TIERS}
    counts = {name: summary[key] for name, key in keys.items() if key in summary}
    total = sum(counts.values())
    for name, count in counts.items():
        share = count / total if total else 0.0
        table.add_row(name, f"{count:,}", f"{share:.1%}", "█" * round(share * BAR_WIDTH))
    table.add_section()
    table.add_row("all", f"{total:,}", f"hit {summary['cache/token_hit_rate']:.1%}", "")
    for name, key in OTHERS:
        if summary[key]:
            table.add_row(f"{name} (not included)", f"{summary[key]:,}", "", "")
    return table


def _times(summary: Mapping[str, float]) -> Table:
    table = _table("Time to first token, and its parts", COLUMNS, min_width=9)
    for title, name in zip(TIMES, ("ttft", *TTFT_PARTS, *HANDOVER_PARTS), strict=True):
        if f"request/{name}_s_mean" in summary:  # some are of separate engines only
            table.add_row(title, *(seconds(summary[f"request/{name}_s_{k}"]) for k in COLUMNS))
    return table


def _table(title: str, numbers: Iterable[str], min_width: int | None = None) -> Table:
    columns = [Column(each, justify="right", min_width=min_width) for each in numbers]
    return Table("", *columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")


def _lines(outcome: Outcome) -> Sequence[str]:
    summary = outcome.summary
    return [
        *_reasons(outcome),
        f"rate       {summary['throughput/requests_per_s']:.4g} requests/s, "
        f"{summary['throughput/output_tokens_per_s']:,.0f} output and "
        f"{summary['throughput/total_tokens_per_s']:,.0f} total tokens/s",
        "answers    mean / p50 / p95 / p99: "
        + ", ".join(
            f"{title} {' / '.join(seconds(summary[f'request/{name}_s_{k}']) for k in COLUMNS)}"
            for title, name in (("end to end", "e2e"), ("TPOT", "tpot"), ("ITL", "itl"))
        ),
        *(f"{name:<11}{told}" for name, of in OUTCOMES.items() if (told := of(summary))),
        f"queue      time by cause: {_shares(summary, 'request/queue_{}_s_mean', QUEUE_CAUSES)}",
        f"load       {loads(summary)}",
        *(f"  {line}" for line in stage_lines(summary)),
        f"cost       {summary['gpu/prefill_seconds_per_request']:.4g} GPU-seconds per request in "
        f"prefill steps, {summary['gpu/seconds_per_request']:.4g} in all steps",
        f"prefetch   {summary['prefetch/read_pages']:,} pages read: "
        f"{_shares(summary, 'prefetch/{}_pages', FATES)}; "
        f"{summary['prefetch/discarded_pages']:,} pages allocated but not read, "
        f"{summary['prefetch/cut_tokens']:,} tokens cut for lack of host memory, "
        f"{summary['prefetch/abandoned_count']:,} prefetches abandoned",
        f"transfer   load-back {size(summary['transfer/load_back_bytes'])}, back-up "
        f"{size(summary['transfer/back_up_bytes'])}, storage read "
        f"{size(summary['transfer/storage_read_bytes'])}, storage write "
        f"{size(summary['transfer/storage_write_bytes'])}",
        f"scheduler  {summary['scheduler/deferred_count']:,} admissions deferred, "
        f"{summary['scheduler/retracted_count']:,} requests retracted, "
        f"{summary['scheduler/prefill_oom_count']:,} out of memory in prefill",
        *_handover_lines(summary),
    ]


def _handover_lines(summary: Mapping[str, float]) -> list[str]:
    if "decode/reused_share" not in summary:  # all engines do both
        return []
    return [
        f"decode     {summary['decode/reused_share']:.1%} of the prompt tokens reused "
        f"({_shares(summary, 'decode/{}_reused_tokens', HIT_TIERS)}), "
        f"{size(summary['transfer/link_bytes'])} over the link, "
        f"{summary['decode/failed_handovers_count']:,} handovers failed"
    ]


def _reasons(outcome: Outcome) -> list[str]:
    if "computed/first_seen_tokens" in outcome.summary:
        return [f"computed   {_shares(outcome.summary, 'computed/{}_tokens', REASONS)}"]
    if outcome.config.executor.kind != "simulated":  # cannot be explained
        return []
    return ["computed   see why with `hicache explain RUN`, or set engine.explain=true"]


def _shares(summary: Mapping[str, float], key: str, names: Iterable[str]) -> str:
    parts = {name: summary[key.format(name)] for name in names}
    total = sum(parts.values())
    told = [
        f"{part / total:.0%} {name.replace('_', ' ')}"
        for name, part in sorted(parts.items(), key=lambda each: -each[1])
        if part >= 0.005 * total > 0
    ]
    return ", ".join(told) or "none"

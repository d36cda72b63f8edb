"""Lists every key of `summary.json`, the file with the metrics of a run.

The keys do not depend on what happens in a run: an event that never happens has a count of 0.
"""

from hicache.cache.kinds import KIND_NAMES
from hicache.cache.tree.node import TIER_NAMES, TIERS
from hicache.observe.reasons import REASONS
from hicache.results import jobs, roles
from hicache.results.metrics import (
    HANDOVER_PARTS,
    PEER_BYTES,
    PERCENTILES,
    REQUIRED_MEASURES,
    summarize,
)
from hicache.results.pipeline import KEYS as PIPELINE
from hicache.results.speculation import KEYS as SPECULATION
from hicache.scheduler.decision import Reason

DECLINED = ("too_short", "no_host", "rate_limited", "anchor_not_on_host")
ABANDONED = ("host_room", "sidecar_room")
DISCARDED = ("miss", "no_room", "terminated", "unread", "short", "aborted")
FAULTS = ("delay", "error", "missing", "short", "corrupt", "full", "gone")

# counted during a run, each from its first event on
COUNTERS = (
    "agreement/completion_collectives_count",
    "agreement/given_up_pages",
    "agreement/illegal_lengths_count",
    "agreement/query_collectives_count",
    "agreement/step_collectives_count",
    "agreement/unequal_hits_count",
    "agreement/unequal_reads_count",
    "agreement/unequal_sidecars_count",
    *(f"back_up/dropped_{kind}_pages" for kind in KIND_NAMES),
    *(f"evict/{TIER_NAMES[tier]}_{kind}_pages" for tier in TIERS for kind in KIND_NAMES),
    "load_back/failed_count",
    *(f"prefetch/abandoned_{reason}_tokens" for reason in ABANDONED),
    "prefetch/aborted_count",
    "prefetch/cut_count",
    "prefetch/declined_count",
    *(f"prefetch/declined_{reason}_tokens" for reason in DECLINED),
    *(f"prefetch/discarded_{reason}_pages" for reason in DISCARDED),
    "prefetch/revoked_count",
    "prefetch/started_count",
    "prefetch/terminated_count",
    "prefetch/terminated_without_sidecars_count",
    *(f"scheduler/deferred_{each.value}_count" for each in Reason if each is not Reason.chunk),
    "scheduler/hit_given_up_count",
    "scheduler/missed_checkpoint_count",
    "storage/bypassed_count",
    "storage/changed_pages",
    "storage/damaged_pages",
    "storage/dropped_read_pages",
    "storage/dropped_write_pages",
    "storage/failed_count",
    *(f"storage/injected_{fault}_count" for fault in FAULTS),
    "storage/query_count",
    "storage/queued_write_pages",
    "storage/refused_write_pages",
    "verify/checked_count",
    "verify/unequal_count",
    "verify/untested_count",
)
# computed at the end of a run
SAID = (
    "load/closed_loop",
    "engine/span_s",
    "engine/steps_count",
    "tree/nodes_count",
    "workload/distinct_tokens",
)
# present only if they apply: separate engines; reasons with engine.explain; a goodput search; pools
# with a capacity; speculation; reads from peers; stages; jobs; a real executor, hidden copies, and
# compared logits
SOMETIMES = (
    *roles.COUNTERS,
    *roles.MEASURES,
    *(
        f"request/{part}_s_{each}"
        for part in HANDOVER_PARTS
        for each in ("mean", *(f"p{percent}" for percent in PERCENTILES))
    ),
    *(f"{area}/{reason}_tokens" for area in ("computed", "recomputed") for reason in REASONS),
    "computed/window_missing_tokens",
    "computed/state_missing_tokens",
    "goodput/requests_per_s",
    "goodput/tried_requests_per_s",
    "goodput/jobs_per_hour",
    "goodput/tried_jobs_per_hour",
    "verify/greedy_agreement",
    "verify/logit_error_max",
    "verify/wrong_count",
    "goodput/mended_share",
    "load/host_over_working_set",
    "load_back/copy_s",
    "load_back/exposed_s",
    "load_back/hidden_share",
    *(f"speculation/{name}" for name in SPECULATION),
    PEER_BYTES,
    "cache/peer_hit_tokens",
    *PIPELINE,
    *jobs.KEYS,
    "trace/left_out_rows",
    "trace/completed_rows",
    "trace/outside_parents",
    "trace/differing_usage",
)
ALWAYS = frozenset([*summarize((), dict.fromkeys(REQUIRED_MEASURES, 0)), *COUNTERS, *SAID])
KNOWN = ALWAYS | frozenset(SOMETIMES)

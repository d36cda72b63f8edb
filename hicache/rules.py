"""Rules of serving engines: what one engine does and another does not.

A preset (`compat=NAME`) gives them; `compat.rules.NAME=VALUE` changes one.
"""

from dataclasses import dataclass
from enum import Enum

from hicache.knob import check_limits, knob, share

# how a cache keeps the hidden states that a draft model needs before its first own token
DRAFT_KEYS = ("token", "bigram", "drop_block")


class DeadlineFrom(Enum):
    """When the time limit of prefetch.stop=timeout starts to count.

    With that setting, a queued request waits a limited time for its pages from storage.
    """

    enqueue = "enqueue"  # when the request is queued
    first_poll = "first_poll"  # when the scheduler first considers the request


class Refresh(Enum):
    """When a request marks its cached prefix as just used, so that it is evicted later.

    Whatever the setting, the prefix counts as used when the request adds pages behind it.
    """

    admitted = "admitted"  # when the request is admitted, as in vLLM
    considered = "considered"  # each time the scheduler considers the request
    # also when the request arrives, if storage is looked up for it, as in SGLang
    arrived = "arrived"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules in which serving engines differ, and constants of their code.

    The defaults are those of compat=hicache and compat=reports.
    """

    # When a leaf of the radix tree or a window is evicted, drop only as many of its pages as are
    # needed, from its end, as vLLM does. Windows and states then leave in the order in which
    # requests free them, and stay on the device when their full-attention KV leaves it; the host
    # drops windows with the pages of their requests. False evicts all of it.
    trims_leaves: bool = False
    # Copy generated answers to the host as well as prompts. False copies prompts only, as vLLM
    # does.
    backs_up_answers: bool = True
    # Values that `speculation.key` may have, the first of which is the default.
    draft_keys: tuple[str, ...] = knob(DRAFT_KEYS, one_of=DRAFT_KEYS)
    # Of the ends of prompts and answers, keep windows and states only where an equal prompt can
    # resume, at the last page boundary before a prompt's last token, and look for branches on the
    # device alone, as vLLM does; other windows and states that are loaded from the host belong to
    # the request that loads them, and leave the device when it has read them. False keeps windows
    # and states at the last page boundary of prompts and of answers, where a longer prompt can
    # resume.
    keeps_for_repeats: bool = False
    # With speculation.key=drop_block, keep the last window and state of a prompt a page lower,
    # where an equal prompt resumes, as vLLM does. False keeps them where only a longer hit resumes.
    lowers_ends: bool = False
    # When a prompt consists of whole pages and the host holds the last one, load that page as well,
    # so that only the last token is computed again, as vLLM does for models with full attention
    # alone. False computes the whole page again.
    loads_last_page: bool = False
    # A prompt diverges from a cached one also where storage holds the full KV of its first tokens
    # and no window or state to resume there. False looks at device and host alone, as SGLang does.
    storage_branches: bool = True
    # Minimum host hit, in tokens, that is copied back to the device; a shorter one is recomputed,
    # unless its window or state must be loaded anyway. 10 is SGLang's default.
    load_back_threshold: int = knob(10, least=0)
    refresh: Refresh = Refresh.considered
    # Plan a step while the one before it runs, as SGLang and vLLM do on a GPU: a request whose
    # answer is complete holds its memory until the next step is planned.
    asynchronous: bool = False
    deadline_from: DeadlineFrom = DeadlineFrom.enqueue
    # Maximum number of requests waiting for storage that the scheduler skips in one pass over the
    # queue.
    scan_limit: int = knob(128, least=1)
    # Maximum number of answer tokens per request for which admission reserves memory, however long
    # the answer may become. 4,096 is SGLang's value.
    clip_new_tokens: int = knob(4096, least=0)
    # Tokens for which a decode engine keeps free memory, for each request that it has admitted. 512
    # is SGLang's value.
    decode_reserved_tokens: int = knob(512, least=0)
    # Tokens whose KV each layer reads in a decode step with sparse attention
    # (parallel.sparse_tokens). 2,048 is SGLang's value.
    sparse_top: int = knob(2048, least=1)
    # A decode engine may keep sliding windows on its host, and promise a part of the last window.
    # False refuses both, as SGLang does.
    decode_windows_on_host: bool = True
    # Lowest value to which `scheduler.new_token_ratio` decays.
    new_token_ratio_floor: float = share(0.098)
    # Number of decode steps in which `scheduler.new_token_ratio` decays to its floor.
    new_token_ratio_decay_steps: int = knob(600, least=0)
    # Seconds that each step takes for the all-reduce by which ranks agree on prefetches and
    # transfers. SGLang issue 30511 reports 150 us.
    collective_s: float = knob(150e-6, least=0, most=1e4)
    # When a match ends inside a tree node and splits it, also refresh the recency of the part that
    # did not match, as SGLang does.
    split_refreshes: bool = False
    # Order windows and states that only the host holds by the time at which they left the device or
    # their last lock ended, as SGLang does. False orders them by their last use.
    leaving_refreshes: bool = False
    # When a prompt is computed, free the window pages of its last chunk that no saved position
    # needs, as SGLang does. False keeps them on the device until they are evicted.
    trims_windows: bool = False
    # When a sliding window is loaded back from the host, also load the older window pages of the
    # tree node in which it starts, as SGLang does. False loads only the pages of the window.
    loads_whole_nodes: bool = False
    # When a prefetch, or a copy of windows or states from the device, does not fit in free host
    # memory, evict as many pages as it needs in all, as SGLang does. False evicts only as many as
    # are missing. Copies are made node by node: under write_back all data of a node when the first
    # of it leaves, and later data of it never; full-attention KV that is on the device, too, is the
    # first to leave the host.
    evicts_whole: bool = False
    # Mamba state slots that a running request occupies: one for its current state, one for its next
    # checkpoint; more are reserved and stay empty. SGLang reserves 3. With 1, as in vLLM, a
    # checkpoint takes its slot when it is computed, and answers have none.
    states_per_request: int = knob(2, least=1)
    # Copy a state that is loaded back from the host twice over the link, into the slot of the tree
    # and into that of the request, as SGLang does. False copies it once over the link, then from
    # slot to slot on the device.
    loads_states_twice: bool = False
    # Compute while pages are loaded from the host: other requests, and the layers whose pages are
    # loaded, as SGLang does (layer by layer). False begins no step before all loads have ended: the
    # published times of vLLM's offloading are the sum of both (docs/published.md, case D).
    overlaps_loads: bool = True
    # In a step with several chunks, compute attention to the tokens before each chunk as if all
    # chunks were as long as the longest, as SGLang's Triton attention does (extend_attention.py).
    pads_chunks: bool = False
    # A prefetch that is shorter than a window and does not begin the prompt reads the window pages
    # it has, and the rest of the window is taken from the prefix. False reads none, as SGLang does.
    short_windows: bool = True
    # A prefetch begins where the host's full-attention KV ends, even if a window or state is
    # missing there, as in SGLang's pull request 39856. False begins where the prefix can be used,
    # and reads again what the host holds beyond.
    anchors_full: bool = False

    def __post_init__(self) -> None:
        check_limits("compat.rules", self)

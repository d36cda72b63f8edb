"""A request inside an engine: its progress, and where its time and tokens went."""

from typing import Any

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import LoadBack
from hicache.cache.tree.sequence import Sequence
from hicache.request import Request
from hicache.scheduler.decision import Reason
from hicache.scheduler.queue_waits import Cause, Mark


class TokenRun(list[int]):
    """Successive times (ns) at which requests got tokens, with the number of requests counted."""

    num_counted = 0


class RequestState:
    """The progress of one request in an engine, from its submission to its last token.

    The first `cached_len` tokens came from the cache when the request last started. The tokens up
    to `kv_len` were computed since then. The tokens from `kv_len` up to `target_len` must be
    computed before the request decodes. Decode steps that begin before `quiet_until` take, publish
    and free no page.
    """

    def __init__(self, request: Request, tokens: bytes, number: int, now_ns: int) -> None:
        self.request = request
        self.tokens = tokens  # prompt and answer
        self.number = number  # order of submission
        self.place: tuple[float, int] = (number, number)  # sort key in the queue
        self.sequence = Sequence(tokens, request.namespace, request)
        self.submitted_ns = self.looked_ns = now_ns  # time of submission; time of queueing
        self.target_len = request.prompt_len
        self.cached_len = self.kv_len = self.quiet_until = 0
        self.remaining_output = request.output_len  # answer tokens still to decode
        self.prefetched = (0, 0)  # tokens [start, end) that its own prefetch requested
        # prompt lengths at which the policy keeps a state or window, ascending
        self.placed: list[int] = []
        self.missed: list[int] = []  # page boundaries of its answer of which no state was kept
        self.branch_len: int | None = None  # of the match with which it last started
        self.defer_reason: Reason | None = None  # of the last decision; None once it is admitted
        self.device_len = self.host_len = self.storage_len = self.peer_len = 0
        self.computed_len = self.recomputed_len = 0
        self.ready_len = 0  # tokens on the device alone at the last admission
        # tokens of its hit without KV of the draft: at the last admission, and at the first
        self.cold_len = self.draft_cold_len = 0
        self.dropped_len = 0  # cached tokens that it computes again for the draft
        # with speculation: tokens that its next decode steps gain, as far as they are drawn, and
        # the number of steps before and their tokens; tokens of the last one, and at most of any
        self.gains: list[int] = []
        self.num_verified = self.num_gained = 0
        self.last_gain = self.most_gain = 1
        self.load_back: LoadBack | None = None  # that its first chunk waits for
        self.prefetch: Prefetch | None = None  # None: `declined` has the reason
        self.declined: str | None = None
        self.blocked_since_ns: int | None = None
        self.storage_wait_ns = 0
        self.storage_waits: list[tuple[int, int]] = []  # its parts: (from, to)
        self.load_back_ns = 0
        # queue time by cause up to its first admission; the mark is taken when it begins to wait
        self.queue_ns = dict.fromkeys(Cause, 0)
        self.queue_mark: Mark | None = None
        # up to its first token: step time by its own share of the tokens, by the share of other
        # requests, and time in which a step waited for copies
        self.own_ns = self.shared_ns = self.fence_ns = 0
        self.admitted_ns: int | None = None  # the first admission
        self.first_token_ns: int | None = None
        # when it got its tokens (ns): runs that begin with the last token of the run before
        self.token_runs: list[TokenRun] = []
        self.retractions = 0
        self.failed_prompts = 0  # times that pages ran out during its prompt
        self.num_parts = 0  # steps that computed only a part of its prompt
        # with separate engines: the last parts of the time to the first token, tokens that the
        # decode engine held, and the attempts (`Handover`) to compute the prompt
        self.transfer_ns = self.restore_ns = self.reused_len = 0
        self.handovers: list[Any] = []

    @property
    def extend_len(self) -> int:
        return self.target_len - self.kv_len

    @property
    def decoded(self) -> int:
        return self.request.output_len - self.remaining_output

    @property
    def num_decodes(self) -> int:
        # steps that gave it tokens
        return self.decoded if self.most_gain == 1 else self.num_verified + 1

    @property
    def left(self) -> int:
        # answer tokens still to decode, also where those of the last step are not known yet
        return self.request.prompt_len + self.request.output_len - 1 - self.kv_len

    def take(self, num_steps: int) -> int:
        """Return how many tokens the next `num_steps` decode steps gain, which have ended."""
        taken, self.gains = self.gains[:num_steps], self.gains[num_steps:]
        self.num_verified += num_steps
        self.last_gain, gained = taken[-1], sum(taken)
        self.num_gained += gained
        return gained

    def reach(self, num_steps: int) -> int:
        """Return how many tokens have KV in the last of `num_steps` decode steps, with drafts."""
        before = self.kv_len + sum(self.gains[: num_steps - 1])
        return min(before + self.most_gain, self.kv_len + self.left)

    def end_queue(self, mark: Mark) -> None:
        """Stop counting queue time for this request.

        The time since the request was queued is added to `queue_ns`, by cause. `mark` holds the
        queue's sums of waiting time at this moment, in ns for each cause. The call has no effect if
        the request is not queued.
        """
        if self.queue_mark is not None:
            for cause, since_ns in self.queue_mark.items():
                self.queue_ns[cause] += mark[cause] - since_ns
            self.queue_mark = None

    def restart(self) -> None:
        before = self.sequence
        self.sequence = Sequence(self.tokens, self.request.namespace, self.request)
        self.sequence.host_tick, self.sequence.host_end = before.host_tick, before.host_end
        self.sequence.used = before.used
        self.target_len = self.request.prompt_len + self.decoded
        self.cached_len = self.kv_len = self.quiet_until = 0
        self.placed, self.missed = [], []
        self.gains = []
        self.prefetched = (0, 0)
        self.retractions += 1

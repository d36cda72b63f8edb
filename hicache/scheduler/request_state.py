"""A request inside an engine: how far it is, and where its time and tokens went."""

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tree.sequence import Sequence
from hicache.request import Request
from hicache.scheduler.decision import Reason
from hicache.scheduler.queue_waits import CAUSES, Mark


class RequestState:
    """One request from its submission to its last token.

    Token intervals of its sequence: `[0, cached_len)` came from the cache at the last admission,
    `[cached_len, kv_len)` has been computed since, `[kv_len, target_len)` is still to be extended.
    Decoding begins when `kv_len` reaches `target_len`.
    """

    def __init__(self, request: Request, tokens: bytes, number: int, now_ns: int) -> None:
        self.request = request
        self.tokens = tokens  # prompt and answer
        self.number = number  # order of submission
        self.place: tuple[float, int] = (number, number)  # its place in the queue
        self.sequence = Sequence(tokens, request.namespace, request)
        self.submitted_ns = self.looked_ns = now_ns  # when it came; when it was queued
        self.target_len = request.prompt_len
        self.cached_len = self.kv_len = 0
        self.remaining_output = request.output_len  # answer tokens still to come
        self.prefetched = (0, 0)  # tokens [start, end) that its own prefetch asked for
        self.saves: list[int] = []  # lengths at which a state is to be captured, ascending
        self.boundaries: list[
            int
        ] = []  # lengths up to which its prompt is to be published, ascending
        self.defer_reason: Reason | None = None  # of the last look; None once it is admitted
        self.device_len = self.host_len = self.storage_len = self.computed_len = 0
        self.recomputed_len = 0
        self.ready_len = 0  # tokens that the device alone could serve at the last admission
        self.prefetch: Prefetch | None = None  # its own, or why it has none
        self.declined: str | None = None
        self.blocked_since_ns: int | None = None
        self.storage_wait_ns = 0
        self.storage_waits: list[tuple[int, int]] = []  # its parts: (from, to)
        self.load_back_ns = 0
        # by cause, up to its first admission; the mark: of when it last began to wait for them
        self.queue_ns = [0] * len(CAUSES)
        self.queue_mark: Mark | None = None
        # up to its first token: steps by its share of their tokens, by that of others, and copies
        # that a step had to wait for
        self.own_ns = self.shared_ns = self.fence_ns = 0
        self.admitted_ns: int | None = None  # the first admission
        self.first_token_ns: int | None = None
        self.retractions = 0
        self.failed_prompts = 0  # times that its prompt ran out of pages half way
        self.num_parts = 0  # steps that computed no more than a part of its prompt

    @property
    def extend_len(self) -> int:
        """Tokens still to be extended."""
        return self.target_len - self.kv_len

    @property
    def decoded(self) -> int:
        """Answer tokens produced."""
        return self.request.output_len - self.remaining_output

    @property
    def num_steps(self) -> int:
        """Steps that it was part of: each gave a token, or computed a part of its prompt."""
        return self.num_parts + self.decoded

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return not self.remaining_output

    def begin_queue(self, mark: Mark) -> None:
        """From now on it waits for what the queue waits for."""
        self.queue_mark = mark

    def end_queue(self, mark: Mark) -> None:
        """Until now, if it did."""
        if self.queue_mark is not None:
            parts = zip(self.queue_ns, self.queue_mark, mark, strict=True)
            self.queue_ns = [spent + now - since for spent, since, now in parts]
            self.queue_mark = None

    def end_wait(self, now_ns: int) -> None:
        """Storage no longer keeps it waiting, if it did."""
        if self.blocked_since_ns is not None:
            self.storage_wait_ns += now_ns - self.blocked_since_ns
            self.storage_waits.append((self.blocked_since_ns, now_ns))
            self.blocked_since_ns = None

    def restart(self) -> None:
        """Begin again after a retraction: what was computed must be computed again."""
        self.sequence = Sequence(self.tokens, self.request.namespace, self.request)
        self.target_len = self.request.prompt_len + self.decoded
        self.cached_len = self.kv_len = 0
        self.saves = []
        self.boundaries = []
        self.prefetched = (0, 0)
        self.retractions += 1

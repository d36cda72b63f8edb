"""The decode half of an engine that only computes prompts: it holds them until their KV is sent."""

from hicache.scheduler.decode import Decode
from hicache.scheduler.request_state import RequestState
from hicache.scheduler.scheduler import Scheduler


class Sender(Decode):
    """Holds computed prompts, with their memory, until another engine has received their KV."""

    held: list[RequestState]

    @property
    def num_ending(self) -> int:
        return len(self.ending) + len(self.held)

    def start(self, req: RequestState, now_ns: int) -> None:
        self.held.append(req)

    def take_out(self, request_id: int) -> RequestState | None:
        req = next((each for each in self.held if each.request.id == request_id), None)
        if req is not None:
            self.held.remove(req)
        return req

    def release(self, req: RequestState) -> None:
        """Leave a prompt to the cache, and free the rest of its memory."""
        self.held.remove(req)
        self.finish(req)


class PrefillScheduler(Scheduler):
    """The scheduler of an engine that only computes prompts."""

    decode: Sender
    _decode_kind = Sender

    @property
    def started(self) -> list[RequestState]:
        return [*super().started, *self.decode.held]

"""A small workload that fills its pools: conversations that grow, branch, repeat and come back.

Half of its lengths lie within three tokens of a page boundary, where errors are most likely.
"""

from dataclasses import dataclass
from random import Random

from hicache.clock import to_ns
from hicache.request import Request
from hicache.workload.workload import Workload
from tests.scheduler.world import request_of

TALK = "talk"  # its name as a workload
NUM_REQUESTS = 40
NUM_SYSTEM_PROMPTS = 3
LONGEST_UNITS = 20


def unit_tokens(page_size: int) -> int:
    """Return the number of tokens of a unit, in which lengths are drawn."""
    return max(page_size, 8)


@dataclass(kw_only=True)
class Talk:
    """The settings of a talk. A unit is a page, or eight tokens where pages are smaller."""

    page_size: int
    namespaces: int
    gap_s: float
    longest_answer: int
    giants: int  # requests too long for any pool, at the end of their sessions
    seed: int

    def workload(self) -> Workload:
        """The requests in order of arrival; equal for equal settings."""
        while len(self.requests) < NUM_REQUESTS:
            self._add_session()
        requests = sorted(self.requests[:NUM_REQUESTS], key=lambda each: (each.arrival_ns, each.id))
        ids: dict[int | None, int] = {each.id: number for number, each in enumerate(requests)}
        for each in requests:
            each.id, each.session_id = ids[each.id], ids[each.session_id]
            each.parent_id = ids.get(each.parent_id)
        return Workload(name=TALK, requests=requests)

    def __post_init__(self) -> None:
        self.requests: list[Request] = []
        self._rng = Random(f"{self.seed}")
        self._unit = unit_tokens(self.page_size)
        self._next_id = 0
        self._start_s = 0.0
        self._systems = [self._fresh(self._length(1, 4)) for _ in range(NUM_SYSTEM_PROMPTS)]
        self._past: list[list[int]] = []

    def _add_session(self) -> None:
        # one conversation, its turns a gap apart
        rng, longest = self._rng, LONGEST_UNITS * self._unit
        self._start_s += rng.expovariate(1 / (2 * self.gap_s))
        time_s, parent, first = self._start_s, None, len(self.requests)
        namespace = f"tenant-{rng.randrange(self.namespaces)}" if self.namespaces > 1 else ""
        prompt = self._opening()
        for _ in range(rng.randint(2, 6)):
            answer = self._fresh(rng.choice((1, 2, rng.randint(1, self.longest_answer))))
            number = len(self.requests)
            own = {"session_id": first, "parent_id": parent, "namespace": namespace}
            own["think_ns"] = to_ns(rng.expovariate(1 / self.gap_s))
            self.requests.append(request_of(number, prompt, answer, to_ns(time_s), **own))
            if len(prompt) <= longest:  # two giants and pools would be their size
                self._past.append(prompt + answer)
            parent = number
            time_s += rng.expovariate(1 / (4 * self.gap_s))
            prompt = self._next_turn(prompt, answer)
            if len(prompt) > longest:
                if not self.giants:
                    return
                self.giants -= 1
                prompt = prompt + self._fresh(100 * longest)

    def _opening(self) -> list[int]:
        if self._past and self._rng.random() < 0.4:  # what was asked before, and may be gone by now
            return self._rng.choice(self._past) + self._fresh(self._length(0, 2))
        return self._rng.choice(self._systems) + self._fresh(self._length(0, 6))

    def _next_turn(self, prompt: list[int], answer: list[int]) -> list[int]:
        draw = self._rng.random()
        if draw < 0.1:  # asked again
            return list(prompt)
        if draw < 0.2:  # edited
            return prompt[: self._rng.randint(1, len(prompt))] + self._fresh(self._length(0, 3))
        return prompt + answer + self._fresh(self._length(0, 4))

    def _length(self, least: int, most: int) -> int:
        rng, unit = self._rng, self._unit
        if rng.random() < 0.5:
            return max(rng.randint(least, most) * unit + rng.randint(-3, 3), 1)
        return rng.randint(max(least * unit, 1), most * unit)

    def _fresh(self, count: int) -> list[int]:
        first = self._next_id
        self._next_id += count
        return list(range(first, self._next_id))

"""The `odd` workload: generated prompts of odd lengths that repeat, grow, shrink and branch.

Lengths are k pages, a token more or less, or random. A prompt is new, or an earlier one: the same
again, a token longer or shorter, continued after its answer, or left within its last window or
anywhere. Pools hold about a dozen prompts. Each seed and page size gives other requests.
"""

from random import Random

from experiments.diff.edges import request_of
from experiments.diff.protocol import Pools
from hicache.request import Request
from hicache.workload.runs import Runs, cut_runs, runs_len

NAME = "odd"
POOLS = Pools(device_tokens=49_152, host_tokens=98_304, max_len=8_192)
SWA_TOKENS, NUM_STATES = 24_576, 48
LONGEST = 6_000  # tokens that a prompt adds
WINDOW = 1_024
RECENT = 12


def odd(count: int, seed: int, page: int) -> list[Request]:
    """Return `count` requests that the seed draws for caches of this page size."""
    random = Random(seed)
    requests: list[Request] = []
    past: list[tuple[Runs, Runs]] = []  # prompts and answers
    for number in range(count):
        prompt = _prompt(random, past[-RECENT:], number * 20_000, page)
        lengths = (1, 2, page - 1, page, page + 1, random.randint(1, 200))
        answer = [(number * 20_000 + 10_000, random.choice(lengths))]
        past.append((prompt, answer))
        requests.append(request_of(number, prompt, answer))
    return requests


def _prompt(random: Random, past: list[tuple[Runs, Runs]], fresh: int, page: int) -> Runs:
    added = _length(random, page)
    if not past or (how := random.random()) < 0.2:
        return [(fresh, added)]
    prompt, answer = random.choice(past)
    length, room = runs_len(prompt), POOLS.max_len - 200 - page
    if how < 0.35:
        return prompt
    if how < 0.45:
        return cut_runs(prompt, 0, max(length - 1, 1))
    if how < 0.55:
        return cut_runs([*prompt, (fresh, 1)], 0, room)
    if how < 0.75:
        return cut_runs([*prompt, *answer, (fresh, added)], 0, room)
    left = length - random.randint(1, WINDOW) if how < 0.9 else random.randint(1, length)
    return cut_runs([*cut_runs(prompt, 0, max(left, 1)), (fresh, added)], 0, room)


def _length(random: Random, page: int) -> int:
    longest = random.choice((WINDOW, LONGEST))
    whole = random.randint(1, max(longest // page, 1)) * page
    return max(random.choice((whole, whole - 1, whole + 1, random.randint(1, longest))), 1)

"""The `edges` workload: prompts whose lengths sit at the boundaries of pages and thresholds.

Real traces have few prompts of exactly k pages, and reuse pages long before eviction. Here lengths
are k pages, k pages and a token, 280 and 300 tokens (storage reads need at least 256) and random
ones. Prompts begin, continue, branch, repeat and return late, in pools of a few requests. A third
of the requests is aborted, and some run so long that the pages they lock are the oldest. So a match
that is a page short, a `<` that became a `<=` or an ignored lock shows within 500 requests, which
take seconds.
"""

from random import Random

from experiments.diff.protocol import Pools
from hicache.request import Request
from hicache.workload.runs import Runs, cut_runs, runs_len, to_spans

NAME = "edges"
COUNT = 500
COPIES = ("instant", "delayed:2")  # more delayed back-ups would lock more than the pools hold
PAGE = 64
POOLS = Pools(
    page_size=PAGE,
    device_tokens=12_288,
    host_tokens=24_576,
    max_len=2_560,
    is_eventful=True,
    abort_seed=1,
)
SWA_TOKENS, NUM_STATES = 8_192, 28
MOST_PAGES = 18  # of one request's new tokens
ANSWER_LENGTHS = (1, 2, 60, 64, 65, 130)
RECENT = 8
FIRST_ROUND = 440  # the request from which a few prompts rotate


def edges(count: int = COUNT) -> list[Request]:
    random = Random(0)
    requests: list[Request] = []
    past: list[tuple[Runs, Runs]] = []  # prompts and answers
    for number in range(count):
        is_round = number >= FIRST_ROUND
        prompt = _round(number) if is_round else _prompt(random, past, number * 10_000)
        answer = [(number * 10_000 + 5_000, random.choice(ANSWER_LENGTHS))]
        past.append((prompt, answer))
        requests.append(request_of(number, prompt, answer))
    return requests


def request_of(number: int, prompt: Runs, answer: Runs) -> Request:
    return Request(
        id=number,
        session_id=number,
        arrival_ns=number,
        prompt=to_spans(prompt),
        output=to_spans(answer),
    )


def _round(number: int) -> Runs:
    # Three prompts of whole pages repeat. A state at the end of such a prompt is computed
    # again, because a match must leave a token to compute. Between them come, alternately, a new
    # prompt and one that branches two pages before its end, where a page of its window is missing
    round_, turn = divmod(number - FIRST_ROUND, 4)
    if turn < 3:
        return [((FIRST_ROUND + turn) * 10_000, 6 * PAGE)]
    if round_ % 2 == 0:
        return [(number * 10_000, 20 * PAGE)]
    return [((number - 4) * 10_000, 18 * PAGE), (number * 10_000, PAGE)]


def _prompt(random: Random, past: list[tuple[Runs, Runs]], fresh: int) -> Runs:
    added = _length(random)
    if not past or (how := random.random()) < 0.25:
        return [(fresh, added)]
    prompt, answer = random.choice(past[-RECENT:] if random.random() < 0.6 else past)
    room = POOLS.max_len - max(ANSWER_LENGTHS)
    if how < 0.40:  # the same prompt again
        return prompt
    if how < 0.70:  # the conversation continues
        return cut_runs([*prompt, *answer, (fresh, added)], 0, room)
    shared = min(_length(random), runs_len(prompt))
    return cut_runs([*cut_runs(prompt, 0, shared), (fresh, added)], 0, room)


def _length(random: Random) -> int:
    pages = random.randint(1, MOST_PAGES)
    return random.choice(
        [PAGE * pages + 1, PAGE * pages, 280, 300, random.randint(1, PAGE * MOST_PAGES)]
    )

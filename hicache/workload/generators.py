"""Workloads drawn from the statistics of public traces; they need no files.

`chat` follows the Mooncake FAST'25 conversation trace (github.com/kvcache-ai/Mooncake, 12,031
requests; parents as `mooncake.py` finds them). `agents` follows WEKA's coding-agent sessions
(github.com/callanjfox/kv-cache-tester, a sample of 451 sessions). `builtin` mixes both. The
quantiles below were measured on those traces with this package's loaders, unless a comment says
"chosen". Equal arguments give equal requests.
"""

import itertools
from bisect import bisect
from collections.abc import Sequence

import numpy as np

from hicache.clock import to_ns
from hicache.config import AgentsConfig, GeneratedConfig, TraceTokens
from hicache.request import Request
from hicache.workload.runs import Runs, append_run, extend_runs, runs_len
from hicache.workload.turns import Turn, to_requests


class Quantiles:
    """A distribution of positive numbers to draw from, given by its quantiles.

    `values[i]` is the quantile at the probability `shares[i]`; `shares` rise from 0 to 1. Between
    two quantiles, the logarithm of the value is interpolated linearly. All draws lie between the
    first and the last value.
    """

    def __init__(self, shares: Sequence[float], values: Sequence[float]) -> None:
        self._shares = shares
        self._logs: list[float] = np.log(np.array(values, np.float64)).tolist()
        rises = zip(np.diff(self._logs), np.diff(shares), strict=True)
        self._slopes = [float(log / share) for log, share in rises]

    def draw(self, rng: np.random.Generator) -> float:
        share = rng.random()
        left = bisect(self._shares, share) - 1
        log = self._logs[left] + self._slopes[left] * (share - self._shares[left])
        return float(np.exp(log))

    def draw_len(self, rng: np.random.Generator) -> int:
        return max(round(self.draw(rng)), 1)


SHARES = (0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)

# all requests of the trace share the first 512-token block
CHAT_SYSTEM_TOKENS = 512
CHAT_FIRST_TOKENS = Quantiles(
    SHARES, (891, 898, 907, 1459, 5933, 14283, 26280, 38154, 87220, 120636)
)
CHAT_ADDED_TOKENS = Quantiles(SHARES, (1, 1, 1, 9, 27, 386, 4369, 7278, 16805, 38891))
CHAT_ANSWER_TOKENS = Quantiles(SHARES, (1, 10, 24, 156, 350, 472, 597, 698, 1119, 2000))
# time between the arrivals of two turns
CHAT_GAP_S = Quantiles(SHARES, (6, 29, 42, 66, 126, 273, 480, 612, 1471, 2667))
# share of turns 1, 2, ... that have a successor; the last entry holds for all later turns
CHAT_CONTINUES = (0.25, 0.386, 0.487, 0.549, 0.603, 0.644, 0.741, 0.791)
CHAT_CONTEXT_TOKENS = 122_880  # chosen: a conversation ends before it exceeds this length

# medians of tool definitions (12,439) and system prompt (2,771). Chosen: all sessions share them
# (the block ids of the trace are local to a session)
AGENT_SHARED_TOKENS = 12439 + 2771
# first prompts below 100,000 tokens (334 of 451); longer ones resume old work and exceed the
# context chosen below
AGENT_FIRST_TOKENS = Quantiles(
    SHARES, (6343, 12413, 13933, 17684, 20151, 37572, 70855, 86223, 95756, 99153)
)
AGENT_CONTEXT_TOKENS = 100_000  # chosen: fits models of 128k tokens, answers included
# requests per session: a third of the measured values (3, 5, 7, 18, 41, 86, 143, 196, 336, 480), to
# keep the replay short
AGENT_TURNS = Quantiles(SHARES, (1, 2, 2, 6, 14, 29, 48, 65, 112, 160))
AGENT_ADDED_TOKENS = {  # by the stop reason of the previous turn
    "tool_use": Quantiles(SHARES, (1, 16, 26, 109, 390, 1259, 3357, 6490, 17398, 75616)),
    "end_turn": Quantiles(SHARES, (1, 15, 23, 43, 137, 440, 1972, 5980, 42689, 75616)),
}
AGENT_ANSWER_TOKENS = {
    "tool_use": Quantiles(SHARES, (35, 93, 108, 140, 216, 412, 901, 1535, 3799, 8794)),
    "end_turn": Quantiles(SHARES, (2, 25, 47, 197, 418, 635, 1058, 1748, 4044, 8600)),
}
AGENT_THINK_S = {
    "tool_use": Quantiles(SHARES, (0.5, 3, 4, 5, 9, 19, 71, 155, 611, 3184)),
    "end_turn": Quantiles(SHARES, (0.5, 3, 5, 40, 184, 730, 2556, 5008, 28517, 75574)),
}
# share of turns that end in an answer, after a tool call and after an answer
AGENT_ENDS_TURN = {"tool_use": 0.047, "end_turn": 0.246}
AGENT_DROPS = 0.0053  # share of turns that start with a shortened context (150 of 28,111)
# share of the context that they keep
AGENT_KEPT = Quantiles((0, 0.1, 0.5, 0.9, 1), (0.13, 0.155, 0.268, 0.624, 0.7))
# requests of a sub-agent (48 of them); 28 of 24,214 tool calls start one to three at once
SUB_AGENT_TURNS = Quantiles(SHARES, (2, 4, 5, 8, 11, 13, 17, 22, 24, 24))
SUB_AGENTS = 2  # at once, unless the settings say otherwise
SAMPLES = 3
RETRY_S = 1.0  # chosen: from an answer to the same request again, and to what waits for sub-agents
SAME_TOOL = 0.8  # chosen: share of calls of the same tool as the call before
TOOL_SPREAD = 0.5  # chosen: standard deviation of the logarithm of a tool's duration
# time of an answer in the arrival times, chosen to give the median (6 s for 216 tokens); causal and
# closed arrivals use the answer times of the run itself
AGENT_ANSWER_BASE_S = 2.0
AGENT_TOKENS_PER_S = 50.0

AGENTS_EVERY = 5  # chosen: in `builtin`, every fifth session is an agent


def chat(config: GeneratedConfig, *, seed: int) -> list[Request]:
    draft = _Draft(config, seed)
    system = draft.new_ids(CHAT_SYSTEM_TOKENS)
    for start_s in draft.session_starts():
        _add_chat(draft, system, start_s)
    return draft.requests()


def agents(config: GeneratedConfig, *, seed: int) -> list[Request]:
    draft = _Draft(config, seed)
    shared = draft.new_ids(AGENT_SHARED_TOKENS)
    for start_s in draft.session_starts():
        _add_agent(draft, shared, start_s)
    return draft.requests()


def builtin(config: GeneratedConfig, *, seed: int) -> list[Request]:
    draft = _Draft(config, seed)
    system = draft.new_ids(CHAT_SYSTEM_TOKENS)
    shared = draft.new_ids(AGENT_SHARED_TOKENS)
    for index, start_s in enumerate(draft.session_starts(), start=1):
        if index % AGENTS_EVERY:
            _add_chat(draft, system, start_s)
        else:
            _add_agent(draft, shared, start_s)
    return draft.requests()


def _add_chat(draft: "_Draft", system: Runs, start_s: float) -> None:
    rng = draft.rng
    session = _Session(draft, system, CHAT_FIRST_TOKENS.draw_len(rng), start_s)
    for turn in itertools.count():
        answer_len = CHAT_ANSWER_TOKENS.draw_len(rng)
        session.ask(answer_len, "end_turn")
        if rng.random() >= CHAT_CONTINUES[min(turn, len(CHAT_CONTINUES) - 1)]:
            return
        added_len = answer_len + CHAT_ADDED_TOKENS.draw_len(rng)
        if session.prompt_len + added_len > CHAT_CONTEXT_TOKENS:
            return
        session.go_on(added_len)
        gap_s = CHAT_GAP_S.draw(rng)
        # the trace has no answer times: as in the loader, the whole gap is think time
        session.wait(gap_s, think_s=gap_s)


def _add_agent(draft: "_Draft", shared: Runs, start_s: float) -> None:
    rng = draft.rng
    first_len = max(AGENT_FIRST_TOKENS.draw_len(rng), AGENT_SHARED_TOKENS + 1)
    session = _Session(draft, shared, first_len, start_s)
    _play(draft, rng, session, shared, AGENT_TURNS.draw_len(rng))


def _play(
    draft: "_Draft", rng: np.random.Generator, session: "_Session", shared: Runs, num_turns: int
) -> None:
    # what the settings add is drawn apart, so that the sessions are the same without it
    config, extra = draft.config, draft.extra
    structure, tools = dict[str, float](), list[tuple[str, float]]()
    if isinstance(config, AgentsConfig):
        structure, tools = config.structure, sorted(config.tools.items())
    stop_reason, tool = "tool_use", 0
    for turn in range(1, num_turns + 1):
        ends = turn == num_turns or rng.random() < AGENT_ENDS_TURN[stop_reason]
        stop_reason = "end_turn" if ends else "tool_use"
        answer_len = AGENT_ANSWER_TOKENS[stop_reason].draw_len(rng)
        answer_s = AGENT_ANSWER_BASE_S + answer_len / AGENT_TOKENS_PER_S
        if tools and extra.random() >= SAME_TOOL:
            tool = int(extra.integers(len(tools)))
        name = tools[tool][0] if tools and not ends else ""
        samples = int(structure.get("samples", SAMPLES))
        is_sampled = extra.random() < structure.get("best_of", 0)
        session.ask(answer_len, stop_reason, tool=name, samples=samples if is_sampled else 1)
        if extra.random() < structure.get("retry", 0):
            session.wait(answer_s + RETRY_S, think_s=RETRY_S)
            session.ask(answer_len, stop_reason, tool=name)
        added_len = answer_len + AGENT_ADDED_TOKENS[stop_reason].draw_len(rng)
        full = session.prompt_len + added_len > AGENT_CONTEXT_TOKENS
        if full or rng.random() < structure.get("compact", AGENT_DROPS):
            kept_len = int(session.prompt_len * AGENT_KEPT.draw(rng))
            session.start_over(shared, max(kept_len, AGENT_SHARED_TOKENS + 1))
        else:
            session.go_on(added_len)
        think_s = AGENT_THINK_S[stop_reason].draw(rng)
        if name:
            think_s = float(extra.lognormal(np.log(tools[tool][1]), TOOL_SPREAD))
        is_spawning = not ends and rng is not extra and extra.random() < structure.get("spawn", 0)
        if is_spawning:
            think_s = RETRY_S
            answer_s += _spawn(draft, session, shared, answer_s)
        think_s = min(think_s, config.think_cap_s)
        session.wait(answer_s + think_s, think_s=think_s)


def _spawn(draft: "_Draft", session: "_Session", shared: Runs, answer_s: float) -> float:
    # adds the sub-agents that an answer starts; the session's next turn waits for all of them.
    # Returns the seconds until the last of them ends
    config, extra = draft.config, draft.extra
    assert isinstance(config, AgentsConfig)
    start_s = session.arrival_s + answer_s
    waits_for, ends_s = session.waits_for, [start_s]
    for _ in range(int(config.structure.get("agents", SUB_AGENTS))):
        task_len = AGENT_ADDED_TOKENS["end_turn"].draw_len(extra)
        agent = _Session(draft, shared, AGENT_SHARED_TOKENS + task_len, start_s, waits_for)
        _play(draft, extra, agent, shared, SUB_AGENT_TURNS.draw_len(extra))
        session.waits_for += agent.waits_for[:1]
        ends_s.append(agent.arrival_s)
    return max(ends_s) - start_s


class _Draft:
    def __init__(self, config: GeneratedConfig, seed: int) -> None:
        self.config = config
        self.rng = np.random.default_rng((seed, 0))
        self.extra = np.random.default_rng((seed, 2))
        self.turns: list[Turn] = []
        self._seed = seed
        self._next_id = 0

    def session_starts(self) -> list[float]:
        # a generator of its own, so that the sessions are the same at every rate
        rng = np.random.default_rng((self._seed, 1))
        gaps = rng.exponential(1 / self.config.session_rate, self.config.num_sessions)
        starts: list[float] = np.cumsum(gaps).tolist()
        return starts

    def new_ids(self, count: int) -> Runs:
        runs: Runs = []
        append_run(runs, self._next_id, count)
        self._next_id += count
        return runs

    def requests(self) -> list[Request]:
        # the answers take their ids from the next prompt, which repeats them
        return to_requests(
            self.turns,
            first_fresh=self._next_id,
            tokens=TraceTokens.reconstructed,
            limit=self.config.limit,
        )


class _Session:
    # `waits_for`: the turns whose answers the next turn waits for, first the one that it continues
    def __init__(
        self,
        draft: _Draft,
        shared: Runs,
        prompt_len: int,
        start_s: float,
        waits_for: tuple[int, ...] = (),
    ) -> None:
        self._draft = draft
        self._first = len(draft.turns)
        self.arrival_s = start_s
        self.waits_for = waits_for
        self._think_s = 0.0
        self.start_over(shared, prompt_len)

    def start_over(self, shared: Runs, prompt_len: int) -> None:
        self._prompt = list(shared)
        self.prompt_len = runs_len(shared)
        self._continues: int | None = None
        self._grow(prompt_len - self.prompt_len)

    def go_on(self, added_len: int) -> None:
        self._prompt = list(self._prompt)
        self._continues = self.waits_for[0]
        self._grow(added_len)

    def wait(self, gap_s: float, *, think_s: float) -> None:
        self.arrival_s += gap_s
        self._think_s = think_s

    def ask(self, answer_len: int, stop_reason: str, *, tool: str = "", samples: int = 1) -> None:
        turns = self._draft.turns
        turn = Turn(
            arrival_ns=to_ns(self.arrival_s),
            prompt=self._prompt,
            full_len=self.prompt_len,
            prompt_len=self.prompt_len,
            output_len=answer_len,
            session=self._first,
            waits_for=self.waits_for,
            continues=self._continues,
            think_ns=to_ns(min(self._think_s, self._draft.config.think_cap_s)),
            stop_reason=stop_reason,
            tool=tool,
        )
        self.waits_for = tuple(range(len(turns), len(turns) + samples))
        turns.extend([turn] * samples)

    def _grow(self, added_len: int) -> None:
        extend_runs(self._prompt, self._draft.new_ids(added_len))
        self.prompt_len += added_len

"""Published ways to keep Mamba states (docs/reproductions.md).

hicache run model=qwen3_next_80b cache.policy=experiments.studies.states:Sparse

`Sparse` places states by a dynamic program, as in Sparse Prefix Caching (arXiv 2605.05219). It and
`Even` keep `budget` states of a prompt, one of them at its end. `StatesAtOnce` writes states to
storage early, as SGLang's pull request 39856.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from hicache.cache.kinds import MAMBA
from hicache.cache.tiers.transfer import COPIED, Load
from hicache.cache.tree.entry import Entry
from hicache.policies.world import World

Depths = npt.NDArray[np.int64]


class Even:
    """Keeps states at equal distances, the best simple placement of the paper."""

    def __init__(self, world: World, *, budget: float = 4) -> None:
        self.budget = int(budget)

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        return [end * part // self.budget for part in range(1, self.budget + 1)]


class Sparse:
    """Keeps states where the prompts of the past would have computed the fewest tokens.

    A prompt's overlap depth is where it leaves what other prompts had. The past is the last `known`
    depths; the paper has their distribution given.
    """

    def __init__(self, world: World, *, budget: float = 4, known: float = 256) -> None:
        self.budget = int(budget)
        self._depths: deque[int] = deque(maxlen=int(known))

    def checkpoints(self, kind: str, start: int, end: int, branch: int | None) -> list[int]:
        past = np.array([depth for depth in self._depths if depth > start], np.int64)
        self._depths.append(start if branch is None else branch)
        return [*placed(np.minimum(past, end), start, self.budget - 1), end]


def placed(depths: Depths, start: int, budget: int) -> list[int]:
    """Return at most `budget` checkpoints after `start` that minimize what is computed again.

    An overlap of depth d computes the tokens from the last checkpoint up to d, and from `start` if
    there is none. So checkpoints lie at depths. The program has one round for each checkpoint:
    `cost[j]` is what the overlaps below place j compute if j is the last checkpoint so far.
    """
    places, counts = np.unique(depths, return_counts=True)
    if not budget or not len(places):
        return []
    ends = np.concatenate([[start], places, [places[-1] + 1]])
    number = np.concatenate([[0, 0], np.cumsum(counts)])  # of overlaps below each place
    tokens = np.concatenate([[0, 0], np.cumsum(counts * places)])
    between = tokens - tokens[:, None] - ends[:, None] * (number - number[:, None])
    between = np.where(np.tri(len(ends), dtype=bool), np.inf, between.astype(float))
    cost = between[0]  # of each place, from no checkpoint
    before: list[npt.NDArray[np.intp]] = []
    for _ in range(budget):
        choices = cost[:, None] + between
        choices[0] = between[0]  # one checkpoint fewer
        before.append(choices.argmin(axis=0))
        cost = choices.min(axis=0)
    found, place = [], len(ends) - 1
    for each in reversed(before):
        place = int(each[place])
        if place == 0:
            break
        found.append(int(ends[place]))
    return found[::-1]


class StatesAtOnce:
    """Writes a state to storage when the host gets it; `storage.write` decides on the rest."""

    def __init__(self, world: World) -> None:
        pass

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool | None:
        is_early = target == "storage" and load.kind == MAMBA and load.moment == COPIED
        return True if is_early else None

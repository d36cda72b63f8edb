"""Real memory: the pages and slots of every kind, on the device and in pinned host memory.

Each rank has its own pools (`rank_pools`) with its share of the heads. `hicache.kernels` makes
every move of whole items, over tables that are built once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import PageIds
from hicache.cache.tiers.transfer import Move
from hicache.cache.tree.node import DEVICE, HOST
from hicache.executor.real.rank_pools import PoolSpec, RankPools, count_of, there
from hicache.executor.real.transfers import Transfer
from hicache.kernels import send_ids, warm_up
from hicache.models import ModelConfig

POISON = 0xFF  # as floating-point numbers of any width: NaN


class Arrival(NamedTuple):
    """A copy into the device, from the host or (`is_within`, states only) from other slots."""

    is_within: bool
    move: Move


class Sent(NamedTuple):
    """An `Arrival` whose ids are checked and on the device that copies."""

    is_within: bool
    kind: int
    sources: Tensor
    targets: Tensor


class TorchPools:
    """The pools of all ranks of an engine; every operation runs on all ranks."""

    def __init__(self, spec: PoolSpec) -> None:
        if spec.model.recurrent_heads % spec.tp:
            raise ValueError(
                f"{spec.model.recurrent_heads} recurrent heads cannot be divided among "
                f"parallel.tp={spec.tp} ranks"
            )
        self._link_programs = spec.link_programs
        self.plane = spec.plane
        self.page_size = spec.page_size
        self.device = spec.device
        self.layer_groups = list(spec.layer_groups)
        self.ranks = [RankPools(spec, rank) for rank in range(spec.tp)]
        self.holders = _holders(spec.model)
        first = self.ranks[0]  # tables of one shape share compiled kernels
        transfers = [*first.saves.values(), *first.copies]
        transfers += [transfer for group in first.loads for transfer in group.values()]
        held = [each for each in transfers if each is not None]
        warm_up(*(each.plain for each in held if each.plain), page_size=spec.page_size)
        for each in held if spec.device.type == "cuda" else ():
            each.warm_up()
        self.num_full_pages = count_of(spec.device_counts, FULL)
        self.window_len = spec.model.window_len
        # ids of slots, on the device
        num_slots = max(count_of(spec.device_counts, MAMBA), 1)
        self.numbers = torch.arange(num_slots, dtype=torch.int32, device=spec.device)

    def send(self, arrivals: Sequence[Arrival]) -> list[Sent]:
        rank = self.ranks[0]  # the other ranks have equally many items and the same moves
        transfers = []
        for is_within, move in arrivals:
            groups = rank.copies if is_within else [each[move.kind] for each in rank.loads]
            transfers.append(next(each for each in groups if each is not None))
        ids = _sent(transfers, [arrival.move for arrival in arrivals])
        return [
            Sent(a.is_within, a.move.kind, *pair) for a, pair in zip(arrivals, ids, strict=True)
        ]

    def load(self, sent: Sequence[Sent], group: int) -> None:
        for is_within, kind, sources, targets in sent:
            for rank in self.ranks:
                transfer = rank.copies[group] if is_within else rank.loads[group][kind]
                if transfer is not None:
                    programs = None if is_within else self._link_programs
                    transfer.run((sources, targets), num_programs=programs)

    def save(self, moves: Sequence[Move]) -> None:
        first = [there(self.ranks[0].saves[move.kind]) for move in moves]
        for move, (sources, targets) in zip(moves, _sent(first, moves), strict=True):
            for rank in self.ranks:
                rank.save(move.kind, sources, targets)

    def copy_states(self, sources: PageIds, targets: PageIds) -> None:
        first = there(self.ranks[0].copies[-1])
        (ids,) = _sent([first], [Move(MAMBA, sources, targets)])
        for rank in self.ranks:
            there(rank.copies[-1]).run(ids)

    def clear_state(self, slot: PageIds) -> None:
        ids = self.numbers[int(slot[0]) :][:1]
        for rank in self.ranks:
            if rank.clears is not None:
                self.plane.copy_items(rank.clears, self.numbers[:1], ids)

    def poison(self, tier: int, kind: int, page_ids: PageIds) -> None:
        """Overwrite items with NaN, so that a read of freed items shows."""
        index = torch.tensor(page_ids).to(self.device)
        for rank in self.ranks:
            if tier == HOST and kind in rank.host:
                rank.host[kind][index.cpu()] = POISON
            elif tier == DEVICE and kind == MAMBA:
                for part in (*rank.taps, *rank.states):
                    part[index] = torch.nan
            elif tier == DEVICE and kind in rank.kv:
                rank.kv[kind][:, :, index] = torch.nan


def _sent(transfers: Sequence[Transfer], moves: Sequence[Move]) -> list[tuple[Tensor, Tensor]]:
    return send_ids(
        *(
            (transfer, _int32(move.sources), _int32(move.targets))
            for transfer, move in zip(transfers, moves, strict=True)
        )
    )


def _int32(page_ids: PageIds) -> Tensor:
    return torch.tensor(page_ids, dtype=torch.int32)


def _holders(config: ModelConfig) -> list[int]:
    """Return the index of each layer among the layers of its kind."""
    seen = dict.fromkeys((FULL, SWA, MAMBA), 0)
    holders = []
    for word in config.layer_words:
        if word == "-":
            holders.append(-1)
            continue
        kind = FULL if "F" in word else SWA if "S" in word else MAMBA
        holders.append(seen[kind])
        seen[kind] += 1
    return holders

"""Real memory: the pages and slots of every kind, on the device and in pinned host memory.

Each rank has its own pools (`rank_pools`) with its share of the heads. `hicache.kernels` makes
every move of whole items, over tables that are built once.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.pages import PageIds
from hicache.cache.tiers.transfer import Move
from hicache.cache.tree.node import DEVICE, HOST
from hicache.executor.real.rank_pools import (
    PoolSpec,
    RankPools,
    count_of,
    paged_kinds,
    there,
)
from hicache.kernels import send, send_ids, warm_up
from hicache.kernels.load import load_items, load_of, wait_for_layer
from hicache.models import ModelConfig

POISON = 0xFF  # as floating-point numbers of any width: NaN


class Arrival(NamedTuple):
    """Copies into the device that share one kernel launch.

    If `is_within` is True, `moves` copy Mamba states between slots of the device. If False, `moves`
    copy pages and states from the host.
    """

    is_within: bool
    moves: Sequence[Move]


class TorchPools:
    """The memory of all ranks of an engine, for KV pages and Mamba states.

    There are `tp` ranks for each pipeline stage. Every operation on pages runs on all of them.
    """

    def __init__(self, spec: PoolSpec) -> None:
        if spec.model.recurrent_heads % spec.tp:
            raise ValueError(
                f"{spec.model.recurrent_heads} recurrent heads cannot be divided among "
                f"parallel.tp={spec.tp} ranks"
            )
        self._link_programs = spec.link_programs
        self.plane = spec.plane
        self.model = spec.model
        self.page_size = spec.page_size
        self.device = spec.device
        sizes = spec.stage_layers or [len(spec.model.layer_words)]
        self.ranks = [RankPools(spec, rank) for rank in range(spec.tp * len(sizes))]
        self._stages = [
            self.ranks[start:][: spec.tp] for start in range(0, len(self.ranks), spec.tp)
        ]
        self._holding = [
            ranks for ranks, size in zip(self._stages, sizes, strict=True) for _ in range(size)
        ]
        # by layer: the kind of data that it caches, and its index among the layers of this kind in
        # its stage
        self.kinds, self.holders = _kinds_and_holders(spec.model, sizes)
        first = self.ranks[0]  # tables of one shape share compiled kernels
        held = [
            each for ranks in self._stages for each in ranks[0].saves.values() if each is not None
        ]
        # by layer: programs that have written their part, launches of all ranks that have landed
        num_layers = len(spec.model.layer_words)
        self.landed = torch.zeros(num_layers, 2, dtype=torch.int32, device=spec.device)
        if spec.device.type == "cuda":
            warm_up(*(each.plain for each in held if each.plain))
            for each in held:
                each.warm_up()
        tables = [each for ranks in self._stages for each in (ranks[0].loads, ranks[0].copies)]
        for loads in tables if spec.device.type == "cuda" else ():
            if loads is not None:
                load_items(loads, load_of(loads, {}), torch.zeros_like(self.landed))
                wait_for_layer(self.landed, 0, 0)
        every = paged_kinds(spec.model)
        self.windows = {kind: every[kind][1] for kind in first.kv}  # tokens; 0 means no window
        self.top_tokens = spec.model.top_tokens if first.index else 0
        # ids of slots and pages, on the device
        count = max(count_of(spec.device_counts, kind) for kind in (FULL, MAMBA))
        self.numbers = torch.arange(max(count, 1), dtype=torch.int32, device=spec.device)

    def of_layer(self, layer: int) -> Sequence[RankPools]:
        """Return the ranks that hold a layer."""
        return self._holding[layer]

    def load(self, arrivals: Sequence[Arrival]) -> None:
        """Copy pages and Mamba states into the device.

        Each `Arrival` is a group of copies, which one kernel launch carries out on each rank. The
        launch adds 1 to the `landed` counter of a layer when the layer is complete.
        """
        for is_within, moves in arrivals:
            ids = {each.kind: (_int32(each.sources), _int32(each.targets)) for each in moves}
            programs = None if is_within else self._link_programs
            for ranks in self._stages:
                tables = [there(rank.copies if is_within else rank.loads) for rank in ranks]
                load = load_of(tables[0], ids)  # all ranks have equally many items
                for table in tables:
                    self.plane.load_items(table, load, self.landed, num_programs=programs)

    def save(self, moves: Sequence[Move]) -> None:
        first = [there(self.ranks[0].saves[move.kind]) for move in moves]
        numbers = [(_int32(move.sources), _int32(move.targets)) for move in moves]
        ids = send_ids(*((each, *pair) for each, pair in zip(first, numbers, strict=True)))
        for move, (sources, targets) in zip(moves, ids, strict=True):
            for rank in self.ranks:
                rank.save(move.kind, sources, targets)

    def receive(self, source: "TorchPools", moves: Sequence[Move]) -> None:
        """Copy pages and states from the device memory of another engine.

        The tables are built anew each time: engines exchange KV once for each chunk of a prompt.
        """
        ids = {each.kind: (_int32(each.sources), _int32(each.targets)) for each in moves}
        for ours, theirs in zip(self.ranks, source.ranks, strict=True):
            table = there(ours.table("device", theirs))
            self.plane.load_items(
                table, load_of(table, ids), torch.zeros_like(self.landed), num_programs=None
            )

    def copy_states(self, sources: PageIds, targets: PageIds) -> None:
        tables = [plain for rank in self.ranks if (plain := there(rank.copies).plain)]
        (ids,) = send_ids((tables[0], _int32(sources), _int32(targets)))
        for table in tables:
            self.plane.copy_items(table, *ids)

    def clear_state(self, slot: PageIds) -> None:
        ids = self.numbers[int(slot[0]) :][:1]
        for rank in self.ranks:
            if rank.clears is not None:
                self.plane.copy_items(rank.clears, self.numbers[:1], ids)

    def poison(self, tier: int, kind: int, page_ids: PageIds) -> None:
        """Overwrite freed pages with NaN, so that a later read of them is noticed.

        `tier` is device or host. `kind` is full attention, sliding window or Mamba state.
        """
        host_index = torch.tensor(page_ids)
        (index,) = send([host_index], self.device)
        for rank in self.ranks:
            if tier == HOST and kind in rank.host:
                rank.host[kind][host_index] = POISON
            elif tier == DEVICE and kind == MAMBA:
                for part in (*rank.taps, *rank.states):
                    part[index] = torch.nan
            elif tier == DEVICE and kind in rank.kv:
                rank.kv[kind][:, :, index] = torch.nan
                for keys in rank.index.values() if kind == FULL else ():
                    keys[index] = torch.nan


def _int32(page_ids: PageIds) -> Tensor:
    return torch.tensor(page_ids, dtype=torch.int32)


def _kinds_and_holders(config: ModelConfig, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    kinds = list[int]()
    for word in config.layer_words:
        pages = (kind for kind, (letter, _) in paged_kinds(config).items() if letter in word)
        kinds.append(next(pages, MAMBA if {*"MD"} & {*word} else -1))
    stages = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return kinds, [
        kinds[stage.start : layer].count(kinds[layer]) for stage in stages for layer in stage
    ]

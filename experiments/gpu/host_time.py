"""Measure how long the CPU takes to launch the load-backs of a step, one by one or merged.

    python -m experiments.gpu.host_time

No GPU is needed: the launcher calls an imitated driver. The step has three load-backs of full
pages, window pages and a state, in four groups of layers on two ranks. Merged load-backs send the
page ids once. How often ids are sent over the link is counted, but not timed.
"""

import time

import torch
from torch import Tensor

from hicache.kernels import CopyTable, copy, copy_table, send_ids
from hicache.kernels.checks import check_copy_form, check_copy_ids
from hicache.workbench.stand_in import stand_in

NUM_LOAD_BACKS, NUM_GROUPS, NUM_RANKS = 3, 4, 2
COUNTS = (64, 16, 1)  # full pages, window pages, state slots of a load-back
NUM_ITEMS, ITEM_BYTES, LAYERS_OF_A_GROUP = 512, 2048, 2
REPEATS, WARM = 60, 3

Moves = list[tuple[Tensor, Tensor]]  # by component


def main() -> None:
    torch.set_num_threads(1)
    driver = stand_in()
    generator = torch.Generator().manual_seed(0)
    pools = torch.zeros(2, LAYERS_OF_A_GROUP, NUM_ITEMS, ITEM_BYTES, dtype=torch.uint8)
    tables = [copy_table(list(pools[0]), list(pools[1])) for _ in COUNTS]
    load_backs: list[Moves] = [
        [
            (
                torch.randperm(NUM_ITEMS, generator=generator)[:count].int(),
                torch.arange(count, dtype=torch.int32) + 100 * number,
            )
            for count in COUNTS
        ]
        for number in range(NUM_LOAD_BACKS)
    ]
    for name, run, num_sent in (
        ("each on its own", _apart, 2 * NUM_LOAD_BACKS * len(COUNTS) * NUM_GROUPS * NUM_RANKS),
        ("merged", _merged, 1),
    ):
        for _ in range(WARM):
            run(tables, load_backs)
        before, started = driver.num_launches, time.process_time()
        for _ in range(REPEATS):
            run(tables, load_backs)
        ms = (time.process_time() - started) / REPEATS * 1e3
        num_launches = (driver.num_launches - before) // REPEATS
        print(
            f"{name}: {ms:.2f} ms per step, {num_launches} kernel launches, page ids sent "
            f"{num_sent} times"
        )


def _apart(tables: list[CopyTable], load_backs: list[Moves]) -> None:
    for _ in range(NUM_GROUPS * NUM_RANKS):
        for moves in load_backs:
            for table, ids in zip(tables, moves, strict=True):
                check_copy_form(*ids, device=table.device)
                check_copy_ids(table, *ids)
                copy.copy_items(table, *ids)


def _merged(tables: list[CopyTable], load_backs: list[Moves]) -> None:
    joined = []
    for table, moves in zip(tables, zip(*load_backs, strict=True), strict=True):
        sources, targets = zip(*moves, strict=True)
        joined.append((table, torch.cat(sources), torch.cat(targets)))
    sent = send_ids(*joined)
    for _ in range(NUM_GROUPS * NUM_RANKS):
        for table, ids in zip(tables, sent, strict=True):
            copy.copy_items(table, *ids)


if __name__ == "__main__":
    main()

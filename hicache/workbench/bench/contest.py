"""All copy kernels side by side: ours, the peers and, with `--kernel`, the user's own.

Sizes range from one small item to as much as fits, in every direction; Mamba states move within the
device. The table gives the reason where a kernel declines. A kernel that moves wrong bytes is
excluded, and a series ends where a launch is too slow to repeat.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from random import Random

import torch

from hicache.workbench import contract
from hicache.workbench.bench import peers
from hicache.workbench.bench.measure import DIRECTIONS, GIB, KIB, MIB, UNTIMED, Transfer
from hicache.workbench.bench.session import Record, Session
from hicache.workbench.contract import CopyKernel
from hicache.workbench.own import faults_of

ITEM_BYTES = 32 * KIB  # a page of 16 tokens of 2 KiB, K or V, of one layer
SIZES = (*(KIB << k for k in range(2, 20, 2)), 512 * MIB)  # from 4 KiB
DRY_SIZES = (4 * KIB, 64 * KIB)
SLOW_S = 0.1  # a longer launch ends its series
REPEATS = 7


def contest(session: Session) -> None:
    kernels: dict[str, CopyKernel] = {"ours": contract.ours, **peers.PEERS, **session.kernels}
    for direction in DIRECTIONS:
        entered = dict(kernels)
        for size in SIZES if session.bench.on_gpu else DRY_SIZES:
            if size > session.bench.room(direction):
                break
            transfer = _of_size(session, direction, size)
            _enter(session, direction, transfer, entered)
    for num_slots in (1, 8) if session.bench.on_gpu else (1,):
        _enter(session, "states", _states(session, num_slots), dict(kernels))


def own_kernels(session: Session) -> None:
    """Check the user's own kernels, except copy kernels, and measure their bandwidth.

    The result of a kernel is compared with the kernel's own reference function. The bytes of all
    arguments count once each. Without a GPU the sizes are small.
    """
    device = session.bench.device
    for name, kernel in session.own.items():
        sizes = kernel.sizes if session.bench.on_gpu else {"small": kernel.draw(Random(0))}
        for what, each in sizes.items():
            orders = {False: nullcontext()}
            failure = ""
            try:
                for fault in faults_of(kernel, each, 0, device=device, orders=orders):
                    failure = failure or f"{fault.kind}: {fault.sentence}"
            except Exception as error:  # in the user's code
                failure = f"{type(error).__name__}: {error}"
            if failure:
                session.failures[name] = f"{what}: {failure}"
                break
            arguments = kernel.make(each, torch.Generator().manual_seed(0))
            arguments = {key: value.to(device) for key, value in arguments.items()}
            num_bytes = sum(value.nbytes for value in arguments.values())
            launch = partial(kernel.launch, **arguments)
            session.time("own", f"{name}, {what}", launch, num_bytes, repeats=REPEATS)


def table(cells: Iterable[Record]) -> str:
    lines: list[str] = []
    by_row: dict[tuple[str, int], dict[str, Record]] = {}
    remarks: dict[tuple[str, str], dict[str, None]] = {}  # by kernel and remark: its directions
    for cell in cells:
        direction, name = str(cell.parameters["direction"]), str(cell.parameters["kernel"])
        by_row.setdefault((direction, cell.num_bytes), {})[name] = cell
        if cell.case not in ("", "right"):
            remarks.setdefault((name, cell.case), {})[direction] = None
    names = list(dict.fromkeys(name for row in by_row.values() for name in row))
    width = max([14, *map(len, names)]) + 2
    shown = ""
    for (direction, size), row in by_row.items():
        if direction != shown:
            lines.append(f"\n{direction:12}" + "".join(f"{name:>{width}}" for name in names))
            shown = direction
        texts = [_text(row[name]) if name in row else "" for name in names]
        lines.append(f"{_size(size):12}" + "".join(f"{text:>{width}}" for text in texts))
    told = [f"{name} ({', '.join(where)}): {remark}" for (name, remark), where in remarks.items()]
    return "\n".join([*lines, "", *told])


def _enter(
    session: Session, direction: str, transfer: Transfer, kernels: dict[str, CopyKernel]
) -> None:
    size = transfer.num_bytes
    for name, kernel in list(kernels.items()):
        timing, remark = UNTIMED, ""
        try:
            launch = transfer.by(kernel)
            session.bench.verify(transfer, launch)
            timing = session.bench.timed(launch, repeats=REPEATS)
            remark = "right" if math.isnan(timing.p50_s) else ""
        except contract.DECLINED as error:
            remark = f"declined: {error}"
        except Exception as error:  # in foreign code: only its own cell is lost
            remark = f"{type(error).__name__}: {error}"[:200]
            where = f"{direction}, {_size(size)}"
            session.failures.setdefault(name, f"{where}: {remark}")
        if name in session.failures or timing.p50_s > SLOW_S:
            del kernels[name]
        its: dict[str, int | str] = {"direction": direction, "kernel": name}
        record = Record(op="contest", case=remark, num_bytes=size, timing=timing, parameters=its)
        session.cells.append(record)


def _of_size(session: Session, direction: str, size: int) -> Transfer:
    item = min(size // 2, ITEM_BYTES)
    row_bytes = min(item, 2 * KIB)
    layers = max(1, min(session.bench.num_layers, size // (2 * item)))
    page = item // row_bytes
    return session.bench.transfer(
        direction, page, row_bytes, num_bytes=size, num_layers=layers, other="layer_first"
    )


def _states(session: Session, num_slots: int) -> Transfer:
    src, dst = (session.bench.states(name, 2 * num_slots) for name in DIRECTIONS["device"])
    ids = torch.arange(num_slots, dtype=torch.int32, device=session.bench.device)
    return Transfer(src, dst, 2 * ids, 2 * ids + 1)


def _text(cell: Record) -> str:
    if math.isnan(cell.timing.p50_s):
        return cell.case.partition(":")[0]
    return f"{cell.timing.p50_s * 1e6:.1f} / {cell.gb_per_s:.1f}"


def _size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"

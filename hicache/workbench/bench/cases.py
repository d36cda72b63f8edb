"""Cases of the bench: functions that measure one question each, and judge its goals.

Cases about the whole machine are here, the others in `device_cases` and `link_cases`.
"""

import itertools
from collections.abc import Callable
from functools import partial

from hicache.kernels import copy
from hicache.kernels.copy import naive_copy_items_with_checksum as naive_checksum
from hicache.workbench.bench.contest import programs
from hicache.workbench.bench.device_cases import indices, pages, slots
from hicache.workbench.bench.link_cases import against_peers, interference, launches, links
from hicache.workbench.bench.measure import DIRECTIONS, KIB
from hicache.workbench.bench.session import Session


def ceilings(session: Session) -> None:
    bench = session.bench
    arenas = bench.arenas
    size = bench.device_bytes
    src, dst = arenas["device"][:size], arenas["device_target"][:size]
    session.ceilings["device"] = session.time(
        "ceiling", "device copy_", lambda: dst.copy_(src), size
    )
    size = bench.host_bytes
    for direction in ("to_device", "to_host"):
        from_, to = (arenas[name][:size] for name in DIRECTIONS[direction])
        by_engine = partial(to.copy_, from_, non_blocking=True)
        engine = session.time("ceiling", f"copy engine {direction}", by_engine, size)
        transfer = session.bench.transfer(direction, 64, 2 * KIB, contiguous=True)
        by_all = partial(transfer.launch, copy.num_sms(bench.device))
        sms = session.verified("ceiling", f"all SMs {direction}", transfer, by_all)
        session.ceilings[f"engine_{direction}"] = engine
        session.ceilings[f"sm_{direction}"] = sms
        session.notes[f"sm_over_engine_{direction}"] = sms / engine


def checksums(session: Session) -> None:
    for name in ("device", "to_host"):
        transfer = session.bench.transfer(name, 64, 2 * KIB)
        plain = session.verified("checksum", f"{name}, plain", transfer)
        ids = transfer.src_ids, transfer.dst_ids
        by = copy.copy_items_with_checksum if session.bench.on_gpu else naive_checksum
        launch = partial(by, transfer.table, *ids)
        rate = session.verified("checksum", f"{name}, with checksum", transfer, launch)
        session.notes[f"checksum_over_plain_{name}"] = rate / plain


def sweep(session: Session) -> None:
    """Measure the bandwidth of page copies for many page sizes, row sizes and program counts.

    Copies run within the device, from host to device, and from device to host.
    """
    pages = [(row, page, False) for row in (256, 2 * KIB) for page in (1, 4, 16, 64, 128)]
    pages.append((2 * KIB, 16, True))
    for direction, (row_bytes, page_size, contiguous) in itertools.product(DIRECTIONS, pages):
        is_link = direction != "device"
        num_bytes = session.bench.host_bytes // 4 if is_link else None
        transfer = session.bench.transfer(
            direction, page_size, row_bytes, num_bytes=num_bytes, contiguous=contiguous
        )
        session.bench.verify(transfer, transfer.launch)
        for num_programs in (2, 4, 16) if is_link else (None,):
            session.time(
                "sweep",
                direction,
                partial(transfer.launch, num_programs),
                transfer.num_bytes,
                repeats=5,
                page_size=page_size,
                row_bytes=row_bytes,
                contiguous=int(contiguous),
                num_programs=num_programs or 0,
            )


CASES: dict[str, Callable[[Session], None]] = {
    "ceilings": ceilings,
    "pages": pages,
    "links": links,
    "interference": interference,
    "slots": slots,
    "checksums": checksums,
    "indices": indices,
    "launches": launches,
    "sweep": sweep,
    "programs": programs,
    "peers": against_peers,  # last: foreign code may break the device
}

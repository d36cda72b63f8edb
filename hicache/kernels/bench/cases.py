"""The questions of the bench: each a function that measures, and judges the goals it can.

Those about the whole machine are here, the others in `device_cases` and `link_cases`.
"""

from collections.abc import Callable
from functools import partial

from hicache.kernels import checksum, copy, reference
from hicache.kernels.bench.contest import programs
from hicache.kernels.bench.device_cases import indices, pages, slots, windows
from hicache.kernels.bench.link_cases import (
    against_peers,
    interference,
    launches,
    links,
)
from hicache.kernels.bench.session import KIB, Session


def ceilings(session: Session) -> None:
    """What this machine can do: device copy, copy engine, and SMs across the link."""
    bench = session.bench
    arenas = bench.arenas
    size = bench.device_bytes
    src, dst = arenas["device"][:size], arenas["device_target"][:size]
    session.ceilings["device"] = session.time(
        "ceiling", "device copy_", lambda: dst.copy_(src), size
    )
    size = bench.host_bytes
    pairs = {"to_device": ("host", "device_target"), "to_host": ("device", "host_target")}
    for direction, (from_name, to_name) in pairs.items():
        from_, to = arenas[from_name][:size], arenas[to_name][:size]
        engine = session.time(
            "ceiling",
            f"copy engine {direction}",
            partial(to.copy_, from_, non_blocking=True),
            size,
        )
        transfer = session.across(direction, 64, 2 * KIB, contiguous=True)
        num_programs = copy.num_sms(bench.device)
        sms = session.verified(
            "ceiling",
            f"all SMs {direction}",
            transfer,
            partial(transfer.launch, num_programs),
            num_programs=num_programs,
        )
        session.ceilings[f"engine_{direction}"] = engine
        session.ceilings[f"sm_{direction}"] = sms
        session.notes[f"sm_over_engine_{direction}"] = sms / engine


def checksums(session: Session) -> None:
    """The checksum fused into the copy: what it costs within the device and across the link."""
    plane = checksum if session.bench.on_gpu else reference
    for name, transfer in (
        ("device", session.within_device(64, 2 * KIB, "layer_first", "page_first")),
        ("to_host", session.across("to_host", 64, 2 * KIB)),
    ):
        plain = session.verified("checksum", f"{name}, plain", transfer, transfer.launch)
        rate = session.verified(
            "checksum",
            f"{name}, with checksum",
            transfer,
            partial(
                plane.copy_items_with_checksum, transfer.table, transfer.src_ids, transfer.dst_ids
            ),
        )
        session.notes[f"checksum_over_plain_{name}"] = rate / plain


def sweep(session: Session) -> None:
    """Bandwidth against page size, row bytes, contiguity and programs, in every direction."""
    for direction in ("device", "to_device", "to_host"):
        for row_bytes in (256, 2 * KIB):
            for page_size in (1, 4, 16, 64, 128):
                for contiguous in (False, True):
                    if contiguous and (page_size, row_bytes) != (16, 2 * KIB):
                        continue
                    if direction == "device":
                        transfer = session.within_device(
                            page_size, row_bytes, "layer_first", "page_first"
                        )
                    else:
                        num_bytes = session.bench.host_bytes // 4
                        transfer = session.across(
                            direction, page_size, row_bytes,
                            num_bytes=num_bytes, contiguous=contiguous,
                        )  # fmt: skip
                    session.bench.verify(transfer, transfer.launch)
                    for num_programs in (None,) if direction == "device" else (2, 4, 16):
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
    "windows": windows,
    "checksums": checksums,
    "indices": indices,
    "launches": launches,
    "sweep": sweep,
    "programs": programs,
    "peers": against_peers,  # last: if code of others breaks the device, nothing comes after it
}

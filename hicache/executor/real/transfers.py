"""Back-ups of whole items to the host, with buffers copied as they are or coded."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hicache.executor.real.plane import Plane
from hicache.kernels import CopyTable, copy_table
from hicache.kernels.transcode import CodeTable, Format, code_table

Ids = tuple[Tensor, Tensor]


class Buffer(NamedTuple):
    layer: int  # of the model
    device: Tensor  # [item, ...]
    host: Tensor  # [item, bytes] uint8
    form: Format | None  # of the numbers on the host; None means the device's
    may_code: bool  # storage may keep these numbers in another format


class Transfer:
    """Copies pages, or Mamba states, from device to host memory.

    An instance serves one kind of page. `buffers` lists the parts of such a page, and must not be
    empty. A part may be converted to a smaller number format on the way.
    """

    def __init__(self, buffers: Sequence[Buffer], plane: Plane) -> None:
        self._plane = plane
        plain, coded = list[Buffer](), dict[torch.Size, list[Buffer]]()
        for each in buffers:
            if each.form is None:
                plain.append(each)
            else:
                coded.setdefault(each.device.shape, []).append(each)
        sides = [each.device for each in plain], [each.host for each in plain]
        self.plain: CopyTable | None = copy_table(*sides) if plain else None
        self.coded: list[CodeTable] = [
            code_table([each.device for each in same], [each.host for each in same], form)
            for same in coded.values()
            if (form := same[0].form)
        ]
        self.num_src_items = min(len(each.device) for each in buffers)
        self.num_dst_items = min(len(each.host) for each in buffers)
        self.in_place = False

    @property
    def device(self) -> torch.device:
        table = self.plain or self.coded[0]
        return table.device

    def run(self, ids: Ids) -> None:
        if self.plain is not None:
            self._plane.copy_items(self.plain, *ids)
        for table in self.coded:
            self._plane.encode_items(table, *ids)

    def run_with_checksum(self, ids: Ids) -> Tensor | None:
        """Copy pages from device to host, and return the checksum of each page.

        `ids` are the source ids and the target ids. The result is None if the copy converts
        numbers.
        """
        if self.plain is None or self.coded:
            self.run(ids)
            return None
        return self._plane.copy_items_with_checksum(self.plain, *ids)

    def warm_up(self) -> None:
        none = torch.zeros(0, dtype=torch.int32, device=self.device)
        self.run((none, none))

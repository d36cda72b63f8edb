"""Items in storage: with the bytes of the host, or in a format of storage's own.

A stored item concatenates the parts of all layers; coded parts are padded to 16 bytes.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from hicache.executor.real.transfers import Buffer
from hicache.kernels import checksums
from hicache.kernels.transcode import Format, coded_bytes, coded_of, wide_of
from hicache.models import PLAIN


def smaller_format(name: str, dtype: torch.dtype) -> Format | None:
    """Return the number format called `name`, if it takes fewer bytes than `dtype`; else None.

    The result is also None if `name` is `plain`, which means that numbers are not converted.
    """
    if name == PLAIN or Format[name].code_bits >= 8 * dtype.itemsize:
        return None
    return Format[name]


def bytes_of(shape: Sequence[int], dtype: torch.dtype, form: Format | None) -> int:
    return coded_bytes(shape, form) if form else torch.Size(shape).numel() * dtype.itemsize


class StoredPages:
    """Converts pages between the number format of host memory and that of storage, on the CPU.

    Args:
        buffers: for each kind of page, the parts of a page in order, such as K and V of each layer.
        form: name of storage's number format. The name `plain` means the format of host memory.
    """

    def __init__(self, buffers: Mapping[int, Sequence[Buffer]], form: str) -> None:
        self.is_own = form != PLAIN
        self._buffers = buffers
        self._form = form

    def page_bytes(self, kind: int) -> int:
        return sum(map(self._bytes_of, self._buffers[kind]))

    def layout(self, kind: int) -> list[str]:
        lines = []
        for each in self._buffers[kind]:
            form = self._form_of(each)
            coded = f" as {form.name}" if form else ""
            lines.append(f"{each.layer} {each.device.dtype} {tuple(each.device.shape[1:])}{coded}")
        return lines

    def packed(self, kind: int, page: memoryview) -> tuple[memoryview, int]:
        item, parts = torch.from_numpy(np.asarray(page)), []
        for each, part in zip(self._buffers[kind], self._split(kind, item), strict=True):
            form = self._form_of(each)
            if form is not None:
                wide = part.view(each.device.dtype).view(1, *each.device.shape[1:])
                (coded,) = coded_of(wide, form)
                part = coded.new_zeros(self._bytes_of(each))
                part[: len(coded)] = coded
            parts.append(part)
        stored = torch.cat(parts)
        return memoryview(stored.numpy()), checksum_of(stored)  # type: ignore[arg-type]

    def unpack(self, kind: int, stored: memoryview, page: memoryview) -> None:
        item, source = torch.from_numpy(np.asarray(page)), torch.from_numpy(np.asarray(stored))
        sizes = list(map(self._bytes_of, self._buffers[kind]))
        places = zip(self._split(kind, item), torch.split(source, sizes), strict=True)
        for each, (target, part) in zip(self._buffers[kind], places, strict=True):
            form = self._form_of(each)
            if form is not None:
                wide = wide_of(part[None], each.device.shape[1:], form).to(each.device.dtype)
                part = wide.flatten().view(torch.uint8)
            target.copy_(part)

    def _split(self, kind: int, item: Tensor) -> list[Tensor]:
        ends = accumulate((each.host.shape[1] for each in self._buffers[kind]), initial=0)
        return [item[first:end] for first, end in pairwise(ends)]

    def _form_of(self, buffer: Buffer) -> Format | None:
        if self.is_own:
            return smaller_format(self._form, buffer.device.dtype) if buffer.may_code else None
        return buffer.form

    def _bytes_of(self, buffer: Buffer) -> int:
        return bytes_of(buffer.device.shape[1:], buffer.device.dtype, self._form_of(buffer))


def checksum_of(item: Tensor) -> int:
    return int(checksums(item.view(torch.int64)[None]))

"""Recurrent layers by flash-linear-attention's chunked kernels, behind the interface of `scan`.

Needs the package fla-core. The kernels compute chunks of 64 tokens that begin at the first token of
a sequence and again at each captured length. So a state captured after a multiple of 64 tokens has
the bits of a call that ends there, and a later call that begins there goes on with the bits of one
call over all tokens. At other lengths the results differ by rounding.

Sizes: R tokens, H heads of D values, N keys, K taps of the convolution, S segments (the tokens of a
sequence between two captured lengths).
"""

import functools
import sys
from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hicache.kernels.scan import ScanWeights

CHUNK = 64
LOG2_E = 1.4426950408889634  # the kernels take powers of 2


def fla_scan(
    taps: Tensor,
    states: Tensor,
    sequences: Tensor,
    ends: Tensor,
    inputs: Tensor,
    gates: Tensor,
    weights: ScanWeights,
    *,
    block: int,
) -> Tensor:
    """Run one recurrent layer over the next tokens of sequences, and save states on the way.

    Arguments and result are those of `scan`. PyTorch computes the convolution. Products have the
    dtype of `inputs`. The host reads `sequences` and `ends`, so it waits for the device.

    Raises:
        ImportError: fla-core is not installed.
    """
    saves, segments, lines, num_before = ends.tolist(), list[_Segment](), list[Tensor](), 0
    num_taps, (keys, dim) = taps.shape[2], states.shape[2:]
    for source, first_row, first_end, after_ends, _ in sequences.tolist():
        before, start = source, 0
        for turn, (end, slot) in enumerate(saves[first_end:after_ends]):
            where = first_row + start, num_before + start
            segments.append(_Segment(turn, before, slot, end - start, *where))
            before, start = slot, end
        lines += [taps[source].transpose(0, 1), inputs[first_row : first_row + start]]
        num_before += num_taps + start
    segments.sort(key=lambda each: each.turn)
    line = torch.cat(lines)
    places = [torch.arange(each.place, each.place + each.length) for each in segments]
    rows = [torch.arange(each.row, each.row + each.length) for each in segments]
    place, row = (torch.cat(each).to(states.device) for each in (places, rows))
    mixed = sum(line[place + tap].float() * weight for tap, weight in enumerate(weights.conv))
    for each in segments:
        end = each.place + each.length
        taps[each.after] = line[end : end + num_taps].transpose(0, 1)
    parts = torch.split(functional.silu(mixed), [dim, keys, keys], dim=-1)
    out = torch.zeros(*inputs.shape[:2], dim, device=states.device)
    out[row] = _chunked(states, segments, parts, gates[row].float(), weights, inputs.dtype)
    return out


class _Segment(NamedTuple):
    turn: int  # index among the segments of its sequence
    before: int  # slot of the state that is read
    after: int  # slot of the state that is written
    length: int
    row: int  # of its first token
    place: int  # of its first token's first tap in the line of all sequences: taps, then inputs


def _chunked(
    states: Tensor,
    segments: Sequence[_Segment],  # by turn
    parts: tuple[Tensor, ...],
    gates: Tensor,
    weights: ScanWeights,
    dtype: torch.dtype,
) -> Tensor:
    fla, (values, keys, queries) = library(), parts
    skip = weights.skip
    is_delta = skip is None
    delta = functional.softplus(gates[:, -1])
    added = values if is_delta else delta[..., None] * values
    if is_delta:
        keys, queries = (functional.normalize(each, dim=-1) for each in (keys, queries))
    q, k, v = (each.to(dtype)[None].contiguous() for each in (queries, keys, added))
    every = _bounds(segments, states.device)
    options = {"chunk_size": CHUNK, "cu_seqlens": every}
    g = fla.cumsum((-weights.decay * delta)[None], scale=LOG2_E, **options)
    if is_delta:
        strength = gates[:, 0].sigmoid().to(dtype)[None]
        w, v, _ = fla.intra(k=k, v=v, g=g, beta=strength, **options)
    of_chunks, of_rows, start = [], [], 0
    for _, its in groupby(segments, lambda each: each.turn):  # a turn reads states of the last one
        now = list(its)
        span = slice(start, start + sum(each.length for each in now))
        start, bounds = span.stop, _bounds(now, states.device)
        both = {"k": k[:, span], "g": g[:, span], "cu_seqlens": bounds, "chunk_size": CHUNK}
        before, new = states[[each.before for each in now]], v[:, span]
        if is_delta:
            given = {"w": w[:, span], "u": new, "initial_state": before}
            h, new, after = fla.delta(**given, **both, output_final_state=True)
        else:
            h, after = fla.plain(v=new, h0=before, **both, output_final_state=True)
        states[[each.after for each in now]] = after
        of_chunks.append(h)
        of_rows.append(new)
    v, h = torch.cat(of_rows, dim=1), torch.cat(of_chunks, dim=1)
    out: Tensor = fla.outputs(q=q, k=k, v=v, h=h, g=g, scale=1.0, **options)[0].float()
    return out if skip is None else out + skip[:, None] * values


def _bounds(segments: Sequence[_Segment], device: torch.device) -> Tensor:
    return torch.tensor([0, *(each.length for each in segments)], device=device).cumsum(0)


@functools.cache
def library() -> SimpleNamespace:
    """Import the kernels. Each keeps its first configuration, because others round differently.

    Raises:
        ImportError: fla-core is not installed.
    """
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_h import chunk_fwd_h
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from fla.ops.utils import chunk_local_cumsum

    for each in autotuned():
        each.configs = each.configs[:1]
    return SimpleNamespace(
        cumsum=chunk_local_cumsum,
        intra=chunk_gated_delta_rule_fwd_intra,
        delta=chunk_gated_delta_rule_fwd_h,
        plain=chunk_fwd_h,
        outputs=chunk_fwd_o,
    )


def autotuned() -> list[Any]:
    """Return the autotuned kernels of all modules of the library that are imported."""
    found = []
    for name in [name for name in sys.modules if name.startswith("fla.ops.")]:
        for each in vars(sys.modules[name]).values():
            while hasattr(each, "fn"):  # a kernel, or what is wrapped around it
                found += [each] * hasattr(each, "configs")
                each = each.fn
    return found

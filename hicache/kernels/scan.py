"""Recurrent scan of new tokens: convolution, state update, and capture of states into slots.

One launch computes any number of tokens of each of several sequences. It reads the state of a
sequence from a slot and writes states into slots, after each length that the caller names. So a
prefill need not end at a checkpoint. (Outputs and a few counters are set to zero before.) A token's
result does not depend on where a launch begins or ends, or on the other sequences: each program
walks the tokens of one sequence and head one by one, with a part of the state, some of the D
values, in registers.

The convolution covers K inputs; a slot keeps the last K - 1 of them (*taps*) beside the state.

Sizes: R tokens, H heads of D values, N keys, K taps of the convolution, P slots, B sequences,
E ends.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

TILE = 4096  # elements of a state that a program holds, in registers
DELTA, SSD = (tl.constexpr(number) for number in range(2))  # `RULE` of the kernel


class ScanWeights(NamedTuple):
    """Weights of a recurrent layer: of Mamba-2 if it has `skip`, else of the gated delta rule."""

    conv: Tensor  # [K, H, D + 2 · N]
    decay: Tensor  # [H] fp32
    skip: Tensor | None  # [H] fp32

    def part(self, heads: slice | Tensor) -> "ScanWeights":
        skip = None if self.skip is None else self.skip[heads]
        return ScanWeights(self.conv[:, heads], self.decay[heads], skip)


@triton.jit
def _input(
    inputs_ptr, taps_ptr, row, head, channel, row_stride,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Load the inputs of one token, [heads, channels].

    Tokens before the first one of the launch (`row` < 0) are read from the slot's taps, the last
    inputs of the convolution.
    """
    here = tl.where(row >= 0, CHANNELS, 0)
    where = head[:, None] * CHANNELS + channel[None, :]
    new = tl.load(inputs_ptr + row.to(tl.int64) * row_stride + where, channel[None, :] < here, 0.0)
    where = (head[:, None] * TAPS + row + TAPS) * CHANNELS + channel[None, :]
    old = tl.load(taps_ptr + where, channel[None, :] >= here, 0.0)
    return new.to(tl.float32) + old.to(tl.float32)


@triton.jit
def _convolved(
    inputs_ptr, taps_ptr, conv_ptr, row, head, channel, row_stride, conv_stride,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    where = conv_ptr + head[:, None] * CHANNELS + channel[None, :]
    first = _input(inputs_ptr, taps_ptr, row - TAPS, head, channel, row_stride, TAPS, CHANNELS)
    mixed = first * tl.load(where)
    for tap in tl.static_range(1, TAPS + 1):
        each = _input(
            inputs_ptr, taps_ptr, row - TAPS + tap, head, channel, row_stride, TAPS, CHANNELS
        )
        mixed += each * tl.load(where + tap * conv_stride)
    return mixed / (1.0 + tl.exp(-mixed))


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _unit(x):
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), 1e-12)[:, None]


@triton.jit
def _save_taps(
    inputs_ptr, taps_ptr, to_ptr, row, head, channel, row_stride,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    for tap in tl.static_range(TAPS):  # ascending: the slot may be the one that is read
        each = _input(
            inputs_ptr, taps_ptr, row - TAPS + tap, head, channel, row_stride, TAPS, CHANNELS
        )
        tl.debug_barrier()  # all threads have read
        where = (head[:, None] * TAPS + tap) * CHANNELS + channel[None, :]
        tl.store(to_ptr + where, each.to(to_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=["row_stride", "gate_stride"],
    do_not_specialize_on_alignment=["sequences_ptr", "ends_ptr", "ended_ptr"],
)
def _scan_kernel(
    taps_ptr,  # [P, H, K - 1, D + 2 N]
    state_ptr,  # [P, H, N, D] fp32
    sequences_ptr,  # [B, 5]: slot that is read, first row, first and last end, position (unused)
    ends_ptr,  # [E, 2]: tokens after which to write, and the slot
    inputs_ptr,  # [R, H, D + 2 N]
    gates_ptr,  # [R, G, H]; SSD has one gate, the delta rule two
    conv_ptr,  # [K, H, D + 2 N]
    decay_ptr,  # [H]
    skip_ptr,  # [H]
    out_ptr,  # [R, H, D]
    ended_ptr,  # [B, H / HEADS] int32, zeros: programs that have read the taps
    row_stride,
    gate_stride,  # from token to token
    head_stride,  # from gate to gate
    conv_stride,
    taps_slot_stride,
    state_slot_stride,
    RULE: tl.constexpr,
    NUM_HEADS: tl.constexpr,  # H
    HEADS: tl.constexpr,  # of a program
    KEYS: tl.constexpr,  # N
    DIM: tl.constexpr,  # D
    DIMS: tl.constexpr,  # of a program
    TAPS: tl.constexpr,  # K - 1
):
    channels: tl.constexpr = DIM + 2 * KEYS
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    dim, key = tl.program_id(1) * DIMS + tl.arange(0, DIMS), tl.arange(0, KEYS)
    sequence = sequences_ptr + tl.program_id(2) * 5
    source, first_row = tl.load(sequence).to(tl.int64), tl.load(sequence + 1).to(tl.int64)
    first_end, after_ends = tl.load(sequence + 2), tl.load(sequence + 3)
    inputs_ptr += first_row * row_stride
    gates_ptr += first_row * gate_stride
    out_ptr += first_row * (NUM_HEADS * DIM)
    taps_from = taps_ptr + source * taps_slot_stride
    place = (head[:, None, None] * KEYS + key[None, :, None]) * DIM + dim[None, None, :]
    state = tl.load(state_ptr + source * state_slot_stride + place)
    decay = tl.load(decay_ptr + head)
    row, end_of = tl.zeros((), tl.int32), first_end
    while end_of < after_ends:
        end = tl.load(ends_ptr + end_of * 2)
        while row < end:
            values = _convolved(
                inputs_ptr, taps_from, conv_ptr, row, head, dim, row_stride, conv_stride,
                TAPS, channels,
            )  # fmt: skip
            keys = _convolved(
                inputs_ptr, taps_from, conv_ptr, row, head, DIM + key, row_stride, conv_stride,
                TAPS, channels,
            )  # fmt: skip
            queries = _convolved(
                inputs_ptr, taps_from, conv_ptr, row, head, DIM + KEYS + key, row_stride,
                conv_stride, TAPS, channels,
            )  # fmt: skip
            gates = gates_ptr + row.to(tl.int64) * gate_stride + head
            gate = tl.load(gates).to(tl.float32)
            if RULE == SSD:
                delta = _softplus(gate)
                added = delta[:, None] * values
                state = state * tl.exp(-decay * delta)[:, None, None]
            else:
                keys, queries = _unit(keys), _unit(queries)
                faded = _softplus(tl.load(gates + head_stride).to(tl.float32))
                state = state * tl.exp(-decay * faded)[:, None, None]
                error = values - tl.sum(keys[:, :, None] * state, axis=1)
                added = error / (1.0 + tl.exp(-gate))[:, None]
            state += keys[:, :, None] * added[:, None, :]
            out = tl.sum(queries[:, :, None] * state, axis=1)
            if RULE == SSD:
                out += tl.load(skip_ptr + head)[:, None] * values
            where = row.to(tl.int64) * (NUM_HEADS * DIM) + head[:, None] * DIM + dim[None, :]
            tl.store(out_ptr + where, out)
            row += 1
        slot = tl.load(ends_ptr + end_of * 2 + 1).to(tl.int64)
        to = taps_ptr + slot * taps_slot_stride
        _save_taps(inputs_ptr, taps_from, to, row, head, dim, row_stride, TAPS, channels)
        tl.store(state_ptr + slot * state_slot_stride + place, state)
        end_of += 1
    # the programs of a head share the taps of keys and queries: the last one writes them
    tl.debug_barrier()
    others = tl.num_programs(1) - 1
    ended_ptr += tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(ended_ptr, 1, sem="acq_rel", scope="gpu") == others:
        end_of = first_end
        while end_of < after_ends:
            row = tl.load(ends_ptr + end_of * 2)
            to = taps_ptr + tl.load(ends_ptr + end_of * 2 + 1).to(tl.int64) * taps_slot_stride
            for part in tl.static_range(2):
                channel = DIM + part * KEYS + key
                _save_taps(
                    inputs_ptr, taps_from, to, row, head, channel, row_stride, TAPS, channels
                )
            end_of += 1


def scan(
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

    The layer is a short convolution followed by a recurrence. Its taps are the last inputs of the
    convolution. A later call can go on where this one ends if the last end of a sequence is
    (number of its tokens, slot that is read). For one sequence of R tokens from `position` on:

        scan(taps, states, torch.tensor([[slot, 0, 0, 1, position]]).int(),
             torch.tensor([[R, slot]]).int(), inputs, gates, weights, block=page_size)

    Args:
        taps: [P, H, K - 1, D + 2 · N], the pool of taps, one item per slot.
        states: [P, H, N, D] fp32, the pool of states, one item per slot.
        sequences: [B, 5] int32 on the device, by sequence: the slot that holds taps and state
            before its first token; its first row; its first row of `ends`, and the row after its
            last one; the position of its first token, which only the reference uses.
        ends: [E, 2] int32 on the device, pairs of a number of tokens and a slot. The slot gets the
            taps and the state after that many tokens of the sequence. The numbers of a sequence
            ascend; the last one is the number of its tokens.
        inputs: [R, H, D + 2 · N]: values, keys and queries before the convolution. The rows of a
            sequence are adjacent. Rows of no sequence are ignored.
        gates: [R, 1, H], or [R, 2, H] for the delta rule: strength and decay.
        weights: D and N are powers of two.
        block: number of tokens that the reference computes at once. Only the reference uses it.

    Returns:
        [R, H, D] fp32, zeros in rows of no sequence.

    Raises:
        ValueError: states are not fp32, or a size is not a power of two.
    """
    num_rows, num_heads, channels = inputs.shape
    keys, dim = states.shape[2:]
    if states.dtype != torch.float32 or keys & (keys - 1) or dim & (dim - 1):
        got = f"{tuple(states.shape)} {states.dtype}"
        raise ValueError(f"fp32 states with powers of two as sizes wanted, got {got}")
    if inputs.stride()[1:] != (channels, 1) or weights.conv.stride()[1:] != (channels, 1):
        raise ValueError("inputs and convolution must be contiguous but for the first axis")
    out = torch.zeros(num_rows, num_heads, dim, dtype=torch.float32, device=states.device)
    ended = torch.zeros(len(sequences), num_heads, dtype=torch.int32, device=states.device)
    tensors = taps, states, sequences, ends, inputs, gates
    strides = inputs.stride(0), gates.stride(0), gates.stride(1), weights.conv.stride(0)
    constants = {
        "RULE": (DELTA if weights.skip is None else SSD).value,
        "NUM_HEADS": num_heads,
        # the interpreter pays for each operation, so there one program has all heads
        "HEADS": num_heads if triton.knobs.runtime.interpret else 1,
        "KEYS": keys,
        "DIM": dim,
        "DIMS": min(dim, TILE // keys),
        "TAPS": taps.shape[2],
        "num_warps": 4,
    }
    slots = taps.stride(0), states.stride(0)
    grid = num_heads // constants["HEADS"], dim // constants["DIMS"], len(sequences)
    with torch.cuda.device_of(states):
        _scan_kernel[grid](*tensors, *weights, out, ended, *strides, *slots, **constants)
    return out


def naive_scan(
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
    """PyTorch reference for the kernel `scan`, with the same arguments and result.

    It computes blocks of `block` tokens; the first begins at position 0 of the sequence. Rows of a
    block that are not among the given tokens are padding. So the rounding of a result depends only
    on the token's place in its block, not on how a prompt is cut into calls.
    """
    out = states.new_zeros(*inputs.shape[:2], states.shape[-1])
    for source, first_row, first_end, after_ends, start in sequences.tolist():
        saves = [(int(end), int(slot)) for end, slot in ends[first_end:after_ends].tolist()]
        rows = slice(first_row, first_row + saves[-1][0])
        given = inputs[rows], gates[rows], weights
        out[rows] = _scan_one(taps, states, source, saves, *given, start=start, block=block)
    return out


def _scan_one(
    taps: Tensor, states: Tensor, source: int, saves: Sequence[tuple[int, int]], inputs: Tensor,
    gates: Tensor, weights: ScanWeights, *, start: int, block: int,
) -> Tensor:  # fmt: skip
    line = torch.cat([taps[source].transpose(0, 1), inputs])  # [K - 1 + R, H, channels]
    state, num_taps, num_rows = states[source], taps.shape[2], len(inputs)
    num_heads, num_keys, dim = state.shape
    sizes = [dim, num_keys, num_keys]
    if num_heads == 1:  # twice: torch rounds otherwise if there is one head
        line, gates, state = line.repeat(1, 2, 1), gates.repeat(1, 1, 2), state.repeat(2, 1, 1)
        weights = weights.part(torch.tensor([0, 0], device=line.device))
    outputs = []
    for first in range(start // block * block, start + num_rows, block):
        rows = slice(max(start - first, 0), min(start + num_rows - first, block))
        begin = first + rows.start - start  # index of the first token among the inputs
        padded = line.new_zeros(num_taps + block, *line.shape[1:])
        end_of_rows = begin + rows.stop - rows.start
        padded[rows.start : rows.stop + num_taps] = line[begin : end_of_rows + num_taps]
        mixed = padded[:block] * weights.conv[0]
        for tap in range(1, num_taps + 1):
            mixed = mixed + padded[tap : tap + block] * weights.conv[tap]
        strengths = gates.new_zeros(block, *gates.shape[1:])
        strengths[rows] = gates[begin:end_of_rows]
        parts = torch.split(_in_double(functional.silu, mixed).to(state.dtype), sizes, dim=-1)
        rule = _delta if weights.skip is None else _ssd
        of_rows, after = rule(weights, strengths.to(state.dtype), parts, state, rows)
        state = after[rows.stop - 1]
        outputs.append(of_rows[rows, :num_heads])
        for end, slot in saves:
            if begin < end <= end_of_rows:
                states[slot] = after[rows.start + end - begin - 1][:num_heads]
    for end, slot in saves:
        taps[slot] = line[end : end + num_taps, :num_heads].transpose(0, 1)
    return torch.cat(outputs)


def _ssd(
    weights: ScanWeights, gates: Tensor, inputs: tuple[Tensor, ...], state: Tensor, rows: slice
) -> tuple[Tensor, list[Tensor]]:
    """Compute Mamba-2's recurrence on the tokens `rows`; return the outputs and all states.

    With each token, the state decays by a scalar per head, and an outer product is added.
    """
    values, keys, queries = inputs
    assert weights.skip is not None
    delta = _in_double(functional.softplus, gates[:, 0])
    decay = _in_double(torch.exp, -weights.decay * delta)[..., None, None]
    added = keys[..., None] * (delta[..., None] * values)[..., None, :]
    states = list(torch.zeros_like(added))
    for row in range(rows.start, rows.stop):
        states[row] = state = torch.addcmul(added[row], decay[row], state)
    outputs = (queries[..., None] * torch.stack(states)).sum(-2)
    return outputs + weights.skip[:, None] * values, states


def _delta(
    weights: ScanWeights, gates: Tensor, inputs: tuple[Tensor, ...], state: Tensor, rows: slice
) -> tuple[Tensor, list[Tensor]]:
    """Compute the gated delta rule on the tokens `rows`; return the outputs and all states.

    Each token moves the state's output for its key towards its value.
    """
    values, keys, queries = inputs
    keys = functional.normalize(keys, dim=-1)[..., None]
    queries = functional.normalize(queries, dim=-1)[..., None]
    strength = _in_double(torch.sigmoid, gates[:, 0])[..., None]
    faded = _in_double(functional.softplus, gates[:, 1])
    decay = _in_double(torch.exp, -weights.decay * faded)[..., None, None]
    states = list(torch.zeros_like(keys * values[..., None, :]))
    for row in range(rows.start, rows.stop):
        state = decay[row] * state
        error = values[row] - (keys[row] * state).sum(-2)
        states[row] = state = torch.addcmul(state, keys[row], (strength[row] * error)[:, None])
    return (queries * torch.stack(states)).sum(-2), states


def _in_double(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # In single precision, torch rounds differently on some processors if a tensor has another
    # number of heads or other strides.
    return function(x.double()).to(x.dtype)

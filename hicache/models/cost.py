"""Duration of a forward step, from the shapes of a model and the rate tables of a machine.

A step costs a constant, some short kernels per layer, and the sum over its operations of max(flops
/ rate, bytes / bandwidth). A step that only decodes replays a captured graph, whose kernels start
sooner. Weights are read once per step. Tensor parallelism divides weights and
heads and adds all-reduces. Between the matrices of a layer, short kernels (norms, rotary embedding,
activation) read and write activations at memory bandwidth.

The cost of a step is a function of its arguments only. `decode_ends_ns` is bit-identical to
repeated calls of `forward_ns`: both sum contexts as integers and do the same operations on the same
doubles in the same order.
"""

from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from math import ceil, fsum, inf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache.models.machines import HardwareConfig, RateTable
from hicache.models.shapes import LayerKind, ModelConfig

CHUNK_TOKENS = 8192  # default chunk of an isolated prefill
LAYER_KERNELS = 10  # per layer without experts: norms, matrices, attention, cache, activation
EXPERT_KERNELS = 10  # per layer of experts: routing, sorting, two matrices, activation, sum
# the busiest of `ep` groups of experts takes ep ** IMBALANCE times as long as the mean group
# (aiconfigurator-core 0.12.0, H100, 4,096 tokens of power-law routing: 2.4 times of 8 groups)
IMBALANCE = 0.4


class ForwardCost(NamedTuple):
    """The duration of one step in ns.

    `total_ns` is `compute_ns` plus `load_stall_ns`. During `load_stall_ns`, the step waits for KV
    that is being loaded from the host.
    """

    total_ns: int
    compute_ns: int
    load_stall_ns: int


class Rates:
    """Looks up rates in a table of sizes and rates, with linear interpolation."""

    def __init__(self, table: RateTable, name: str) -> None:
        if not table.size:
            raise ValueError(
                f"hardware.{name} must have at least one size and rate, got an empty table"
            )
        self._sizes = [float(size) for size in table.size]
        rates = [float(rate) for rate in table.rate]
        pairs = list(zip(self._sizes, rates, strict=True))
        slopes = [(b - a) / (end - size) for (size, a), (end, b) in pairwise(pairs)]
        # the straight pieces of the curve: one before each size, and one after the last
        self._rates = [rates[0], *rates]
        self._firsts = [0.0, *self._sizes]
        self._slopes = [0.0, *slopes, 0.0]
        self._ends = [*self._sizes, inf]

    def at(self, size: float) -> float:
        """Return the rate at `size`.

        Between two sizes of the table, the rate is linear. Outside the table, it is constant.
        """
        i = bisect_right(self._sizes, size)
        return self._rates[i] + (size - self._firsts[i]) * self._slopes[i]

    def line(self, size: float) -> tuple[float, float, float, float]:
        """Return the straight piece of the rate curve from `size` on, as (rate, first, slope, end).

        For each x from `size` to `end`, the rate at x is rate + (x - first) * slope.
        """
        i = bisect_right(self._sizes, size)
        return self._rates[i], self._firsts[i], self._slopes[i], self._ends[i]


class CostModel:
    """Predicts the duration of the steps of one model on one machine.

    `tp` devices share the model by tensor parallelism, and `ep` is the expert-parallel size. The
    weights lie in the memory of `pp` times as many. With
    `pads_chunks`, full attention to the tokens before a chunk takes as long as for the longest
    chunk of the step. With `is_asynchronous`, the processor's time for requests passes beside that
    of the device; else it is added.

    Raises:
        ValueError: the machine has too few devices, or their memory is too small for the weights.
    """

    def __init__(
        self,
        model: ModelConfig,
        hardware: HardwareConfig,
        *,
        tp: int,
        pp: int = 1,
        ep: int = 1,
        pads_chunks: bool = False,
        is_asynchronous: bool = False,
    ) -> None:
        if pp > 1 and tp * pp > hardware.num_devices:
            raise ValueError(
                f"parallel.tp times parallel.pp must be at most the {hardware.num_devices} devices "
                f"of {hardware.name}, got {tp} times {pp}"
            )
        if not 1 <= tp <= hardware.num_devices:
            raise ValueError(
                f"parallel.tp must lie between 1 and the {hardware.num_devices} devices of "
                f"{hardware.name}, got {tp}"
            )
        self.model = model
        self.hardware = hardware
        self.tp = tp
        usable = hardware.device_memory_bytes.value - hardware.activation_bytes.value
        self.free_device_bytes = round(tp * pp * usable) - model.weight_bytes
        if self.free_device_bytes <= 0:
            raise ValueError(
                f"the weights of {model.name} ({model.weight_bytes / 1e9:.1f} GB) do not fit "
                f"on {tp * pp} device(s) of {hardware.name}, which have "
                f"{tp * pp * usable / 1e9:.1f} GB "
                f"besides activations: raise parallel.tp (at most {hardware.num_devices}) or "
                f"choose a larger machine with hardware="
            )
        self._num_layers = len(model.layer_words)
        kernels_s = self._num_layers * LAYER_KERNELS * hardware.kernel_s.value
        self._step_s = hardware.step_s.value + kernels_s
        graph_s = hardware.graph_kernel_s.value or hardware.kernel_s.value
        self._graph_step_s = hardware.step_s.value + self._num_layers * LAYER_KERNELS * graph_s
        self._extend_s = hardware.extend_s.value
        self._request_s = hardware.request_s.value
        self._is_asynchronous = is_asynchronous
        self._prefill_factor = hardware.prefill_factor.value
        self._tile = hardware.tile_tokens
        weights = _Weights(model, hardware, tp=tp, ep=ep)
        self._shared_s = cache(weights.layers_s)  # by tokens of the step, tiles filled up
        self._head_s = cache(weights.head_s)  # by sequences of the step
        self._decode_s = cache(self._decoding_s)  # by decoding requests
        self._chunk_ns = cache(lambda start, end: self.forward_ns([(start, end)], []).total_ns)
        self._bandwidth = Rates(hardware.decode_bandwidth, "decode_bandwidth")
        # dense full attention, and the other sorts
        self._full, *others = _attentions(model, hardware, tp=tp)
        self._full.pads_chunks = pads_chunks
        self._others = [each for each in others if each.num_layers]
        self._scan_s, self._state_s = _recurrent_s(model, hardware, tp=tp)
        self._save_s = 2 * model.mamba_slot_bytes / tp / hardware.state_bandwidth.value
        self._layers_before = np.arange(self._num_layers, dtype=np.float64)
        self._mamba_before = _count_before("M" in word or "D" in word for word in model.layer_words)
        self._layer_bytes = [
            np.array(model.layer_bytes(name, tp), float) for name in model.kind_names
        ]

    def forward_ns(
        self,
        extends: Sequence[tuple[int, int]],
        context_lens: Sequence[int],
        *,
        load_layer_bytes: NDArray[np.float64] | None = None,
        load_rate: float = 0.0,
        slowdown: float = 1.0,
        copying_s: float = inf,
        saved_states: int = 0,
        num_queries: int = 1,
    ) -> ForwardCost:
        """Return the duration of one step.

        Args:
            extends: prompt chunks to compute, as pairs (start, end); `end` is not included. Each
                token attends to all tokens before it.
            context_lens: [R] for each decoding request, the number of tokens that it attends to.
                Each request decodes one token.
            load_layer_bytes: [L] bytes of KV to load from the host for each layer, summed over
                devices. Loading begins with the step. A layer waits until the KV for it and for
                earlier layers is loaded. None means that nothing is loaded.
            load_rate: bytes per second of these loads, summed over devices.
            slowdown: factor on the computing time, because of copies at the same time; 1 means
                none.
            copying_s: how long these copies take; what is computed after them is not slowed.
            saved_states: number of Mamba states that the step copies to another slot.
            num_queries: tokens of each decoding request that the step computes together.
        """
        num_decodes = len(context_lens)
        num_extends = num_tiles = 0
        full_s = 0.0
        others_s = [0.0] * len(self._others)
        if extends:
            tile = self._tile
            for start, end in extends:
                num_extends += end - start
                num_tiles += -(-end // tile) - start // tile
            full_s = self._full.extend_s(extends)
            others_s = [each.extend_s(extends) for each in self._others]
        fixed_s, scan_s = self._fixed_s(
            num_extends, num_tiles, len(extends), num_decodes * num_queries, saved_states
        )
        if num_decodes:
            full_s += self._full.decode_s(sum(context_lens))
            for i, other in enumerate(self._others):
                others_s[i] += other.decode_s(other.num_keys(context_lens))
        if extends and self._prefill_factor != 1.0:
            factor = self._prefill_factor
            fixed_s = self._step_s + factor * (fixed_s - self._step_s)
            full_s, scan_s = factor * full_s, factor * scan_s
            others_s = [factor * each for each in others_s]
        # time that computing loses beside the copies, at most
        lost_s = copying_s * (1.0 - 1.0 / slowdown) if slowdown > 1.0 else 0.0
        compute_s = fixed_s + full_s + fsum(others_s)
        compute_s = max(compute_s, self._host_s(len(extends) + num_decodes))
        compute_s = min(compute_s * slowdown, compute_s + lost_s)
        compute_ns = int(compute_s * 1e9 + 0.5)
        if load_layer_bytes is None or not self._num_layers:
            return ForwardCost(compute_ns, compute_ns, 0)
        # finish_i = max(finish_{i-1}, loaded_i) + compute_i, unrolled: the wait is the longest
        # time by which a layer's load ends after the layer could have begun to compute
        even_s = (fixed_s - scan_s - self._step_s) / self._num_layers
        begun_s = self._layers_before * even_s + self._step_s
        if self._full.num_layers:
            begun_s += self._full.before * (full_s / self._full.num_layers)
        for other, other_s in zip(self._others, others_s, strict=True):
            begun_s += other.before * (other_s / other.num_layers)
        if self.model.num_mamba_layers:
            begun_s += self._mamba_before * (scan_s / self.model.num_mamba_layers)
        loaded_s = load_layer_bytes.cumsum() / load_rate
        begun_s = np.minimum(begun_s * slowdown, begun_s + lost_s)
        stall_s = float((loaded_s - begun_s).max())
        if loaded_s[-1] == 0.0 or stall_s <= 0.0:
            return ForwardCost(compute_ns, compute_ns, 0)
        stall_ns = int(stall_s * 1e9 + 0.5)
        return ForwardCost(compute_ns + stall_ns, compute_ns, stall_ns)

    def decode_ends_ns(
        self, context_lens: Sequence[int], num_steps: int, now_ns: int, *, slowdown: float = 1.0
    ) -> Generator[list[int], int, None]:
        """Yield lists of the end times (ns) of `num_steps` decode steps, in order.

        The first step starts at `now_ns`, with `context_lens` tokens per request. Each step adds
        one token to each request. Durations are exactly those of `forward_ns`, with the same
        `slowdown`. The first list has one step. After that, the caller sends the time (ns) up to
        which it needs end times. The next list reaches about as far.
        """
        num_decodes = len(context_lens)
        fixed_s, host_s = self._decode_s(num_decodes), self._host_s(num_decodes)
        num_keys, more_keys = float(sum(context_lens)), float(num_decodes)
        blocks = [other.decode_blocks_s(context_lens) for other in self._others]
        for block in blocks:
            next(block)
        token_bytes, num_layers = self._full.token_bytes, float(self._full.num_layers)
        line_end = 0.0  # the rate is linear up to this many bytes read
        num_more = 1
        while num_steps:
            most = (num_keys + (num_more - 1) * num_decodes) * token_bytes
            if most >= line_end:
                rate, size, slope, line_end = self._full.line(num_keys)
                if most >= line_end:  # past a point of the table: one step at a time
                    num_more = 1
            others_s = blocks[0].send(num_more) if blocks else [0.0] * num_more
            if len(blocks) > 1:
                more = [block.send(num_more) for block in blocks[1:]]
                others_s = [fsum(each) for each in zip(others_s, *more, strict=True)]
            ends, began_ns = [], now_ns
            for other_s in others_s:
                read = num_keys * token_bytes
                full = read / (rate + (read - size) * slope) * num_layers
                step_s = fixed_s + full + other_s
                now_ns += int((step_s if step_s > host_s else host_s) * slowdown * 1e9 + 0.5)
                ends.append(now_ns)
                num_keys += more_keys
            num_steps -= num_more
            steps_ns = now_ns - began_ns or 1
            until_ns = yield ends
            num_more = min((until_ns - now_ns) * num_more // steps_ns + 1, num_steps)

    def prefill_s(self, start: int, end: int, *, chunk_tokens: int = CHUNK_TOKENS) -> float:
        """Return the seconds to compute the tokens from `start` to just before `end`.

        They are computed in chunks of at most `chunk_tokens` tokens. The machine does nothing else
        at the same time.
        """
        total_ns = 0
        while start < end:
            stop = min(end, start + chunk_tokens)
            total_ns += self._chunk_ns(start, stop)
            start = stop
        return total_ns * 1e-9

    def flops(self, start: int, end: int) -> float:
        """Return the floating-point operations for the tokens from `start` to just before `end`.

        The number is summed over all devices. The recurrences of Mamba and delta-rule layers are
        left out.
        """
        model = self.model
        experts = model.num_moe_layers * model.experts_per_token * model.expert_params
        dense = 2.0 * (end - start) * (model.dense_params + experts)
        attention = fsum(each.flops(start, end) for each in (self._full, *self._others))
        return dense + self.tp * attention

    def offered_s(self, prompt_cached: int, prompt_len: int, output_len: int, batch: int) -> float:
        """Return for how many seconds one request occupies the machine.

        This is the time of its prefill alone, plus its share of the decode steps after its first
        token. In each decode step, `batch` such requests share the time equally. The first
        `prompt_cached` prompt tokens are in the cache.
        """
        length = prompt_len + output_len // 2
        # in the order of sums of `forward_ns([], [length] * batch)`
        full_s = self._full.decode_s(batch * length)
        others_s = sum([each.decode_s(batch * each.num_keys([length])) for each in self._others])
        decode_ns = (output_len - 1) * int((self._decode_s(batch) + full_s + others_s) * 1e9 + 0.5)
        return self.prefill_s(prompt_cached, prompt_len) + decode_ns * 1e-9 / batch

    def layer_bytes(self, *counts: float) -> NDArray[np.float64]:
        """Return [L] the bytes that must be loaded for each layer, summed over devices.

        `counts` are the numbers of tokens to load, by kind: full attention first, then sliding
        window. For Mamba, the count is a number of states. A count may be a fraction, because data
        in a smaller number format counts for less.
        """
        layers: NDArray[np.float64] = self._layer_bytes[0] * counts[0]
        for table, count in zip(self._layer_bytes[1:], counts[1:], strict=True):
            if count:
                layers += table * count
        return layers

    def _fixed_s(
        self,
        num_extends: int,
        num_tiles: int,
        num_sequences: int,
        num_decodes: int,
        saved_states: int,
    ) -> tuple[float, float]:
        extend_s = self._extend_s * num_sequences
        num_tokens = (num_tiles + num_decodes) * self._tile
        step_s = self._step_s if num_sequences else self._graph_step_s
        shared_s = self._shared_s(num_tokens, num_sequences > 0)
        if not self._is_asynchronous:
            extend_s += self._request_s * (num_sequences + num_decodes)
        head_s = self._head_s(num_sequences + num_decodes)
        scan_s = self._scan_s * num_extends + self._state_s * num_decodes
        return (
            step_s + extend_s + shared_s + head_s + scan_s + self._save_s * saved_states,
            scan_s,
        )

    def _host_s(self, num_requests: int) -> float:
        # what the processor takes for a step beside the device, at least
        if not (self._request_s and self._is_asynchronous):
            return 0.0
        return self.hardware.step_s.value + self._request_s * num_requests

    def _decoding_s(self, num_decodes: int) -> float:
        return self._fixed_s(0, 0, 0, num_decodes, 0)[0]


# cost of all weight matrices, and of the all-reduces between them
class _Weights:
    def __init__(self, model: ModelConfig, hardware: HardwareConfig, *, tp: int, ep: int) -> None:
        self._model = model
        self._num_layers = len(model.layer_words)
        self._tp = tp
        self._bandwidth = hardware.weight_bandwidth.value
        self._bf16 = Rates(hardware.gemm_bf16, "gemm_bf16")
        self._dense = self._bf16
        if model.dense_param_bytes <= 1:
            self._dense = Rates(hardware.gemm_fp8, "gemm_fp8")
        name = _experts_table(model)
        self._experts = Rates(getattr(hardware, name), name)
        self._uneven: float = ep**IMBALANCE
        slices = Rates(hardware.moe_slice, "moe_slice")
        # extra seconds per flop of an expert because of tensor parallelism
        self._slice_s = 1 / slices.at(model.expert_width * ep / tp) - 1 / slices.at(
            model.expert_width
        )
        self._least_s = EXPERT_KERNELS * hardware.kernel_s.value
        # the tables' times of a single token are mostly launches, for which a graph does not wait
        self._launch_s = 0.0
        graph_s = EXPERT_KERNELS * hardware.graph_kernel_s.value
        if model.num_moe_layers and graph_s:
            first_s = model.experts_per_token * model.expert_params * model.expert_param_bytes
            first_s = first_s / tp / self._bandwidth + graph_s
            self._launch_s = max(self._experts_s(1) - first_s, 0.0)
        # bf16 elements that short kernels read and write per token: inputs and outputs of matrices,
        # and the hidden state four times per block
        hidden = 4 * model.blocks_per_layer * self._num_layers * model.hidden_size
        through = model.dense_params / max(model.hidden_size, 1) / tp
        self._short_s = 2 * (hidden + through) / hardware.short_bandwidth.value
        self._reduce_s = hardware.all_reduce_s.value
        name = "all_reduce_2" if tp <= 2 else "all_reduce_4" if tp <= 4 else "all_reduce_8"
        self._reduce = Rates(getattr(hardware, name), name)

    def layers_s(self, num_tokens: int, has_prompts: bool) -> float:  # noqa: FBT001 - cached
        if not num_tokens:
            return 0.0
        model, tp = self._model, self._tp
        params = model.dense_params / tp
        seconds = max(
            2 * num_tokens * params / self._dense.at(num_tokens),
            params * model.dense_param_bytes / self._bandwidth,
        )
        seconds += num_tokens * self._short_s
        if model.num_moe_layers:
            saved_s = 0.0 if has_prompts else self._launch_s
            seconds += model.num_moe_layers * self._experts_s(num_tokens, saved_s)
        if tp > 1:
            size = num_tokens * model.hidden_size * 2
            num_reduces = self._num_layers * model.blocks_per_layer
            seconds += num_reduces * max(self._reduce_s, size / self._reduce.at(size))
        return seconds

    def head_s(self, num_sequences: int) -> float:
        params = self._model.head_params / self._tp
        if not num_sequences:
            return 0.0
        return max(
            2 * num_sequences * params / self._bf16.at(num_sequences),
            2 * params / self._bandwidth,
        )

    def _experts_s(self, num_tokens: int, saved_s: float = 0.0) -> float:
        # seconds of one layer's experts on the device with most work. Tensor parallelism divides
        # all of them but the launches of kernels, which the tables' times include
        model, tp = self._model, self._tp
        tokens_each = num_tokens * model.experts_per_token / model.num_experts
        flops = 2 * num_tokens * model.experts_per_token * model.expert_params
        whole_s = max(flops / self._experts.at(tokens_each), self._least_s)
        # expected experts with at least one token, if tokens choose uniformly
        missed = (1 - model.experts_per_token / model.num_experts) ** num_tokens
        touched = model.num_experts * (1 - missed)
        read = touched * model.expert_params * model.expert_param_bytes / tp
        computing_s = self._least_s + (whole_s - self._least_s + flops * self._slice_s) / tp
        return self._uneven * max(computing_s, read / self._bandwidth) - saved_s


def _experts_table(model: ModelConfig) -> str:
    if model.expert_matrices == 2:
        return "moe_two_matrix"
    if model.expert_param_bytes < 1:
        return "moe_mxfp4"
    is_narrow = model.expert_width <= 640  # halfway between the two measured widths
    if model.expert_param_bytes <= 1:
        return "moe_fp8_narrow" if is_narrow else "moe_fp8_wide"
    return "moe_narrow" if is_narrow else "moe_wide"


def _attentions(model: ModelConfig, hardware: HardwareConfig, *, tp: int) -> Iterator["_Attention"]:
    # the attention of each sort: dense, sparse, windowed, and of parts that are read. Choosing
    # tokens reads all their index keys, at the rate of attention with such heads. Attention to
    # chosen tokens has the rate of a window of equal length. Both are assumptions of the model
    value_dim = model.value_dim or model.head_dim
    words = model.layer_words
    full_bytes = model.full_layer_token_bytes * model.kv_copies(LayerKind.full, tp)
    is_full = [LayerKind.full in kinds for kinds in model.layer_kinds]
    is_chosen = [has and "t" in word for has, word in zip(is_full, words, strict=True)]
    is_dense = [has and "t" not in word for has, word in zip(is_full, words, strict=True)]
    make = partial(_Attention, hardware, tp)
    for layers, reach in ((is_dense, 0), (is_chosen, model.top_tokens)):
        yield make(
            layers,
            heads=model.num_query_heads,
            dims=(model.head_dim, value_dim),
            token_bytes=full_bytes,
            reach=reach,
        )
    yield make(
        [LayerKind.swa in kinds for kinds in model.layer_kinds],
        heads=model.swa_num_query_heads or model.num_query_heads,
        dims=(model.swa_head_dim,) * 2 if model.swa_head_dim else (model.head_dim, value_dim),
        token_bytes=model.swa_layer_token_bytes * model.kv_copies(LayerKind.swa, tp),
        reach=model.window_len,
        is_window=True,
        restarts=model.window_restarts,
    )
    for part in model.parts:
        if part.query_heads:
            yield make(
                [part.is_in(word) for word in words],
                num_more=part.num_layers,
                heads=part.query_heads,
                dims=(part.query_dim,),
                token_bytes=part.entry_bytes * part.copies(tp) / part.tokens,
                tokens=part.tokens,
                reach=part.window_len or part.top * part.tokens,
                is_window=part.window_len > 0,
            )


# cost of one sort of attention on one of `tp` devices; a query reads all tokens before it, or its
# last (or chosen) `reach` tokens
class _Attention:
    def __init__(
        self,
        hardware: HardwareConfig,
        tp: int,
        layers: Sequence[bool],
        *,
        heads: int,
        dims: tuple[int, ...],
        token_bytes: float,
        num_more: int = 0,
        tokens: int = 1,
        reach: int = 0,
        is_window: bool = False,
        restarts: bool = False,
    ) -> None:
        # `dims`: elements that a query head multiplies per key; a key stands for `tokens` tokens.
        # `layers`: which of the model's layers have this sort; `num_more` are added to them.
        # `restarts`: a query reads the tokens since the last multiple of `reach`
        self.num_layers = sum(layers) + num_more
        self.before = _count_before(layers)
        self.reach = reach
        self.restarts = restarts
        self.pads_chunks = False
        self._is_window = is_window
        self.token_bytes = token_bytes / tp
        self._flops = 2 * ceil(heads / tp) * sum(dims)  # a query and a key
        self._tokens = tokens
        table = "attention_d64" if dims[0] <= 64 else "attention_d128"
        self._rates = Rates(getattr(hardware, table), table)
        self._window_rate = inf
        if reach:
            self._window_rate = Rates(hardware.attention_window, "attention_window").at(reach)
        self._bandwidth = Rates(hardware.decode_bandwidth, "decode_bandwidth")

    def num_keys(self, context_lens: Sequence[int]) -> int:
        if not self.reach:
            return sum(context_lens)
        if self.restarts:
            return sum([(length - 1) % self.reach + 1 for length in context_lens])
        return sum([min(length, self.reach) for length in context_lens])

    def extend_s(self, extends: Sequence[tuple[int, int]]) -> float:
        # the rate is that of a prompt with the same number of (query, key) pairs as the mean
        # interval, where the mean is over pairs
        if not self.num_layers:
            return 0.0
        num_pairs = num_keys = squares = longest = 0
        if self.pads_chunks:
            longest = max([end - start for start, end in extends])
        for start, end in extends:
            if self.reach:
                pairs = self._pairs(end) - self._pairs(start)
            else:
                pairs = (end * (end + 1) - start * (start + 1)) // 2
            if longest:
                pairs += start * (longest - (end - start))
            num_keys += end
            if self._is_window:
                num_keys -= max(start - (start % self.reach if self.restarts else self.reach), 0)
            num_pairs += pairs
            squares += pairs * pairs
        rate = min(self._window_rate, self._rates.at(sqrt(2 * squares / num_pairs)))
        read = num_keys * self.token_bytes
        return self.num_layers * max(
            num_pairs * self._flops / rate / self._tokens, read / self._bandwidth.at(read)
        )

    def flops(self, start: int, end: int) -> float:
        num_pairs = self._pairs(end) - self._pairs(start)
        return float(self.num_layers * num_pairs * self._flops / self._tokens)

    def decode_s(self, num_keys: int) -> float:
        if not self.num_layers:
            return 0.0
        read = num_keys * self.token_bytes
        return read / self._bandwidth.at(read) * self.num_layers

    def decodes_s(self, num_keys: Sequence[int]) -> list[float]:
        rate, size, slope, end = self.line(num_keys[0])
        reads = [keys * self.token_bytes for keys in num_keys]
        if reads[-1] >= end:
            return [self.decode_s(keys) for keys in num_keys]
        num_layers = self.num_layers
        return [read / (rate + (read - size) * slope) * num_layers for read in reads]

    def decode_blocks_s(self, context_lens: Sequence[int]) -> Generator[list[float], int, None]:
        # Yields the seconds of the next decode steps as a list. The caller sends how many steps it
        # wants. The first list is empty.
        reach, step = self.reach, 0
        # by how many tokens each context is shorter than `reach`
        room = sorted([reach - length for length in context_lens if length < reach])
        added = len(context_lens)  # keys that a step adds, until contexts reach `reach`
        num_keys = reach * added - sum(room) if reach else sum(context_lens)
        num_steps = yield []
        while self.restarts:
            end = step + num_steps
            lens = np.array(context_lens) + np.arange(step, end)[:, None] - 1
            of_steps = (lens % reach + 1).sum(axis=1).tolist()
            step = end
            num_steps = yield [self.decode_s(keys) for keys in of_steps]
        while not reach or (room and room[-1] > step):
            end = step + num_steps
            more = [added] * num_steps
            if reach:
                more = [len(room) - bisect_right(room, each) for each in range(step, end)]
            step = end
            *held, num_keys = accumulate(more, initial=num_keys)
            num_steps = yield self.decodes_s(held)
        full_s = self.decode_s(num_keys)  # each request reads `reach` tokens
        while True:
            num_steps = yield [full_s] * num_steps

    def line(self, num_keys: float) -> tuple[float, float, float, float]:
        return self._bandwidth.line(num_keys * self.token_bytes)

    def _pairs(self, num_queries: int) -> int:
        if self.restarts:
            whole, ramp = divmod(num_queries, self.reach)
            return (whole * self.reach * (self.reach + 1) + ramp * (ramp + 1)) // 2
        ramp = min(num_queries, self.reach) if self.reach else num_queries
        return ramp * (ramp + 1) // 2 + (num_queries - ramp) * ramp


def _recurrent_s(model: ModelConfig, hardware: HardwareConfig, *, tp: int) -> tuple[float, float]:
    # seconds of all recurrent layers: per scanned token, and per decoded token
    inner = model.recurrent_heads * model.recurrent_head_dim
    scan_s = state_s = 0.0
    for word in model.layer_words:
        if "M" in word:
            rate, groups = hardware.mamba_rate.value, model.recurrent_groups
        elif "D" in word:
            rate, groups = hardware.delta_rate.value, model.recurrent_key_heads
        else:
            continue
        channels = inner + 2 * groups * model.recurrent_state_dim
        scan_s += inner * model.recurrent_state_dim / rate / tp
        scan_s += channels / hardware.conv_rate.value / tp
        # decoding reads and writes each state
        state_s += 2 * model.layer_state_bytes(word) / hardware.state_bandwidth.value / tp
    return scan_s, state_s


def _count_before(has: Iterable[bool]) -> NDArray[np.float64]:
    counts = np.array(list(has), dtype=np.float64)
    before: NDArray[np.float64] = counts.cumsum() - counts
    return before

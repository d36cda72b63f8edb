"""A small hybrid language model whose logits change with every wrong page and every wrong state.

Full attention with sinks, attention to the tokens that index keys choose, sliding-window attention
with windows of several lengths, Mamba-2 (https://arxiv.org/abs/2405.21060) and
the gated delta rule (https://arxiv.org/abs/2412.06464), with random weights.

Logits are bit-identical however a sequence is cut: every operation runs on one page of tokens, in
shapes that depend only on the page's position, and pads the rows that are not computed now. So a
token gets the same bits in any chunk and in any run, whatever part of its prefix the cache
supplied. Weights are scaled so that states remember hundreds of tokens, so a wrong state changes
the logits.

Axes: row (token of a page), token (of the pages read), head, dim, state, tap, channel.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.rank_pools import DTYPES, index_part
from hicache.kernels.scan import ScanWeights
from hicache.models import ModelConfig

ROPE_BASE = 10_000.0
EPSILON = 1e-6
SLOWEST, FASTEST = 0.002, 0.05  # decay of a state per token: memories last 20 to 500 tokens


class ReferenceModel:
    """A small language model with random weights, for checking that cached pages are right.

    Its layers have the kinds and sizes that `config` describes. The logits of a token are
    bit-identical for any split of the sequence into chunks. So different logits reveal a wrong
    page.

    Raises:
        ValueError: the model does not support a kind of layer or a number of heads.
    """

    def __init__(
        self, config: ModelConfig, *, page_size: int, seed: int = 0, device: str = "cpu"
    ) -> None:
        _refuse_unknown(config)
        self.config = config
        self.words = config.layer_words
        self.page_size = page_size
        self.vocab_size = config.head_params // config.hidden_size
        self.device = torch.device(device)
        self.dtype = DTYPES[config.kv_dtype_bytes]
        self._state_dtype = torch.promote_types(self.dtype, torch.float32)
        self._generator = torch.Generator().manual_seed(seed)
        size = config.hidden_size
        self._embedding = self._draw(self.vocab_size, size, scale=1.0)
        self._head = self._draw(size, self.vocab_size)
        self._index = index_part(config)
        windows = {part.letter: part.window_len for part in config.parts if part.window_len}
        self._windows = {"S": config.window_len, **windows}
        self._layers = [self._layer_weights(word) for word in self.words]
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=self.device)
        self._frequencies = ROPE_BASE ** (-dims / config.head_dim)

    @torch.no_grad()
    def forward(
        self,
        tokens: bytes,
        start: int,
        end: int,
        memory: PagedKvView,
        *,
        logits_from: int | None = None,
        ready: Callable[[int], None] = lambda layer: None,
    ) -> Tensor:
        """Compute the tokens from `start` to `end` (excluded) of a sequence; return logits.

        Args:
            tokens: all tokens of the sequence as packed int32.
            start: position of the first token to compute.
            end: position after the last token to compute.
            memory: cached pages and states of all tokens before `start`. The new tokens are added.
            logits_from: position of the first token whose logits are returned. None means only the
                last token.
            ready: called with the index of each layer before that layer is computed. The call
                returns when the layer's cached pages may be read.

        Returns:
            [tokens from `logits_from` to `end`, vocabulary].
        """
        first_wanted = end - 1 if logits_from is None else logits_from
        size = self.page_size
        blocks = [
            self._block(page, slice(max(start - page * size, 0), min(end - page * size, size)))
            for page in range(start // size, -(-end // size))
        ]
        hidden = [self._embed(tokens, block) for block in blocks]
        for layer, word in enumerate(self.words):
            ready(layer)
            if word in "MD":
                mixed = self._scan(layer, list(map(_normed, hidden)), blocks, memory)
            else:
                mix = self._choose if "I" in word else self._attend
                mixed = [
                    mix(layer, _normed(x), block, memory)
                    for x, block in zip(hidden, blocks, strict=True)
                ]
            hidden = [x + each for x, each in zip(hidden, mixed, strict=True)]
            hidden = [x + self._mlp(layer, _normed(x)) for x in hidden]
        wanted = [
            (_normed(x) @ self._head)[
                max(block.rows.start, first_wanted - block.page * size) : block.rows.stop
            ]
            for x, block in zip(hidden, blocks, strict=True)
            if (block.page + 1) * size > first_wanted
        ]
        return torch.cat(wanted)

    def _block(self, page: int, rows: slice) -> "_Block":
        first, end = page * self.page_size, (page + 1) * self.page_size
        position = torch.arange(first, end, device=self.device)
        angles = (position[:, None].double() * self._frequencies)[:, None]
        return _Block(page, rows, (angles.cos().to(self.dtype), angles.sin().to(self.dtype)))

    # -- layers --------------------------------------------------------------------------------

    def _embed(self, tokens: bytes, block: "_Block") -> Tensor:
        ids = np.zeros(self.page_size, np.int64)
        rows = block.rows
        first = block.page * self.page_size + rows.start
        held = np.frombuffer(tokens, "<i4", rows.stop - rows.start, 4 * first)
        ids[rows] = held % self.vocab_size
        return self._embedding[torch.from_numpy(ids).to(self.device)]

    def _attend(self, layer: int, x: Tensor, block: "_Block", memory: PagedKvView) -> Tensor:
        weights, rows = self._layers[layer], block.rows
        queries = self._project(layer, x, block, memory)
        first = block.page * self.page_size
        mixed = memory.attend(
            layer,
            queries,
            first,
            first + rows.stop,
            window_len=self._windows.get(self.words[layer], 0),
            sinks=weights["sink"],
        )
        return rearrange(mixed, "row head dim -> row (head dim)") @ weights["out"]

    def _project(self, layer: int, x: Tensor, block: "_Block", memory: PagedKvView) -> Tensor:
        # writes keys and values, and returns the queries [row, head, dim]
        config, weights, rows = self.config, self._layers[layer], block.rows
        heads, kv_heads = config.num_query_heads, config.num_kv_heads
        projected = rearrange(
            x @ weights["qkv"], "row (head dim) -> row head dim", head=heads + 2 * kv_heads
        )
        turned = _rotate(projected[:, : heads + kv_heads], block.rotation)
        keys, values = turned[:, heads:], projected[:, -kv_heads:]
        memory.write_tokens(
            layer, block.page * self.page_size + rows.start, keys[rows], values[rows]
        )
        return turned[:, :heads]

    def _choose(self, layer: int, x: Tensor, block: "_Block", memory: PagedKvView) -> Tensor:
        """Compute attention in which each token sees only those that fit it best.

        A token attends to the `top_tokens` earlier tokens whose index keys have the highest product
        with its index query.
        """
        config, weights, rows, size = self.config, self._layers[layer], block.rows, self.page_size
        first, end = block.page * size, (block.page + 1) * size
        queries = self._project(layer, x, block, memory)
        memory.write_index(layer, first + rows.start, (x @ weights["index_key"])[rows])
        held = torch.arange(end, device=self.device) < first + rows.stop
        keys, values = (
            torch.where(held[:, None, None], each, 0)
            for each in memory.read_kv(layer, 0, block.page + 1)
        )
        index = torch.where(held[:, None], memory.read_index(layer, block.page + 1), 0)
        fits = rearrange(
            x @ weights["index_query"], "row (head dim) -> row head dim", dim=index.shape[1]
        )
        fits = torch.einsum("rhd,td->rht", fits, index).relu().sum(1)
        positions = torch.arange(first, end, device=self.device)
        is_after = torch.arange(end, device=self.device) > positions[:, None]
        fits = fits.masked_fill(is_after, -torch.inf)
        chosen = fits.topk(min(config.top_tokens, end)).indices
        mask = torch.ones_like(is_after).scatter(1, chosen, value=False) | is_after
        shared = config.num_query_heads // config.num_kv_heads
        keys, values = (each.repeat_interleave(shared, 1) for each in (keys, values))
        scores = torch.einsum("rhd,thd->hrt", queries, keys) * config.head_dim**-0.5
        sinks = weights["sink"][:, None, None].expand(-1, size, 1)
        scores = torch.cat((scores.masked_fill(mask, -torch.inf), sinks), -1).softmax(-1)
        mixed = torch.einsum("hrt,thd->rhd", scores[..., :-1], values)
        return rearrange(mixed, "row head dim -> row (head dim)") @ weights["out"]

    def _scan(
        self, layer: int, parts: Sequence[Tensor], blocks: "Sequence[_Block]", memory: PagedKvView
    ) -> list[Tensor]:
        config, weights = self.config, self._layers[layer]
        heads, dim = config.recurrent_heads, config.recurrent_head_dim
        width = heads * (dim + 2 * config.recurrent_state_dim)
        projected = [x @ weights["in"] for x in parts]
        tokens = torch.cat([x[block.rows] for x, block in zip(projected, blocks, strict=True)])
        rows = "row (head channel) -> row head channel"
        inputs = rearrange(tokens[:, :width], rows, head=heads)
        gates = rearrange(
            tokens[:, width + heads * dim :], "row (gate head) -> row gate head", head=heads
        )
        skip = weights["skip"] if self.words[layer] == "M" else None
        scan = ScanWeights(weights["conv"], weights["decay"], skip)
        start = first = blocks[0].page * self.page_size + blocks[0].rows.start
        scanned = memory.scan(layer, inputs, gates, scan, start)
        mixed = []
        for x, block in zip(projected, blocks, strict=True):
            end = block.page * self.page_size + block.rows.stop
            outputs = scanned.new_zeros(self.page_size, heads, dim)
            outputs[block.rows] = scanned[first - start : end - start]
            first = end
            outputs = rearrange(_normed(outputs).to(x.dtype), "row head dim -> row (head dim)")
            z = x[:, width : width + heads * dim]
            mixed.append((outputs * functional.silu(z)) @ weights["out"])
        return mixed

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        weights = self._layers[layer]
        up, gate = (x @ weights["up"]).chunk(2, dim=-1)
        return (up * functional.silu(gate)) @ weights["down"]

    # -- weights -------------------------------------------------------------------------------

    def _draw(self, *shape: int, scale: float | None = None) -> Tensor:
        # without `scale`, a matrix preserves the norm of its input
        numbers = torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        return (numbers * (shape[0] ** -0.5 if scale is None else scale)).to(
            self.device, self.dtype
        )

    def _layer_weights(self, word: str) -> dict[str, Tensor]:
        config = self.config
        size = config.hidden_size
        weights = {"up": self._draw(size, 4 * size), "down": self._draw(2 * size, size)}
        if word not in "MD":
            heads, dim = config.num_query_heads, config.head_dim
            if self._index is not None and self._index.is_in(word):
                width = self._index.query_heads * self._index.dim
                weights["index_query"] = self._draw(size, width)
                weights["index_key"] = self._draw(size, self._index.dim)
            return weights | {
                "qkv": self._draw(size, (heads + 2 * config.num_kv_heads) * dim),
                "sink": self._draw(heads, scale=1.0),
                "out": self._draw(heads * dim, size),
            }
        heads, dim = config.recurrent_heads, config.recurrent_head_dim
        channels = dim + 2 * config.recurrent_state_dim
        # log-spaced, so that every layer has heads with a long memory
        decay = torch.logspace(np.log10(SLOWEST), np.log10(FASTEST), heads, dtype=torch.float64)
        return weights | {
            "in": self._draw(size, heads * (channels + dim + (1 if word == "M" else 2))),
            "conv": self._draw(config.conv_taps, heads, channels),
            "decay": decay.to(self.device, self._state_dtype),
            "skip": self._draw(heads, scale=1.0).to(self._state_dtype),
            "out": self._draw(heads * dim, size),
        }


class _Block(NamedTuple):
    page: int
    rows: slice  # those to compute
    rotation: tuple[Tensor, Tensor]  # cosines and sines [row, 1, dim / 2]


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=EPSILON)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rearrange(turned, "row head dim two -> row head (dim two)")


def _refuse_unknown(config: ModelConfig) -> None:
    windows = [part for part in config.parts if part.window_len]
    known = ("F", "S", "M", "D", "FtI", *(part.letter for part in windows))
    for word in config.layer_words:
        if word not in known:
            raise ValueError(
                f"model {config.name}: executor=torch supports layers {', '.join(known)}, "
                f"got {word!r}"
            )
    sizes = (config.latent_dim, config.value_dim, config.swa_num_kv_heads, config.swa_head_dim)
    heads = {(part.heads, part.dim, part.element_bytes) for part in windows}
    heads -= {(config.num_kv_heads, 2 * config.head_dim, config.kv_dtype_bytes)}
    others = [part for part in config.parts if not part.window_len]
    index = [(part.letter, part.rides_on, part.tokens, part.scale_bytes) for part in others]
    if any(sizes) or heads or index not in ([], [("I", "full", 1, 0)]):
        raise ValueError(
            f"model {config.name}: executor=torch needs the same number and size of heads in "
            "all attention layers, and no parts but other windows and one of index keys (I)"
        )
    if config.kv_dtype_bytes not in DTYPES or config.conv_dtype_bytes != config.kv_dtype_bytes:
        raise ValueError(
            f"model {config.name}: executor=torch needs the same dtype for KV and convolution"
        )
    for word, name in (("M", "recurrent_groups"), ("D", "recurrent_key_heads")):
        wanted, got = config.recurrent_heads, getattr(config, name)
        if word in config.layer_words and got != wanted:
            raise ValueError(f"model {config.name}: {name} must be {wanted}, got {got}")

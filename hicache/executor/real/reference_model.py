"""A small hybrid language model whose logits change with every wrong page and every wrong state.

Full attention with sinks, attention to the tokens that index keys choose, sliding-window attention
with windows of several lengths, Mamba-2 (https://arxiv.org/abs/2405.21060) and
the gated delta rule (https://arxiv.org/abs/2412.06464), with random weights.

Logits are bit-identical however a sequence is cut: every operation runs on a fixed number of tiles
(pages of a sequence), in shapes that do not depend on the step, and pads the rows that are not
computed now. So a token gets the same bits in any chunk and in any run, whatever part of its prefix
the cache supplied. On a GPU many tiles are computed together, so that a step needs few launches; a
CPU computes them one by one. Weights are scaled so that states remember hundreds of tokens, so a
wrong state changes the logits.

Axes: tile, row (token of a tile's page), token (of the pages read), head, dim, state, tap, channel.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.rank_pools import DTYPES, index_part
from hicache.executor.real.tables import Group
from hicache.kernels.scan import ScanWeights
from hicache.models import ModelConfig

ROPE_BASE = 10_000.0
EPSILON = 1e-6
SLOWEST, FASTEST = 0.002, 0.05  # decay of a state per token: memories last 20 to 500 tokens
TOGETHER = 64  # tiles that a GPU computes together
ALIGNED = 8  # columns of a projection are a multiple, so that its rows lie 16 · n bytes apart

Rotation = tuple[Tensor, Tensor]  # cosines and sines [tile, row, 1, dim / 2]


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
        self.origin, self.tolerance = f"exact, seed {seed}", 0.0
        self.words = config.layer_words
        self.page_size = page_size
        self.vocab_size = config.head_params // config.hidden_size
        self.device = torch.device(device)
        self.together = TOGETHER if self.device.type == "cuda" else 1
        self.dtype = DTYPES[config.kv_dtype_bytes]
        self._state_dtype = torch.promote_types(self.dtype, torch.float32)
        self._generator = torch.Generator().manual_seed(seed)
        size = config.hidden_size
        self._embedding = self._draw(self.vocab_size, size, scale=1.0)
        self._head = self._draw(size, self.vocab_size)
        self._index = index_part(config)
        self._layers = [self._layer_weights(word) for word in self.words]
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=self.device)
        self._frequencies = ROPE_BASE ** (-dims / config.head_dim)
        self._row = torch.arange(page_size, device=self.device)

    @torch.no_grad()
    def forward(
        self, memory: PagedKvView, *, ready: Callable[[int], None] = lambda layer: None
    ) -> list[Tensor]:
        """Compute the tokens of a step; return the logits that each of its stretches wants.

        Args:
            memory: the step, with cached pages and states of all tokens before its stretches. The
                new tokens are added.
            ready: called with the index of each layer before that layer is computed. The call
                returns when the layer's cached pages may be read.

        Returns:
            by stretch, [tokens from `logits_from` to `end`, vocabulary].
        """
        step = memory.step
        rotations = [self._rotation(step.positions[group.tiles]) for group in step.groups]
        hidden = [
            functional.embedding(step.tokens[group.tiles] % self.vocab_size, self._embedding)
            for group in step.groups
        ]
        for layer, word in enumerate(self.words):
            ready(layer)
            normed = list(map(_normed, hidden))
            if word in "MD":
                mixed = self._scan(layer, normed, memory)
            else:
                mix = self._choose if "I" in word else self._attend
                mixed = [
                    mix(layer, x, group, rotation, memory)
                    for x, group, rotation in zip(normed, step.groups, rotations, strict=True)
                ]
            hidden = [x + each for x, each in zip(hidden, mixed, strict=True)]
            hidden = [x + self._mlp(layer, _normed(x)) for x in hidden]
        return self._logits(hidden, memory)

    def _rotation(self, positions: Tensor) -> Rotation:
        angles = (positions[:, None] + self._row)[..., None].double() * self._frequencies
        return angles.cos().to(self.dtype)[:, :, None], angles.sin().to(self.dtype)[:, :, None]

    def _logits(self, hidden: Sequence[Tensor], memory: PagedKvView) -> list[Tensor]:
        of_group = dict[int, Tensor]()  # [row of a tile, vocabulary]
        size, logits = self.together * self.page_size, []
        for each, rows in zip(memory.stretches, memory.step.rows, strict=True):
            first = each.end - 1 if each.logits_from is None else each.logits_from
            begin = rows.stop - (each.end - first)
            parts = []
            for group in range(begin // size, -(-rows.stop // size)):
                if group not in of_group:
                    of_group[group] = (_normed(hidden[group]) @ self._head).flatten(0, 1)
                wanted = slice(max(begin - group * size, 0), rows.stop - group * size)
                parts.append(of_group[group][wanted])
            logits.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return logits

    # -- layers --------------------------------------------------------------------------------

    def _attend(
        self, layer: int, x: Tensor, group: Group, rotation: Rotation, memory: PagedKvView
    ) -> Tensor:
        weights = self._layers[layer]
        queries = self._project(layer, x, group, rotation, memory)
        mixed = memory.attend(layer, group, queries, weights["sink"])
        return rearrange(mixed, "tile row head dim -> tile row (head dim)") @ weights["out"]

    def _project(
        self, layer: int, x: Tensor, group: Group, rotation: Rotation, memory: PagedKvView
    ) -> Tensor:
        # writes keys and values, and returns the queries [tile, row, head, dim]
        config = self.config
        heads, kv_heads = config.num_query_heads, config.num_kv_heads
        projected = rearrange(
            x @ self._layers[layer]["qkv"],
            "tile row (head dim) -> tile row head dim",
            head=heads + 2 * kv_heads,
        )
        turned = _rotate(projected[:, :, : heads + kv_heads], rotation)
        memory.write_tokens(layer, group, turned[:, :, heads:], projected[:, :, -kv_heads:])
        return turned[:, :, :heads]

    def _choose(
        self, layer: int, x: Tensor, group: Group, rotation: Rotation, memory: PagedKvView
    ) -> Tensor:
        """Compute attention in which each token sees only those that fit it best.

        A token attends to the `top_tokens` earlier tokens whose index keys have the highest product
        with its index query.
        """
        weights, size, top = self._layers[layer], self.page_size, self.config.top_tokens
        assert self._index is not None
        queries = self._project(layer, x, group, rotation, memory)
        memory.write_index(layer, group, x @ weights["index_key"])
        index_queries = rearrange(
            x @ weights["index_query"],
            "tile row (head dim) -> tile row head dim",
            dim=self._index.dim,
        )
        chosen = torch.zeros(*x.shape[:2], top, dtype=torch.int64, device=self.device)
        for place, (page, end_row) in enumerate(group.pages):
            keys = memory.read_index(layer, group.tiles.start + place, page + 1)
            token = torch.arange(len(keys), device=self.device)
            # rows not written yet may hold NaN
            keys = torch.where((token < page * size + end_row)[:, None], keys, 0)
            fits = torch.einsum("rhd,td->rht", index_queries[place], keys).relu().sum(1)
            fits = fits.masked_fill(token > page * size + self._row[:, None], -torch.inf)
            best = fits.topk(min(top, len(keys))).indices.sort().values
            chosen[place, :, : best.shape[1]] = best
        mixed = memory.attend_chosen(layer, group, chosen, queries, weights["sink"])
        return rearrange(mixed, "tile row head dim -> tile row (head dim)") @ weights["out"]

    def _scan(self, layer: int, parts: Sequence[Tensor], memory: PagedKvView) -> list[Tensor]:
        config, weights = self.config, self._layers[layer]
        heads, dim = config.recurrent_heads, config.recurrent_head_dim
        width = heads * (dim + 2 * config.recurrent_state_dim)
        num_gates = 1 if self.words[layer] == "M" else 2
        projected = [x @ weights["in"] for x in parts]
        sizes = [width, heads * dim, num_gates * heads]
        rows = torch.cat(projected).flatten(0, 1)  # of all tiles
        inputs, z, gates = torch.split(rows[:, : sum(sizes)], sizes, dim=1)
        skip = weights["skip"] if self.words[layer] == "M" else None
        scanned = memory.scan(
            layer,
            rearrange(inputs, "row (head channel) -> row head channel", head=heads),
            rearrange(gates, "row (gate head) -> row gate head", head=heads),
            ScanWeights(weights["conv"], weights["decay"], skip),
        )
        outputs = zip(scanned.chunk(len(parts)), z.chunk(len(parts)), strict=True)
        return [self._gated(layer, *each) for each in outputs]

    def _gated(self, layer: int, scanned: Tensor, z: Tensor) -> Tensor:
        outputs = rearrange(_normed(scanned).to(z.dtype), "row head dim -> row (head dim)")
        mixed = (outputs * functional.silu(z)) @ self._layers[layer]["out"]
        return rearrange(mixed, "(tile row) size -> tile row size", row=self.page_size)

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
        projection = self._draw(size, heads * (channels + dim + (1 if word == "M" else 2)))
        # log-spaced, so that every layer has heads with a long memory
        decay = torch.logspace(np.log10(SLOWEST), np.log10(FASTEST), heads, dtype=torch.float64)
        return weights | {
            "in": functional.pad(projection, (0, -projection.shape[1] % ALIGNED)),
            "conv": self._draw(config.conv_taps, heads, channels),
            "decay": decay.to(self.device, self._state_dtype),
            "skip": self._draw(heads, scale=1.0).to(self._state_dtype),
            "out": self._draw(heads * dim, size),
        }


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=EPSILON)


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rearrange(turned, "tile row head dim two -> tile row head (dim two)")


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

"""A small hybrid language model whose logits show every wrong page and every wrong state.

Full attention with sinks, sliding-window attention, Mamba-2 and the gated delta rule, with random
weights: https://arxiv.org/abs/2405.21060 and https://arxiv.org/abs/2412.06464 give the last two.

Logits do not depend, to the bit, on how a sequence was cut: every operation runs on one page of
tokens, in shapes that follow from the page's place alone, with padding for the rows that are not
computed now. So a token gets the same bits in a chunk, by itself, or in another run, whatever part
of what came before it was taken from a cache. Weights are scaled so that states are remembered for
hundreds of tokens: a wrong one shows.

Axes: row (token of a page), token (of the pages read), head, dim, state, tap, channel.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional

from hicache.models import ModelConfig

ROPE_BASE = 10_000.0
EPSILON = 1e-6
SLOWEST, FASTEST = 0.002, 0.05  # decay of a state by one token: it forgets in 20 to 500
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
STATE_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


class Memory(Protocol):
    """Keys, values and states of one sequence."""

    def write_kv(self, layer: int, page: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [row, head, dim] into some rows of a page."""
        ...

    def read_kv(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [token, head, dim] of pages [first, end), each head as often as read."""
        ...

    def read_state(self, layer: int) -> tuple[Tensor, Tensor]:
        """Taps [head, tap, channel] and state [head, state, dim] after the last token."""
        ...

    def write_state(self, layer: int, taps: Tensor, state: Tensor) -> None:
        """Put the taps and the state after the last token."""
        ...


def _always_ready(layer: int) -> None:
    """Nothing is on its way to a layer."""


class ReferenceModel:
    """The layers of `config` with weights drawn from `seed`.

    Raises:
        ValueError: a layer of another kind, or heads that this model does not have.
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
        self._generator = torch.Generator().manual_seed(seed)
        size = config.hidden_size
        self._embedding = self._draw(self.vocab_size, size, scale=1.0)
        self._head = self._draw(size, self.vocab_size)
        self._layers = [self._layer_weights(word) for word in self.words]
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=self.device)
        self._frequencies = ROPE_BASE ** (-dims / config.head_dim)

    @torch.no_grad()
    def forward(
        self,
        tokens: bytes,
        start: int,
        end: int,
        memory: Memory,
        *,
        logits_from: int | None = None,
        ready: Callable[[int], None] = _always_ready,
    ) -> Tensor:
        """Compute tokens `[start, end)` of a sequence, whose memory holds all before `start`.

        Args:
            tokens: the sequence, packed int32.
            start: not necessarily at a page.
            end: likewise.
            memory: read, and extended by the new tokens.
            logits_from: the first token whose logits are wanted; None: the last.
            ready: called before each layer; returns when its memory may be read.

        Returns:
            [end - logits_from, vocabulary].
        """
        page_size = self.page_size
        first_wanted = end - 1 if logits_from is None else logits_from
        pages = range(start // page_size, -(-end // page_size))
        rows = {
            page: slice(max(start - page * page_size, 0), min(end - page * page_size, page_size))
            for page in pages
        }
        hidden = {page: self._embed(tokens, page, rows[page]) for page in pages}
        rotation = {page: self._rotation(page) for page in pages}
        for layer, word in enumerate(self.words):
            ready(layer)
            for page in pages:
                x = hidden[page]
                if word in "FS":
                    y = self._attend(layer, _normed(x), page, rows[page], rotation[page], memory)
                else:
                    y = self._scan(layer, _normed(x), rows[page], memory)
                hidden[page] = self._mlp(layer, x + y)
        wanted = [
            (_normed(hidden[page]) @ self._head)[
                max(rows[page].start, first_wanted - page * page_size) : rows[page].stop
            ]
            for page in pages
            if (page + 1) * page_size > first_wanted
        ]
        return torch.cat(wanted)

    # -- layers --------------------------------------------------------------------------------

    def _embed(self, tokens: bytes, page: int, rows: slice) -> Tensor:
        ids = np.zeros(self.page_size, np.int64)
        first = page * self.page_size
        held = np.frombuffer(tokens, "<i4", rows.stop - rows.start, 4 * (first + rows.start))
        ids[rows] = held % self.vocab_size
        return self._embedding[torch.from_numpy(ids).to(self.device)]

    def _attend(
        self,
        layer: int,
        x: Tensor,
        page: int,
        rows: slice,
        rotation: tuple[Tensor, Tensor],
        memory: Memory,
    ) -> Tensor:
        config, weights, page_size = self.config, self._layers[layer], self.page_size
        heads, kv_heads = config.num_query_heads, config.num_kv_heads
        projected = rearrange(
            x @ weights["qkv"], "row (head dim) -> row head dim", head=heads + 2 * kv_heads
        )
        queries, keys, values = torch.split(projected, [heads, kv_heads, kv_heads], dim=1)
        queries, keys = _rotate(queries, rotation), _rotate(keys, rotation)
        memory.write_kv(layer, page, rows, keys[rows], values[rows])
        sees_all = self.words[layer] == "F"
        first = 0 if sees_all else max(page * page_size - config.window_len + 1, 0) // page_size
        keys, values = memory.read_kv(layer, first, page + 1)
        # rows of this page that nobody has computed yet: weight 0 times garbage must be 0
        num_held = (page - first) * page_size + rows.stop
        keys[num_held:] = values[num_held:] = 0
        position = torch.arange(page * page_size, (page + 1) * page_size, device=self.device)
        place = torch.arange(first * page_size, (page + 1) * page_size, device=self.device)
        seen = place <= position[:, None]
        if not sees_all:
            seen &= place > position[:, None] - config.window_len
        scores = torch.bmm(
            rearrange(queries, "row head dim -> head row dim"),
            repeat(keys, "token head dim -> (head copy) dim token", copy=heads // keys.shape[1]),
        )
        scores = (scores * config.head_dim**-0.5).masked_fill(~seen, -torch.inf)
        sinks = repeat(weights["sink"], "head -> head row 1", row=page_size)
        shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        mixed = torch.bmm(
            shares,
            repeat(
                values, "token head dim -> (head copy) token dim", copy=heads // values.shape[1]
            ),
        )
        return rearrange(mixed, "head row dim -> row (head dim)") @ weights["out"]

    def _scan(self, layer: int, x: Tensor, rows: slice, memory: Memory) -> Tensor:
        config, weights, page_size = self.config, self._layers[layer], self.page_size
        dim, state_dim = config.recurrent_head_dim, config.recurrent_state_dim
        taps, state = memory.read_state(layer)
        num_taps = taps.shape[1]
        inputs = rearrange(
            x @ weights["in"], "row (head channel) -> row head channel", head=config.recurrent_heads
        )
        # the page's inputs behind the last ones before it, each in its own row
        line = inputs.new_zeros(num_taps + page_size, *inputs.shape[1:])
        line[rows.start : rows.start + num_taps] = rearrange(taps, "head tap ... -> tap head ...")
        line[rows.start + num_taps : rows.stop + num_taps] = inputs[rows]
        mixed = torch.zeros_like(inputs)
        for tap in range(num_taps + 1):
            mixed = mixed + line[tap : tap + page_size] * weights["conv"][tap]
        mixed = functional.silu(mixed).to(state.dtype)
        values, keys, queries = torch.split(mixed, [dim, state_dim, state_dim], dim=-1)
        gates = (x @ weights["gates"]).to(state.dtype)
        if self.words[layer] == "M":
            outputs, state = _mamba(weights, gates, values, keys, queries, state, rows)
        else:
            outputs, state = _delta(weights, gates, values, keys, queries, state, rows)
        memory.write_state(
            layer,
            rearrange(line[rows.stop : rows.stop + num_taps], "tap head ... -> head tap ..."),
            state,
        )
        outputs = rearrange(_normed(outputs).to(x.dtype), "row head dim -> row (head dim)")
        return (outputs * functional.silu(x @ weights["z"])) @ weights["out"]

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        weights = self._layers[layer]
        up, gate = (_normed(x) @ weights["up"]).chunk(2, dim=-1)
        return x + (up * functional.silu(gate)) @ weights["down"]

    def _rotation(self, page: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [row, 1, dim / 2] of the angles of a page's tokens."""
        first = page * self.page_size
        position = torch.arange(first, first + self.page_size, device=self.device)
        angles = (position[:, None].double() * self._frequencies)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    # -- weights -------------------------------------------------------------------------------

    def _draw(self, *shape: int, scale: float | None = None) -> Tensor:
        """Normal numbers; without a scale, such that a matrix keeps the size of its input."""
        numbers = torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        return (numbers * (shape[0] ** -0.5 if scale is None else scale)).to(
            self.device, self.dtype
        )

    def _layer_weights(self, word: str) -> dict[str, Tensor]:
        config = self.config
        size = config.hidden_size
        weights = {"up": self._draw(size, 4 * size), "down": self._draw(2 * size, size)}
        if word in "FS":
            heads, dim = config.num_query_heads, config.head_dim
            return weights | {
                "qkv": self._draw(size, (heads + 2 * config.num_kv_heads) * dim),
                "sink": self._draw(heads, scale=1.0),
                "out": self._draw(heads * dim, size),
            }
        heads, dim = config.recurrent_heads, config.recurrent_head_dim
        channels = dim + 2 * config.recurrent_state_dim
        # evenly spaced on a logarithmic scale: every layer has heads that remember for long
        decay = torch.logspace(np.log10(SLOWEST), np.log10(FASTEST), heads, dtype=torch.float64)
        return weights | {
            "in": self._draw(size, heads * channels),
            "gates": self._draw(size, (1 if word == "M" else 2) * heads),
            "z": self._draw(size, heads * dim),
            "conv": self._draw(config.conv_taps, heads, channels),
            "decay": decay.to(self.device, STATE_DTYPES[self.dtype]),
            "skip": self._draw(heads, scale=1.0).to(STATE_DTYPES[self.dtype]),
            "out": self._draw(heads * dim, size),
        }


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions for [row, head, dim]: neighbouring dims turn together."""
    cos, sin = rotation
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rearrange(turned, "row head dim two -> row head (dim two)")


def _mamba(
    weights: dict[str, Tensor],
    gates: Tensor,
    values: Tensor,
    keys: Tensor,
    queries: Tensor,
    state: Tensor,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Mamba-2: the state decays by a scalar of each head, and takes in an outer product."""
    delta = functional.softplus(gates)
    decay = torch.exp(-weights["decay"] * delta)[..., None, None]
    added = keys[..., None] * (delta[..., None] * values)[..., None, :]
    states = torch.zeros_like(added)
    for row in range(rows.start, rows.stop):
        state = torch.addcmul(added[row], decay[row], state)
        states[row] = state
    outputs = (queries[..., None] * states).sum(-2) + weights["skip"][:, None] * values
    return outputs, state


def _delta(
    weights: dict[str, Tensor],
    gates: Tensor,
    values: Tensor,
    keys: Tensor,
    queries: Tensor,
    state: Tensor,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule: what the state answers to a key is moved towards the value."""
    keys = functional.normalize(keys, dim=-1)[..., None]
    queries = functional.normalize(queries, dim=-1)[..., None]
    strength, gate = gates.chunk(2, dim=-1)
    strength = torch.sigmoid(strength)[..., None]
    decay = torch.exp(-weights["decay"] * functional.softplus(gate))[..., None, None]
    states = torch.zeros(*keys.shape[:-1], values.shape[-1], dtype=state.dtype, device=state.device)
    for row in range(rows.start, rows.stop):
        state = decay[row] * state
        answer = (keys[row] * state).sum(-2)
        state = state + keys[row] * (strength[row] * (values[row] - answer))[:, None]
        states[row] = state
    return (queries * states).sum(-2), state


def _refuse_unknown(config: ModelConfig) -> None:
    for word in config.layer_words:
        if word not in ("F", "S", "M", "D"):
            raise ValueError(
                f"model {config.name}: the reference model has layers F, S, M and D, got {word!r}"
            )
    if config.latent_dim or config.value_dim or config.swa_num_kv_heads or config.swa_head_dim:
        raise ValueError(f"model {config.name}: every attention layer must have the same heads")
    if config.kv_dtype_bytes not in DTYPES or config.conv_dtype_bytes != config.kv_dtype_bytes:
        raise ValueError(f"model {config.name}: KV and convolution must have one dtype")
    for word, name in (("M", "recurrent_groups"), ("D", "recurrent_key_heads")):
        wanted, got = config.recurrent_heads, getattr(config, name)
        if word in config.layer_words and got != wanted:
            raise ValueError(f"model {config.name}: {name} must be {wanted}, got {got}")

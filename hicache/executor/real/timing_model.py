"""A model with the shapes of a real one, for timing on a GPU; its results mean nothing.

It reads and writes the same pools, and does the multiplications and the attention of the real
model. All layers share one set of random weights; reading them takes as long as reading real ones
if a layer's weights exceed the L2 cache.

Recurrent layers multiply as many elements as their projections have, and read and write their
states; the scan is not modelled. Experts are modelled as dense layers with a token's active
parameters. That is what a decode batch of one reads, and what a long prompt computes.
"""

from collections.abc import Callable

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.rank_pools import DTYPES
from hicache.models import ModelConfig

# without cuDNN's attention, Hopper's first choice: it compiles for every new length, and every
# decoded token has a new length
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TimingModel:
    """A model with random weights that takes as long as the model in `config`, for timing.

    The outputs mean nothing. The model computes one sequence at a time.

    Raises:
        ValueError: the model does not support a kind of layer.
    """

    def __init__(self, config: ModelConfig, *, page_size: int, device: torch.device) -> None:
        for word in config.layer_words:
            if word not in ("F", "S", "M", "D", "-"):
                raise ValueError(
                    f"model {config.name}: executor.model=timing does not support a layer {word!r}"
                )
        differ = config.value_dim and config.value_dim != config.head_dim
        if config.latent_dim or differ or config.parts:
            raise ValueError(
                f"model {config.name}: executor.model=timing supports neither MLA, nor heads that "
                "differ between layers, nor parts"
            )
        self.config = config
        self.words = config.layer_words
        self.page_size = page_size
        self._device = device
        self._dtype = DTYPES[config.kv_dtype_bytes]
        size = config.hidden_size
        active = config.dense_params + (
            config.num_moe_layers * config.experts_per_token * config.expert_params
        )
        width = active // len(self.words) // (2 * size)
        self._up, self._down = self._draw(size, width), self._draw(width, size)
        vocab = max(config.head_params // size, 1)
        self._embedding, self._head = self._draw(vocab, size), self._draw(size, vocab)

    def _draw(self, *shape: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(0)
        numbers = torch.randn(*shape, generator=generator, device=self._device, dtype=self._dtype)
        scaled: Tensor = numbers * shape[0] ** -0.5
        return scaled

    @torch.no_grad()
    def forward(
        self,
        tokens: bytes,
        start: int,
        end: int,
        memory: PagedKvView,
        *,
        ready: Callable[[int], None] = lambda layer: None,
    ) -> Tensor:
        ids = np.frombuffer(tokens, "<i4", end - start, 4 * start) % len(self._embedding)
        x = self._embedding[torch.from_numpy(ids.astype(np.int64)).to(self._device)]
        with sdpa_kernel(ATTENTION):
            for layer, word in enumerate(self.words):
                ready(layer)
                hidden = functional.silu(x @ self._up)
                if word in ("F", "S"):
                    x = x + self._attend(layer, hidden, start, end, memory)
                elif word in ("M", "D"):
                    taps, state = memory.read_state(layer)
                    memory.write_state(layer, taps, state)
                x = functional.rms_norm(x + hidden @ self._down, x.shape[-1:])
        return x[-1:] @ self._head

    def _attend(
        self, layer: int, hidden: Tensor, start: int, end: int, memory: PagedKvView
    ) -> Tensor:
        config, size = self.config, self.page_size
        is_window = self.words[layer] == "S"
        heads = (is_window and config.swa_num_query_heads) or config.num_query_heads
        kv_heads = (is_window and config.swa_num_kv_heads) or config.num_kv_heads
        dim = (is_window and config.swa_head_dim) or config.head_dim
        # the number of elements that a projection would return, taken from any tensor of the layer
        rows = hidden.repeat(1, -(-(heads + 2 * kv_heads) * dim // hidden.shape[1]))
        rows = rearrange(
            rows[:, : (heads + 2 * kv_heads) * dim], "token (head dim) -> token head dim", dim=dim
        )
        queries, keys, values = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
        memory.write_tokens(layer, start, keys, values)
        first = max(start - config.window_len + 1, 0) // size if is_window else 0
        keys, values = memory.read_kv(layer, first, -(-end // size))
        held = end - first * size
        mask: Tensor | None = None
        if is_window:
            query = torch.arange(start, end, device=self._device)[:, None]
            key = torch.arange(first * size, end, device=self._device)
            mask = (key <= query) & (key > query - config.window_len)
            # with an explicit mask, no fused attention shares KV heads: each query head gets a copy
            keys, values = (each.repeat_interleave(heads // kv_heads, 1) for each in (keys, values))
        elif end - start > 1:
            mask = causal_lower_right(end - start, held)  # a mask that is never materialized
        by_head = [
            rearrange(each, "token head dim -> 1 head token dim")
            for each in (queries, keys[:held], values[:held])
        ]
        mixed = functional.scaled_dot_product_attention(
            by_head[0], by_head[1], by_head[2], attn_mask=mask, enable_gqa=not is_window
        )
        return mixed.transpose(1, 2).flatten(2)[0, :, :1] * self._down[:1]

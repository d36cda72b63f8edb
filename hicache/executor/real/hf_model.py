"""A decoder of Hugging Face's transformers, whose cache is the engine's pages and slots.

`HfModel` takes the place of `ReferenceModel`. The code of the model runs unchanged: it gets a cache
whose layers write new keys, values and states into the pools and read all earlier ones from there.
A state exists only where a call of the model ends, so a call ends wherever a state is captured.

Axes: token, head, dim, channel, tap.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, cache_utils

from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import DTYPES
from hicache.executor.real.reference_model import FASTEST, SLOWEST
from hicache.executor.real.tables import Stretch
from hicache.executor.real.verify import Ready
from hicache.models import ModelConfig

GPU_KERNELS = ("fla", "causal_conv1d", "mamba_ssm")  # transformers calls them where it finds them
Shape = tuple[int, ...]


class Shapes(NamedTuple):
    """What a layer of the model caches: shapes without the axes of sequences and tokens."""

    keys: Shape = ()  # [head, dim]
    values: Shape = ()
    taps: Shape = ()  # [channel]
    state: Shape = ()


class Call(NamedTuple):
    """Consecutive tokens of one sequence, which one call of the model computes."""

    memory: PagedKvView
    stretch: Stretch
    start: int
    end: int
    ready: Ready


class PagedLayer(cache_utils.CacheLayerMixin):
    """Keys and values of one layer in pages; of a window, only the pages that the call sees."""

    def __init__(self, call: Call, layer: int, shapes: Shapes) -> None:
        super().__init__()
        pools = call.memory.pools
        kind = pools.kinds[layer]
        self._call, self._layer, self._shapes = call, layer, shapes
        self._size, window_len = pools.page_size, pools.windows[kind]
        self.is_initialized, self.is_sliding = True, window_len > 0
        first = max(call.start - window_len + 1, 0) if window_len else 0
        self._first_page = first // self._size
        # [kv, page, token, head, dim]
        self._pool = pools.ranks[0].kv[kind][pools.holders[layer]]
        ids = call.stretch.pages[kind][: -(-call.end // self._size)]
        self._pages = torch.tensor(ids, device=self._pool.device)

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        """Add the keys and values [1, head, token, dim] of the new tokens; return all of them."""
        self._call.ready(self._layer)
        shape, length = self._pool.shape, self.get_mask_sizes(0)[0]
        rows = torch.cat([each[0].transpose(0, 1).flatten(1) for each in (keys, values)], 1)
        position = torch.arange(self._call.start, self._call.end, device=rows.device)
        places = self._pages[position // self._size], position % self._size
        self._pool[:, *places] = rows.view(-1, shape[0], *shape[3:]).transpose(0, 1)
        held = self._pool[:, self._pages[self._first_page :]].flatten(1, 2)[:, :length]
        parts = held.transpose(0, 1).flatten(1).tensor_split([math.prod(self._shapes.keys)], 1)
        return tuple(
            part.reshape(-1, *shape).transpose(0, 1)[None]
            for part, shape in zip(parts, self._shapes[:2], strict=True)
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = self._first_page * self._size
        return self._call.end - before, before

    def get_seq_length(self) -> int:
        return self._call.start

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *_: object) -> None: ...


class SlotLayer(cache_utils.LinearAttentionLayer):
    """Convolution inputs (taps) and recurrent state of one layer, in the slot of the sequence."""

    def __init__(self, call: Call, layer: int, shapes: Shapes) -> None:
        super().__init__()
        pools, slot = call.memory.pools, call.stretch.slot
        place = sum("M" in word or "D" in word for word in pools.model.layer_words[:layer])
        taps, states = pools.ranks[0].taps[place], pools.ranks[0].states[place]
        self._taps = taps[slot].view(1, *shapes.taps, -1)
        self.conv_states = {0: self._taps}
        self.recurrent_states = {0: states[slot].view(1, *(shapes.state or [0]))}
        self.is_recurrent_states_initialized = {0: True}
        self.has_previous_state = {0: call.start > 0}

    def update_conv_state(self, new: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        """Add inputs [1, channel, token]; return them after those kept, 0 before the first."""
        line = torch.cat([self._taps, new], -1)
        self._taps.copy_(line[..., -self._taps.shape[-1] :])
        return line


class SlotAndPagedLayer(SlotLayer, PagedLayer):
    """A layer with attention and a recurrent state side by side."""

    def __init__(self, call: Call, layer: int, shapes: Shapes) -> None:
        PagedLayer.__init__(self, call, layer, shapes)
        SlotLayer.__init__(self, call, layer, shapes)


class PoolCache(cache_utils.Cache):
    """The cache of one call, on the pools."""

    def __init__(self, call: Call, layers: list[Shapes]) -> None:
        self._ready, made = call.ready, list[Any]()
        for layer, shapes in enumerate(layers):
            made.append(cache_utils.DummyLayer())
            if shapes.keys or shapes.taps:
                slot = SlotAndPagedLayer if shapes.keys else SlotLayer
                made[-1] = (slot if shapes.taps else PagedLayer)(call, layer, shapes)
        super().__init__(layers=made)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._ready(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)


class HfModel:
    """A causal language model of transformers that keeps its cache in the engine's pools.

    Weights come from safetensors files beside the config.json, or are random if there are none.

    Args:
        config: the shape of the model, derived from the config.json that `from_hf` names.
        page_size: tokens of a page.
        seed: seed of random weights.
        device: where the model computes.
        is_cut: True if a call begins where a page begins, and ends in that page. It computes the
            page's earlier tokens again, so logits have the same bits with any cache.

    Raises:
        ValueError: the engine's pools cannot hold what the model caches.
    """

    together = 1

    def __init__(
        self, config: ModelConfig, *, page_size: int, seed: int, device: str, is_cut: bool
    ) -> None:
        self.config, self.page_size, self.device = config, page_size, torch.device(device)
        # seen: 1.3e-5 with 4 bytes, 0.09 with 2; planted mistakes make 1 to 5
        self.tolerance = 0.0 if is_cut else 1e-3 if config.kv_dtype_bytes == 4 else 0.5
        self._is_cut = is_cut
        self._kept: dict[tuple[TorchPools, int], list[Tensor]] = {}
        if not config.from_hf or config.window_restarts or config.kv_dtype_bytes not in DTYPES:
            raise ValueError(
                "executor.model=hf needs model.from_hf, no chunked attention, and "
                f"model.kv_dtype_bytes of 2 or 4, got {config.kv_dtype_bytes} in {config.name}"
            )
        path, dtype = Path(config.from_hf), DTYPES[config.kv_dtype_bytes]
        folder = path if path.is_dir() else path.parent
        files = sorted(folder.glob("*.safetensors"))
        transformers.utils.logging.set_verbosity_error()
        with _hidden(GPU_KERNELS if device == "cpu" else ()):
            if files:
                model, found = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, local_files_only=True, output_loading_info=True
                )
                if found["missing_keys"]:
                    raise ValueError(f"{folder}: weights are missing: {found['missing_keys']}")
            else:
                read = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
                model = _random_model(read, dtype, seed)
        self._model = model.to(self.device).eval()
        self.vocab_size = model.config.get_text_config().vocab_size
        self._layers = self._probed()
        weights = [(each.name, each.stat().st_mtime_ns) for each in files] or f"seed {seed}"
        self.origin = f"transformers {transformers.__version__}, {weights}, cut {is_cut}"

    @torch.no_grad()
    def forward(self, memory: PagedKvView, *, ready: Ready = lambda layer: None) -> list[Tensor]:
        """Compute the tokens of a step, as `ReferenceModel.forward` does."""
        return [self._logits(memory, each, ready) for each in memory.stretches]

    def _logits(self, memory: PagedKvView, stretch: Stretch, ready: Ready) -> Tensor:
        start, end, captures = stretch.start, stretch.end, dict(stretch.captures)
        first = end - 1 if stretch.logits_from is None else stretch.logits_from
        tokens = torch.frombuffer(bytearray(stretch.tokens), dtype=torch.int32)[None, :end]
        stops, size = {*captures, end}, self.page_size
        if self._is_cut:
            stops.update(range(max(first, start) + 1, end))
            stops.update(range((start // size + 1) * size, end, size))
            for layer in range(len(self._layers)):
                ready(layer)
        found, begin = [], start
        for stop in sorted(stops):
            if self._is_cut:
                held, begin = begin, (stop - 1) // size * size
                self._at_page(memory.pools, stretch.slot, held, begin)
            output = self._model(
                tokens[:, begin:stop].long().to(self.device) % self.vocab_size,
                cache=PoolCache(Call(memory, stretch, begin, stop, ready), self._layers),
                use_cache=True,
                logits_to_keep=1 if self._is_cut else max(stop - max(begin, first), 1),
            )
            if stop > first:
                found.append(output.logits[0].float())
            if stop in captures:
                memory.pools.copy_states([stretch.slot], [captures[stop]])
            begin = stop
        return torch.cat(found)

    def _at_page(self, pools: TorchPools, slot: int, held: int, begin: int) -> None:
        """Bring the state in a sequence's slot from after `held` tokens to after `begin`.

        The state at the last page's start is kept for this.
        """
        parts = [part[slot] for rank in pools.ranks for part in (*rank.taps, *rank.states)]
        if held == begin:
            self._kept[pools, slot] = [part.clone() for part in parts]
        for part, kept in zip(parts, self._kept[pools, slot], strict=True):
            part.copy_(kept)

    @torch.no_grad()
    def _probed(self) -> list[Shapes]:
        """Return what each layer caches, as a call with transformers' own cache shows it.

        Raises:
            ValueError: the pools have other room for it.
        """
        config, layers = self.config, []
        cache = cache_utils.DynamicCache(config=self._model.config)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        self._model(ids, cache=cache, use_cache=True)
        room = {kind: config.layer_bytes(kind, 1) for kind in ("full", "swa", "mamba")}
        for layer, (word, held) in enumerate(zip(config.layer_words, cache.layers, strict=True)):
            parts = [getattr(held, name, None) for name in ("keys", "values")]
            for name in ("conv_states", "recurrent_states"):
                parts.append(getattr(held, name, {0: None})[0])
            axes = [() if part is None else tuple(part.shape[1:]) for part in parts]
            shapes = Shapes(axes[0][::2], axes[1][::2], axes[2][:1], axes[3])
            layers.append(shapes)
            sizes = [
                0 if part is None else math.prod(shape) * part.itemsize
                for shape, part in zip(shapes, parts, strict=True)
            ]
            window_len = getattr(held, "sliding_window", 0)
            window_len *= window_len < config.max_len  # a longer one sees all
            got = sum(sizes[:2]), window_len, sizes[2] * (config.conv_taps - 1) + sizes[3]
            tokens = room["swa" if "S" in word else "full"][layer]
            wanted = int(tokens), config.window_len * ("S" in word), int(room["mamba"][layer])
            if got != wanted:
                raise ValueError(
                    f"model {config.name}: layer {layer}, a {type(held).__name__}, caches {got} "
                    "(bytes a token, tokens of a window, bytes of a state), but "
                    f"{word!r} in model.pattern stands for {wanted}"
                )
        return layers


def _random_model(config: Any, dtype: torch.dtype, seed: int) -> Any:
    """Return a model with random weights that keep the norm of what they multiply.

    So a wrong page changes the logits. States remember 20 to 500 tokens, as in `ReferenceModel`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, weights in model.named_parameters():
            if name.endswith("A_log"):
                decay = torch.linspace(SLOWEST, FASTEST, weights.numel())
                weights.data.copy_(decay.log().view_as(weights))
            elif name.endswith("dt_bias"):
                weights.data.zero_()
            elif weights.ndim > 1:
                weights.data.normal_(0, weights.shape[-1] ** -0.5)
    return model


@contextmanager
def _hidden(packages: tuple[str, ...]) -> Iterator[None]:
    """Make imports of `packages` fail for a while."""
    held = {name: sys.modules.get(name) for name in packages}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in held.items() if module})

"""The draft of speculative decoding: layers with the shape of the model's full-attention layers."""

from dataclasses import replace

from hicache.models.shapes import LayerKind, ModelConfig, Part

DRAFT_NAME = "draft"  # of the part of a page that holds its KV


def draft_of(model: ModelConfig, num_layers: int) -> ModelConfig:
    """Return the model that drafts: `num_layers` layers, and the output head of `model`.

    Each layer has the mean parameters of a layer of `model`, and its full attention.
    """
    return replace(
        model,
        name=f"draft of {model.name}",
        num_layers=num_layers,
        num_full_layers=num_layers,
        num_swa_layers=0,
        num_mamba_layers=0,
        window_len=0,
        top_tokens=0,
        pattern="",
        parts=(),
        dense_params=num_layers * model.dense_params // model.num_layers,
        embedding_params=0,
        num_moe_layers=round(num_layers * model.num_moe_layers / model.num_layers),
    )


def with_draft_kv(model: ModelConfig, num_layers: int) -> ModelConfig:
    """Return `model` with the KV of its draft in the pages of full-attention KV."""
    heads = 0 if model.latent_dim else model.num_kv_heads
    dim, size = sum(model.row_dims(LayerKind.full)) // max(heads, 1), model.kv_dtype_bytes
    part = Part(name=DRAFT_NAME, num_layers=num_layers, dim=dim, element_bytes=size, heads=heads)
    return replace(model, parts=(*model.parts, part))


def with_draft_layers(model: ModelConfig, num_layers: int) -> ModelConfig:
    """Return `model` with those of its draft as its last layers, so that its logits need them."""
    return replace(
        model,
        num_layers=model.num_layers + num_layers,
        num_full_layers=model.num_full_layers + num_layers,
        pattern=" ".join([*model.layer_words, *["F"] * num_layers]),
    )

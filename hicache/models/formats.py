"""Bytes of a page or a state in another number format than the model's own.

The sizes are those of `hicache.kernels.transcode`: the codes, a 4-byte scale per row for all but
bf16, and for fp4 another byte for each 16 elements. A row is the largest power of two that divides
the last axis, at most 256.
"""

from hicache.models.shapes import LayerKind, ModelConfig

PLAIN = "plain"
FORMATS = (PLAIN, "int8", "fp8", "bf16", "fp4")
CODE_BITS = {"int8": 8, "fp8": 8, "bf16": 16, "fp4": 4}
MAX_ROW = 256


def coded_page_bytes(model: ModelConfig, kind: LayerKind, page_size: int, form: str) -> int:
    """Return the bytes of one cached page of `page_size` tokens in the number format `form`.

    For the kind mamba, return the bytes of one state. Convolution inputs, and data that `form`
    would not make smaller, keep the model's own format.
    """

    def row_bytes(length: int, element_bytes: int = model.kv_dtype_bytes) -> int:
        bits = CODE_BITS.get(form, 8 * element_bytes)
        if 8 * element_bytes <= bits:
            return length * element_bytes
        row = min(length & -length, MAX_ROW)
        scale_bytes = {"bf16": 0, "fp4": 4 + row // 16}.get(form, 4)
        return length * bits // 8 + length // row * scale_bytes

    if form == PLAIN:
        return model.page_bytes(kind, page_size)
    if kind is not LayerKind.mamba:
        token_bytes = sum(map(row_bytes, model.row_dims(kind)))
        return page_size * model.num_holders(kind) * token_bytes
    rows = model.num_mamba_layers * model.recurrent_heads * model.recurrent_state_dim
    plain = model.recurrent_head_dim * model.state_dtype_bytes
    if not rows:
        return model.mamba_slot_bytes
    coded = row_bytes(model.recurrent_head_dim, model.state_dtype_bytes)
    return model.mamba_slot_bytes - rows * (plain - coded)

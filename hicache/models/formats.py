"""Bytes of a page or a state in another number format than the model's own.

The sizes are those of `hicache.kernels.transcode`: the codes, and for int8 and fp8 a 4-byte scale
per row. A row is the largest power of two that divides the last axis, at most 256.
"""

from hicache.models.shapes import LayerKind, ModelConfig

PLAIN = "plain"
FORMATS = (PLAIN, "int8", "fp8", "bf16")
CODE_BYTES = {"int8": 1, "fp8": 1, "bf16": 2}
SCALE_BYTES = {"int8": 4, "fp8": 4, "bf16": 0}
MAX_ROW = 256


def coded_page_bytes(model: ModelConfig, kind: LayerKind, page_size: int, form: str) -> int:
    """Return the bytes of one cached page of `page_size` tokens in the number format `form`.

    For the kind mamba, return the bytes of one state. Convolution inputs, and data that `form`
    would not make smaller, keep the model's own format.
    """

    def row_bytes(length: int, element_bytes: int = model.kv_dtype_bytes) -> int:
        if element_bytes <= CODE_BYTES.get(form, element_bytes):
            return length * element_bytes
        num_rows = length // min(length & -length, MAX_ROW)
        return length * CODE_BYTES[form] + num_rows * SCALE_BYTES[form]

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

"""Parts of models with sparse attention: index keys, and the compressed KV of DeepSeek-V4."""

from hicache.models.config_file import ConfigFile
from hicache.models.shapes import Part

STATE_TOKENS = 128  # a compressor keeps its state at multiples of the longest entry


def index_keys(file: ConfigFile, element_bytes: float) -> dict[str, object]:
    """Return the `ModelConfig` fields `parts` and `top_tokens` of a model with sparse attention.

    `parts` describes the cached index keys, which choose the tokens that a query attends to.
    `top_tokens` is the number of chosen tokens per query. `file` is the model's config.json.
    `element_bytes` is the size of one element of an index key.
    """
    if "index_topk_blocks" in file.values:
        top = file.count("index_topk_blocks") * file.count("index_block_size")
    else:
        top = file.count("index_topk")
    part = Part(
        name="index",
        letter="I",
        dim=file.count("index_head_dim"),
        element_bytes=element_bytes,
        query_heads=file.count("index_n_heads"),
        query_dim=file.count("index_head_dim"),
    )
    return {"parts": (part,), "top_tokens": top}


def compressed_parts(file: ConfigFile, element_bytes: float) -> tuple[Part, ...]:
    """Return what DeepSeek-V4 caches besides its sliding windows.

    `ModelConfig.pattern` gives each layer its letters:

    - Layers with C cache one compressed KV entry per 4 tokens, and an index key for each entry.
    - Layers with H cache one compressed KV entry per 128 tokens.
    - Layers with C also cache a state of the compressor, because their entries overlap.

    `file` is the model's config.json. `element_bytes` is the size of one element of an entry or of
    an index key.
    """
    heads, dim = file.count("num_attention_heads"), file.count("head_dim")
    index_dim, index_heads = file.count("index_head_dim"), file.count("index_n_heads")
    top = file.count("index_topk")
    both = {"element_bytes": element_bytes, "query_heads": heads, "query_dim": 2 * dim}
    return (
        Part(name="c4", letter="C", dim=dim, tokens=4, top=top, **both),  # type: ignore[arg-type]
        Part(
            name="index",
            letter="C",
            dim=index_dim,
            tokens=4,
            element_bytes=element_bytes,
            query_heads=index_heads,
            query_dim=index_dim,
        ),
        Part(name="c128", letter="H", dim=dim, tokens=128, **both),  # type: ignore[arg-type]
        # an entry of 4 tokens also depends on the 4 before it: their projection and its gate in
        # fp32, for the entry and its index key
        Part(
            name="compressor",
            rides_on="swa",
            letter="C",
            dim=4 * 2 * (dim + index_dim),
            tokens=STATE_TOKENS,
            element_bytes=4,
        ),
    )

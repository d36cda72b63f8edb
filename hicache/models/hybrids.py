"""Hybrid models: names of their own for recurrent layers, translated to those of other files."""

from hicache.models.config_file import ConfigFile

# model types whose linear attention is Mamba, with defaults of their classes in transformers 5.23
MAMBA_2 = ("falcon_h1", "bamba", "granitemoehybrid")
CONVOLUTIONS = ("lfm2", "lfm2_moe")


def complete(file: ConfigFile) -> None:
    """Complete the config.json of a hybrid model with the fields that `hugging_face` looks for.

    One of them is `recurrent_params`, the number of parameters of a recurrent layer's matrices. It
    is added if the layer is neither Mamba-2 nor a delta rule.
    """
    values, kind, hidden = file.values, file.kind, file.count("hidden_size")
    if kind in (*MAMBA_2, *CONVOLUTIONS, "jamba"):
        values["layer_types"] = _layer_types(file)
        values.pop("layers_block_type", None)
    if kind in MAMBA_2:
        heads = values["mamba_num_heads"] = file.count("mamba_n_heads")
        inner = file.count("mamba_d_ssm", default=hidden * file.count("mamba_expand"))
        head_dim = values.get("mamba_d_head", "auto")
        values["mamba_head_dim"] = inner // heads if head_dim == "auto" else head_dim
        values |= {"ssm_state_size": values["mamba_d_state"], "n_groups": values["mamba_n_groups"]}
        values["conv_kernel"] = values["mamba_d_conv"]
        if kind == "granitemoehybrid" and not file.has("num_local_experts"):
            values["intermediate_size"] = file.count("shared_intermediate_size")
    elif kind == "jamba":
        inner, state = hidden * file.count("mamba_expand"), file.count("mamba_d_state")
        rank = -(-hidden // 16)
        if values.get("mamba_dt_rank", "auto") != "auto":
            rank = file.count("mamba_dt_rank")
        values |= _one_head_each(inner, state, file.count("mamba_d_conv"))
        values["recurrent_params"] = inner * (3 * hidden + 2 * rank + 2 * state)
        every, first = file.count("expert_layer_period"), file.count("expert_layer_offset", least=0)
        num = file.count("num_hidden_layers")
        if file.count("num_experts") == 1:
            del values["num_experts"]
        values["mlp_layer_types"] = [
            "sparse" if layer % every == first else "dense" for layer in range(num)
        ]
    elif kind in CONVOLUTIONS:
        values |= _one_head_each(hidden, 0, file.count("conv_L_cache"))
        values["recurrent_params"] = 4 * hidden * hidden
        values["first_k_dense_replace"] = file.count("num_dense_layers", default=0, least=0)
        if kind == "lfm2" and values.get("block_auto_adjust_ff_dim"):
            width = int(2 * file.count("block_ff_dim", "intermediate_size") / 3)
            width = int(float(str(values["block_ffn_dim_multiplier"])) * width)
            multiple = file.count("block_multiple_of")
            values["intermediate_size"] = -(-width // multiple) * multiple
    elif kind == "bailing_hybrid":
        values["max_position_embeddings"] = file.count(
            "model_max_length", "max_position_embeddings"
        )
        heads = values["linear_num_heads"] = file.count("num_attention_heads")
        inner = heads * file.count("linear_head_dim", "head_dim")
        values.setdefault("linear_head_dim", inner // heads)
        values["recurrent_params"] = hidden * (6 * inner + heads)
    elif kind == "olmo_hybrid":
        heads = file.count("num_attention_heads")
        keys = file.count("linear_num_key_heads", default=heads)
        dim = file.count("linear_key_head_dim", default=int(0.75 * hidden / keys))
        values |= {"linear_num_key_heads": keys, "linear_key_head_dim": dim}
        values.setdefault("linear_num_value_heads", heads)
        values.setdefault("linear_value_head_dim", 2 * dim)


def _one_head_each(inner: int, state: int, taps: int) -> dict[str, object]:
    # channels of their own: B and C, if there are any, bypass the convolution
    return {
        "mamba_num_heads": inner,
        "mamba_head_dim": 1,
        "ssm_state_size": state,
        "n_groups": 0,
        "conv_kernel": taps,
    }


def _layer_types(file: ConfigFile) -> list[object]:
    num = file.count("num_hidden_layers")
    if file.kind == "falcon_h1":
        return ["parallel"] * num
    if file.kind == "jamba":
        every, first = file.count("attn_layer_period"), file.count("attn_layer_offset", least=0)
        return ["attention" if layer % every == first else "mamba" for layer in range(num)]
    name = next((each for each in ("layer_types", "layers_block_type") if each in file.values), "")
    if name:
        # transformers writes linear_attention for Mamba as well
        return ["mamba" if x == "linear_attention" else x for x in file.each_layer(name, num)]
    listed = file.values.get("attn_layer_indices", file.values.get("full_attn_idxs"))
    if not isinstance(listed, list):
        raise ValueError(f"{file.where}: layer_types is missing, which says where attention is")
    return ["attention" if layer in listed else "mamba" for layer in range(num)]

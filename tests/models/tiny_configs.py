"""A configuration of a few hundred thousand parameters for every text-generation family.

Most are made by one rule: every size that a configuration class knows gets its small value. What a
family needs beyond that is in `OVERRIDES`; what is no text generation, or cannot be small, is in
`NOT_TEXT` with the reason.
"""

from typing import Any

VOCAB_SIZE = 320
NUM_LAYERS = 4
WINDOW = 24
CONTEXT = 512

SIZES: dict[str, int] = {
    # the residual stream
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim"], 64),
    **dict.fromkeys(["embedding_size", "lru_width", "attention_hidden_size", "hidden_dim"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "dff"], 96),
    **dict.fromkeys(["encoder_ffn_dim", "ffn_hidden_size", "d_inner", "dim_ff"], 96),
    **dict.fromkeys(["intermediate_size_mlp", "dense_intermediate_size"], 96),
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    # layers
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], NUM_LAYERS),
    **dict.fromkeys(["decoder_layers", "num_decoder_layers", "encoder_layers"], NUM_LAYERS),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers"], 1),
    "num_encoder_layers": NUM_LAYERS,
    "n_layers_per_attn_res_block": 1,
    "num_kv_shared_layers": 0,
    # heads
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_decoder_attention_heads", "num_encoder_attention_heads"], 4),
    "swa_num_attention_heads": 4,
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "kv_n_heads"], 2),
    **dict.fromkeys(["swa_num_key_value_heads", "num_global_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "kv_channels", "d_kv", "attention_head_dim"], 16),
    **dict.fromkeys(["global_head_dim", "swa_head_dim", "swa_v_head_dim", "d_head"], 16),
    # latent and sparse attention
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank", "v_head_dim"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim"], 8),
    **dict.fromkeys(["qk_head_dim", "index_head_dim", "index_topk", "rel_extent"], 16),
    "index_n_heads": 2,
    # positions
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_sequence_length"], CONTEXT),
    **dict.fromkeys(["max_seq_len", "n_ctx", "max_seq_length"], CONTEXT),
    **dict.fromkeys(["sliding_window", "attention_window_size", "window_size"], WINDOW),
    **dict.fromkeys(["attention_chunk_size", "sliding_window_size"], WINDOW),
    # experts
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "shared_intermediate_size"], 32),
    **dict.fromkeys(["expert_ffn_hidden_size", "ffn_hidden", "moe_latent_size"], 32),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    "moe_num_experts": 4,
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "num_shared_experts"], 1),
    "moe_num_shared_experts": 1,
    "zero_expert_num": 2,
    # recurrent states
    **dict.fromkeys(["mamba_d_state", "mamba_d_head", "state_size", "ssm_state_size"], 16),
    **dict.fromkeys(["mamba_head_dim", "mamba_chunk_size", "chunk_size", "mamba_headdim"], 16),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "mamba_dt_rank", "time_step_rank"], 8),
    **dict.fromkeys(["mamba_n_groups", "n_groups", "mamba_ngroups"], 1),
    **dict.fromkeys(["mamba_expand", "n_mamba_heads", "linear_num_key_heads"], 2),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    "linear_num_value_heads": 4,
    "mamba_d_conv": 4,
    "mamba_d_ssm": 128,
    # odds and ends
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "adapter_rank": 8,
    "block_size": 16,
    "type_vocab_size": 2,
}

NO_TOKEN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SOME_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LEFT_OUT = object()
"""For a size that the class knows and does not take."""
HEADS = {"head_dim": 16, "num_key_value_heads": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "cwm": SOME_TOKENS,
    "deepseek_v2": EXPERTS,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": EXPERTS,
    "emu3_text_model": SOME_TOKENS,
    "emu3": SOME_TOKENS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "ministral": HEADS,
    "mllama": SOME_TOKENS,
    "mllama_text_model": SOME_TOKENS | {"cross_attention_layers": [1]},
    "modernbert-decoder": SOME_TOKENS | {"cls_token_id": 1, "sep_token_id": 2},
    "nemotron": HEADS,
    "prophetnet": {"num_hidden_layers": LEFT_OUT},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [16, 32],
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
NOT_TEXT: dict[str, str] = {
    "blt": "reads bytes in patches, and its patcher is a second model",
    "gemma4_assistant": "drafts tokens for another model",
    "gemma4_unified_assistant": "drafts tokens for another model",
    "fuyu": "text and image patches",
    "git": "describes images",
    "moshi": "speaks and listens: its tokens are audio codes",
    "musicgen": "its tokens are audio codes",
    "musicgen_melody": "its tokens are audio codes",
}


def tiny_config(model_type: str) -> Any:
    """A small configuration of this family. Raises whatever its class does when that fails."""
    from transformers import CONFIG_MAPPING

    return shrunk(CONFIG_MAPPING[model_type])


def shrunk(config_class: Any) -> Any:
    """The class's defaults with every known size made small, in its parts as well."""
    base = config_class()
    known = base.to_dict()
    chosen: dict[str, Any] = {
        name: size
        for name, size in SIZES.items()
        if isinstance(known.get(name), int) and not isinstance(known[name], bool)
    }
    if "kv_lora_rank" in known:  # latent attention has as many KV heads as heads
        chosen["num_key_value_heads"] = 4
        chosen.pop("head_dim", None)
    if "is_decoder" in known and not known.get("is_encoder_decoder"):
        chosen["is_decoder"] = True
    if "forced_eos_token_id" in known:  # `generate` would end with it, whatever the logits say
        chosen["forced_eos_token_id"] = None
    for name in ("initializer_range", "init_std"):
        if name in known:
            chosen[name] = 0.3  # large enough that greedy output is not constant
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if getattr(part, "model_type", ""):
            chosen[name] = shrunk(part).to_dict()
    chosen |= NO_TOKEN | OVERRIDES.get(config_class.model_type, {})
    return config_class(**{name: it for name, it in chosen.items() if it is not LEFT_OUT})

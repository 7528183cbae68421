"""Models with recurrence beside attention."""

from __future__ import annotations

from cases.decoders import BASE
from cases.latent import sparse
from making import case

DELTA = {
    **BASE,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
}

DELTA_MOE = {
    **DELTA,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 14,
}

GRANITE = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_chunk_size": 8,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "residual_multiplier": 0.3,
    "shared_intermediate_size": 14,
}
NEMOTRON = {
    **{key: value for key, value in BASE.items() if key != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "n_groups": 2,
    "ssm_state_size": 5,
    "chunk_size": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "moe_shared_expert_intermediate_size": 10,
}

JAMBA = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 0,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "mamba_d_state": 5,
    "mamba_dt_rank": 9,
}

MAMBA = {
    "vocab_size": 31,
    "hidden_size": 24,
    "state_size": 5,
    "num_hidden_layers": 3,
    "time_step_rank": 9,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "residual_in_fp32": False,
}

MAMBA2 = {
    **{key: value for key, value in MAMBA.items() if key != "time_step_rank"},
    "num_heads": 6,
    "head_dim": 8,
    "n_groups": 2,
    "chunk_size": 8,
}

LFM2 = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 5,
    "conv_L_cache": 3,
}

LFM2_MOE = {
    **{key: value for key, value in LFM2.items() if key != "block_multiple_of"},
    "moe_intermediate_size": 14,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}

CASES = (
    case("jamba", "jamba", "JambaForCausalLM", "JambaConfig", JAMBA),
    case("jamba-classifier", "jamba", "JambaForSequenceClassification", "JambaConfig", JAMBA),
    case(
        "jamba-dense",
        "jamba",
        "JambaForCausalLM",
        "JambaConfig",
        JAMBA,
        num_experts=1,
        mamba_dt_rank="auto",
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
    sparse("lfm2_moe", "lfm2_moe", "Lfm2Moe", LFM2_MOE),
    case("lfm2", "lfm2", "Lfm2ForCausalLM", "Lfm2Config", LFM2),
    case(
        "lfm2-biased",
        "lfm2",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        LFM2,
        conv_bias=True,
        tie_word_embeddings=False,
        block_auto_adjust_ff_dim=False,
    ),
    case(
        "granitemoehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        GRANITE,
    ),
    case(
        "granitemoehybrid-dense",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        GRANITE,
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
    sparse("nemotron_h", "nemotron_h", "NemotronH", NEMOTRON),
    sparse(
        "nemotron_h-latent",
        "nemotron_h",
        "NemotronH",
        NEMOTRON,
        moe_latent_size=9,
        use_bias=True,
        mlp_bias=True,
    ),
    case("mamba", "mamba", "MambaForCausalLM", "MambaConfig", MAMBA),
    case(
        "mamba-bare", "mamba", "MambaModel", "MambaConfig", MAMBA, time_step_rank="auto", use_conv_bias=False
    ),
    case(
        "mamba-untied",
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        MAMBA,
        use_bias=True,
        tie_word_embeddings=False,
    ),
    case(
        "falcon_mamba",
        "mamba",
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        MAMBA,
        tie_word_embeddings=False,
    ),
    case("mamba2", "mamba2", "Mamba2ForCausalLM", "Mamba2Config", MAMBA2),
    case(
        "mamba2-tied",
        "mamba2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        MAMBA2,
        use_bias=True,
        tie_word_embeddings=True,
    ),
    case("qwen3_5", "qwen3_5", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA),
    case("qwen3_5-classifier", "qwen3_5", "Qwen3_5TextForSequenceClassification", "Qwen3_5TextConfig", DELTA),
    case(
        "qwen3_5-tied",
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        DELTA,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    ),
    case("qwen3_5_moe", "qwen3_5_moe", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", DELTA_MOE),
    case("qwen3_next", "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig", DELTA_MOE),
)

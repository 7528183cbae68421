"""The values that each key of a model's configuration may have, checked once, when a model is recognised.

Tables, probes and libraries can then trust the settings: sizes are integers within limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from transfusion.errors import ArchitectureError
from transfusion.runtime.untrusted_files import require_finite, validate

SECTIONS = (
    *("vision_config", "text_config", "vlm_config", "mask_decoder_config", "prompt_encoder_config"),
    *("model_cfg", "vision_cfg", "text_cfg", "model_args"),
)
"""Parts of a configuration that are configurations themselves."""
DEEPEST = 4
"""The limit of sections that lie within each other."""
WRONG_FILE = "fetch the config.json that belongs to these weights"

Size: TypeAlias = Annotated[int, Field(ge=1, le=2**24)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=2**24)]
Few: TypeAlias = Annotated[int, Field(ge=1, le=64)]
Depth: TypeAlias = Annotated[int, Field(ge=1, le=10_000)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Sizes: TypeAlias = Annotated[list[Size], Field(min_length=1, max_length=64)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=2**14)]
Sides: TypeAlias = Side | Annotated[list[Side], Field(min_length=2, max_length=3)]
Tokens: TypeAlias = int | list[int] | None
Labels: TypeAlias = dict[str | int, str | int | float | None]
Section: TypeAlias = dict[str, Any]

_KINDS: dict[Any, str] = {
    Size: """
        d_ff d_model decoder_attention_heads decoder_ffn_dim dim embed_dim embedding_size
        encoder_attention_heads encoder_ffn_dim ffn_dim head_width heads hidden_dim hidden_size
        intermediate_size moe_intermediate_size n_embd n_embed n_head n_heads
        intermediate_size_mlp num_local_experts shared_expert_intermediate_size width
        cap_feat_dim caption_channels caption_projection_dim num_cross_attention_heads freq_dim in_channels
        joint_attention_dim pooled_projection_dim text_dim
    """,
    Size | None: """
        attention_head_size context_length d_kv head_dim max_position_embeddings max_source_positions
        max_target_positions n_ctx n_head_kv n_inner n_positions num_codevector_groups
        num_codevectors_per_group num_experts num_experts_per_tok num_key_value_heads num_kv_heads
        num_attention_heads num_mel_bins num_patches ffn_hidden_size original_max_position_embeddings
        projection_dim projection_size relative_attention_num_buckets relative_attention_max_distance
        rotary_dim vocab_size
        word_embed_proj_dim codevector_dim proj_codevector_dim classifier_proj_size num_channels in_chans
        num_conv_pos_embeddings num_conv_pos_embedding_groups
        added_kv_proj_dim image_dim n_kv_heads out_channels pos_embed_max_size pos_embed_seq_len
        rope_max_seq_len cross_attention_dim cross_attention_head_dim norm_num_groups time_cond_proj_dim
        addition_time_embed_dim projection_class_embeddings_input_dim
        interleave_moe_layer_step no_rope_layer_interval
    """,
    Count | None: """
        num_classes num_labels num_register_tokens reg_tokens sliding_window type_vocab_size
    """,
    Depth: """
        decoder_layers encoder_layers layers n_layer n_layers num_hidden_layers
    """,
    Depth | None: "n_refiner_layers num_decoder_layers num_single_layers depth",
    Depth | Sizes: "num_layers",
    Sizes: """
        all_f_patch_size all_patch_size axes_dims axes_dims_rope block_out_channels conv_dim
        conv_kernel conv_stride depths
    """,
    Size | Sizes | None: "attention_head_dim num_heads",
    Annotated[list[Side], Field(min_length=1, max_length=64)]: "axes_lens",
    Few | Annotated[list[Few], Field(min_length=1, max_length=64)]: "layers_per_block",
    Size | Sizes: "transformer_layers_per_block",
    Sides | None: "image_size img_size input_size patch_size sample_size",
    Sides | dict[str, Side] | None: "max_image_size size",
    Annotated[list[Count], Field(max_length=10_000)] | None: "dual_attention_layers",
    Fraction | None: "partial_rotary_factor rotary_pct rotary_emb_fraction",
    Number | None: """
        layer_norm_eps layer_norm_epsilon mlp_ratio norm_eps norm_epsilon rms_norm_eps rope_theta
        residual_multiplier rotary_emb_base eps t_scale interpolation_scale
    """,
    bool | None: """
        alibi attention_bias class_token custom_text do_layer_norm_before do_stable_layer_norm
        feat_proj_layer_norm is_encoder_decoder mlp_bias multi_query new_decoder_architecture parallel_attn
        qkv_bias quick_gelu relative_attention rope_interleaved rotary_emb_interleaved
        scale_decoder_outputs share_att_key tie_word_embeddings use_parallel_residual
        cross_attn_norm guidance_embeds use_additional_t_cond use_layer3d_rope zero_cond_t
        use_additional_conditions use_linear_projection
    """,
    Annotated[float, Field(ge=0.05, le=2)] | None: "crop_pct test_crop_pct",
    Literal["shortest", "longest", "squash"] | None: "resize_mode",
    Annotated[int, Field(ge=0, le=255)] | None: "fill_color",
    str: "_class_name architecture feat_extract_norm model_type",
    str | None: """
        _name_or_path activation_function crop_mode dtype feed_forward_proj hidden_act pool_type torch_dtype
    """,
    Annotated[list[str], Field(min_length=1, max_length=64)]: "down_block_types up_block_types",
    list[str] | None: "architectures label_names layer_types",
    list[Count] | None: "moe_layers no_rope_layers",
    list[str] | str | None: "pos_att_type",
    list[Number] | Number | None: "mean std",
    Labels | None: "id2label label2id",
    Tokens: """
        bos_token_id decoder_start_token_id eos_id eos_token_id pad_id pad_token_id sep_token_id
        cls_token_id mask_token_id
    """,
    Section: """
        mask_decoder_config model_cfg prompt_encoder_config text_cfg text_config vision_cfg vision_config
        vlm_config
    """,
    Section | None: "model_args preprocess_cfg pretrained_cfg rope_parameters rope_scaling",
}
KINDS: Mapping[str, Any] = {key: kind for kind, keys in _KINDS.items() for key in keys.split()}
"""The type of each key's value; null is allowed where it means 'not given'."""


def require_sensible(config: Mapping[str, Any], label: str) -> None:
    """Refuse a configuration with a value that its key cannot have."""
    for key, value, within in _parts(
        config, (*SECTIONS, "preprocess_cfg", "pretrained_cfg", "rope_parameters")
    ):
        if key in KINDS:
            place, info = ".".join((*within, key)), list(value) if isinstance(value, tuple) else value
            validate(info, KINDS[key], f"{label}: {place}", hint=WRONG_FILE, error=ArchitectureError)
        if len(within) > DEEPEST:
            raise ArchitectureError(f"{label}: sections are nested too deeply", hint=WRONG_FILE)
    require_finite(config, label, hint=WRONG_FILE, error=ArchitectureError)


def settings_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return every setting of a configuration; those of its sections have dotted names."""
    for key, value, within in _parts(config, SECTIONS):
        if not (key in SECTIONS and isinstance(value, dict)):
            yield ".".join((*within, key)), value


def _parts(
    config: Mapping[str, Any], sections: tuple[str, ...]
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Every key with its value and the sections that it lies in; a section itself comes before its keys."""
    waiting: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), config)]
    while waiting:
        within, part = waiting.pop()
        for key, value in part.items():
            yield key, value, within
            if key in sections and isinstance(value, dict):
                waiting.append(((*within, key), value))


def shared(whole: int, parts: int, what: str) -> int:
    """Return ``whole / parts``; refuse a remainder."""
    share, rest = divmod(whole, parts)
    if rest or share < 1:
        raise ArchitectureError(
            f"the configuration divides {what}, but {whole} is not a multiple of {parts}", hint=WRONG_FILE
        )
    return share

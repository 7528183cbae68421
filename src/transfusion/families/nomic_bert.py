"""NomicBERT as in transformers: post-norm, fused projections, rotary positions, a gated MLP, BERT's heads."""

from __future__ import annotations

from transfusion.architecture.table import ANGLES, Axis, Config, Family, Stack, Table, fixed
from transfusion.families import bert
from transfusion.families._shared import HARMLESS, usual_sizes
from transfusion.families.modernbert import AXES

ROWS = """
embeddings.word_embeddings.weight         vocab -> x@first
embeddings.token_type_embeddings.weight   type -> x@first
emb_ln.*                                  scale x@first
encoder.layers.{}.attn.Wqkv.*             [(head qk)|(head qk)|(head vo)] <- x
encoder.layers.{}.attn.out_proj.*         y <- (head vo)
encoder.layers.{}.norm1.*                 scale y
encoder.layers.{}.mlp.fc11.*              ffn <- y
encoder.layers.{}.mlp.fc12.*              ffn <- y
encoder.layers.{}.mlp.fc2.*               x@next <- ffn
encoder.layers.{}.norm2.*                 scale x@next
"""

SHORTCUTS = """
encoder.layers.{}.attn   x -> y        encoder.layers.{}.attn.out_proj
encoder.layers.{}.mlp    y -> x@next   encoder.layers.{}.mlp.fc2
"""

# The keys of transformers, and those of the first releases.
FORMERLY = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}


def _axes(config: Config) -> tuple[Axis, ...]:
    """Return the axes. Pairs of units are half a head apart, unless settings of early releases differ."""
    if not config.get("rotary_emb_interleaved") and config.get("rotary_emb_fraction", 1.0) == 1.0:
        return AXES
    still = fixed("qk", ANGLES, scope="layer", within="head")
    return tuple(still if axis.name == "qk" else axis for axis in AXES)


def table(config: Config, names: frozenset[str]) -> Table:
    sizes = {key: config[key if key in config else former] for key, former in FORMERLY.items()}
    layers = sizes["num_hidden_layers"]
    head = {"qk": config["head_dim"]} if config.get("head_dim") else {}
    axes, sizes = (*_axes(config), bert.TYPE), {**usual_sizes(sizes), **head}
    stack = Stack("layer", layers, ROWS, axes, sizes, SHORTCUTS)
    return bert.with_heads(stack, config, names)


FAMILIES = (
    Family(
        name="nomic_bert",
        library="transformers",
        table=table,
        signature=(
            "embeddings.word_embeddings.weight",
            "emb_ln.weight",
            "encoder.layers.0.attn.Wqkv.weight",
            "encoder.layers.0.mlp.fc11.weight",
        ),
        model_types=("nomic_bert",),
        inputs=("tokens",),
        prefixes=("nomic_bert.", "bert."),
        aliases=(
            ("embeddings.LayerNorm", "emb_ln"),
            ("layers.{}.self_attn.q_proj", "encoder.layers.{}.attn.Wqkv[0]"),
            ("layers.{}.self_attn.k_proj", "encoder.layers.{}.attn.Wqkv[1]"),
            ("layers.{}.self_attn.v_proj", "encoder.layers.{}.attn.Wqkv[2]"),
            ("layers.{}.self_attn.o_proj", "encoder.layers.{}.attn.out_proj"),
            ("layers.{}.self_attn", "encoder.layers.{}.attn"),
            ("layers.{}.mlp.up_proj", "encoder.layers.{}.mlp.fc11"),
            ("layers.{}.mlp.gate_proj", "encoder.layers.{}.mlp.fc12"),
            ("layers.{}.mlp.down_proj", "encoder.layers.{}.mlp.fc2"),
            ("layers.{}.post_attention_layernorm", "encoder.layers.{}.norm1"),
            ("layers.{}.post_mlp_layernorm", "encoder.layers.{}.norm2"),
            ("layers.{}", "encoder.layers.{}"),
            ("cls.predictions.transform.layer_norm", "cls.predictions.transform.LayerNorm"),
        ),
        known_keys=HARMLESS
        | bert.SIZES
        | {"max_position_embeddings", "type_vocab_size", "head_dim", "rope_parameters"}
        | {"n_embd", "n_layer", "n_head", "n_inner", "n_positions", "activation_function", "auto_map"}
        | {"qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_base", "rotary_emb_fraction"}
        | {"rotary_emb_interleaved", "rotary_emb_scale_base", "rotary_scaling_factor", "causal"}
        | {"max_trained_positions", "dense_seq_output", "last_layer_subset", "pad_vocab_size_multiple"}
        | {"fused_bias_fc", "fused_dropout_add_ln", "use_flash_attn", "use_rms_norm", "use_xentropy"}
        | {"reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx", "scale_attn_weights"}
        | {"summary_activation", "summary_first_dropout", "summary_proj_to_labels"}
        | {"summary_type", "summary_use_proj"},
        required={
            **bert.REQUIRED,
            "prenorm": (False,),
            "parallel_block": (False,),
            "parallel_block_tied_norm": (False,),
        },
    ),
)

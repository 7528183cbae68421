"""Llama and Mistral as in transformers: RMSNorm, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

from typing import Any

from transfusion.architectures._shared import (
    HARMLESS,
    LABEL,
    PLAIN,
    VOCAB,
    needs_config,
)
from transfusion.tables import Axis, Config, Family, Shapes, Stack, Table, fixed

ROWS = """
embed_tokens.weight                         vocab -> x@first
layers.{}.input_layernorm.weight            x
layers.{}.self_attn.q_proj.*                (group rep qk) <- x
layers.{}.self_attn.k_proj.*                (group qk) <- x
layers.{}.self_attn.v_proj.*                (group vo) <- x
layers.{}.self_attn.o_proj.*                y <- (group rep vo)
layers.{}.post_attention_layernorm.weight   y
layers.{}.mlp.gate_proj.*                   ffn <- y
layers.{}.mlp.up_proj.*                     ffn <- y
layers.{}.mlp.down_proj.*                   x@next <- ffn
norm.weight                                 x@last
"""

SHORTCUTS = """
layers.{}.input_layernorm            x -> y        layers.{}.self_attn.o_proj
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.mlp.down_proj
"""

HEADS = """
lm_head.weight   vocab <- x@last
score.*          label <- x@last
qa_outputs.*     label <- x@last
"""

# A query head may change places with another of its group, never with one of another group.
AXES = (
    Axis("group"),
    Axis("rep", within="group"),
    fixed("qk", "rotary positions turn each pair of units by its own angle", scope="layer", within="group"),
    Axis("vo", within="group", twin="qk"),
    Axis("ffn"),
)


def table(config: Config, names: frozenset[str]) -> Table:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    tied = config.get("tie_word_embeddings", False)
    return Table(
        stacks=(
            Stack(
                "layer",
                config["num_hidden_layers"],
                ROWS,
                AXES,
                sizes={
                    "x": config["hidden_size"],
                    "group": groups,
                    "rep": heads // groups,
                    "ffn": config["intermediate_size"],
                },
                shortcuts=SHORTCUTS,
            ),
        ),
        axes=(VOCAB, LABEL),
        heads=HEADS,
        buffers="layers.{}.self_attn.rotary_emb.inv_freq",
        unified=(("x@first", "x@last"),) if tied else (),
        ties={"lm_head.weight": "embed_tokens.weight"} if tied else {},
        outputs={"last_hidden_state": "x@last"},
    )


def guess(shapes: Shapes) -> tuple[dict[str, Any], str]:
    raise needs_config("llama", "the number of attention heads")


FAMILIES = (
    Family(
        name="llama",
        library="transformers",
        table=table,
        guess=guess,
        signature=(
            "embed_tokens.weight",
            "layers.0.self_attn.q_proj.weight",
            "layers.0.post_attention_layernorm.weight",
            "layers.0.mlp.gate_proj.weight",
            "norm.weight",
        ),
        model_types=("llama", "mistral"),
        inputs=("tokens",),
        prefixes=("model.", "transformer."),
        known_keys=HARMLESS
        | {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
        | {"head_dim", "intermediate_size", "max_position_embeddings", "attention_bias", "mlp_bias"}
        | {"rope_theta", "rope_scaling", "rope_parameters", "rope_interleaved"}
        | {"sliding_window", "layer_types", "pretraining_tp"},
        required=PLAIN,
    ),
)

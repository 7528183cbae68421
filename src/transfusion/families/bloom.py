"""BLOOM as in transformers: ALiBi, so heads cannot move; queries, keys and values interleaved by head."""

from __future__ import annotations

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import Axis, Config, Stack, Table, fixed
from transfusion.families._decoders import ALIBI, KNOWN, decoder, family
from transfusion.families._shared import PLAIN

ROWS = """
word_embeddings.weight                    vocab -> x@first
word_embeddings_layernorm.*               scale x@first
h.{}.input_layernorm.*                    scale x
h.{}.self_attention.query_key_value.*     (head [qk|qk|vo]) <- x
h.{}.self_attention.dense.*               y <- (head vo)
h.{}.post_attention_layernorm.*           scale y
h.{}.mlp.dense_h_to_4h.*                  ffn <- y
h.{}.mlp.dense_4h_to_h.*                  x@next <- ffn
ln_f.*                                    scale x@last
"""

SHORTCUTS = """
h.{}.input_layernorm            x -> y        h.{}.self_attention.dense
h.{}.post_attention_layernorm   y -> x@next   h.{}.mlp.dense_4h_to_h
"""

AXES = (
    fixed("head", ALIBI, scope="layer"),
    Axis("qk", within="head"),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
)


def table(config: Config, names: frozenset[str]) -> Table:
    width = config.get("hidden_size") or config["n_embed"]
    heads = config.get("n_head") or config["num_attention_heads"]
    sizes = {"x": width, "head": heads, "vo": shared(width, heads, "the width among the heads")}
    stack = Stack("layer", config["n_layer"], ROWS, AXES, sizes, SHORTCUTS)
    tied = bool(config.get("tie_word_embeddings", True))
    return decoder(stack, tied=tied, embedding="word_embeddings.weight", buffers="")


FAMILIES = (
    family(
        "bloom",
        ("bloom",),
        table,
        """
        word_embeddings.weight h.0.self_attention.query_key_value.weight ln_f.weight
        word_embeddings_layernorm.weight
        """,
        prefixes=("transformer.",),
        known_keys=KNOWN
        | {"n_layer", "n_head", "n_embed", "n_inner", "pretraining_tp", "slow_but_exact", "seq_length"}
        | {"attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add"}
        | {"skip_bias_add_qkv", "offset_alibi", "unk_token_id"},
        required={**PLAIN, "apply_residual_connection_post_layernorm": (False, None)},
    ),
)

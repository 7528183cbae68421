"""BART (post-norm) and mBART (pre-norm) as in transformers: an encoder and a decoder, learned positions."""

from __future__ import annotations

from functools import partial
from typing import Any

from transfusion.architectures._shared import (
    ATTENTION,
    CROSS,
    HARMLESS,
    LABEL,
    PLAIN,
    POSITION,
    VOCAB,
    depth,
    heads_of_64,
)
from transfusion.tables import Axis, Config, Family, Shapes, Stack, Table

ENCODER = """
shared.weight                                  vocab -> x@first
encoder.embed_positions.weight                 position -> x@first
encoder.layernorm_embedding.*                  x@first
encoder.layers.{{}}.self_attn.q_proj.*         (head qk) <- x
encoder.layers.{{}}.self_attn.k_proj.*         (head qk) <- x
encoder.layers.{{}}.self_attn.v_proj.*         (head vo) <- x
encoder.layers.{{}}.self_attn.out_proj.*       y <- (head vo)
encoder.layers.{{}}.self_attn_layer_norm.*     {norm}
encoder.layers.{{}}.fc1.*                      ffn <- y
encoder.layers.{{}}.fc2.*                      x@next <- ffn
encoder.layers.{{}}.final_layer_norm.*         {last_norm}
"""

DECODER = """
decoder.embed_positions.weight                 position -> x@first
decoder.layernorm_embedding.*                  x@first
decoder.layers.{{}}.self_attn.q_proj.*         (head qk) <- x
decoder.layers.{{}}.self_attn.k_proj.*         (head qk) <- x
decoder.layers.{{}}.self_attn.v_proj.*         (head vo) <- x
decoder.layers.{{}}.self_attn.out_proj.*       y <- (head vo)
decoder.layers.{{}}.self_attn_layer_norm.*     {norm}
decoder.layers.{{}}.encoder_attn.q_proj.*      (cross_head cross_qk) <- y
decoder.layers.{{}}.encoder_attn.k_proj.*      (cross_head cross_qk) <- encoder.x@last
decoder.layers.{{}}.encoder_attn.v_proj.*      (cross_head cross_vo) <- encoder.x@last
decoder.layers.{{}}.encoder_attn.out_proj.*    z <- (cross_head cross_vo)
decoder.layers.{{}}.encoder_attn_layer_norm.*  {cross_norm}
decoder.layers.{{}}.fc1.*                      ffn <- z
decoder.layers.{{}}.fc2.*                      x@next <- ffn
decoder.layers.{{}}.final_layer_norm.*         {last_norm}
"""

POST_NORM = {
    "encoder": """
        encoder.layers.{}.self_attn.q_proj   x -> y        encoder.layers.{}.self_attn.out_proj
        encoder.layers.{}.fc1                y -> x@next   encoder.layers.{}.fc2
    """,
    "decoder": """
        decoder.layers.{}.self_attn.q_proj      x -> y        decoder.layers.{}.self_attn.out_proj
        decoder.layers.{}.encoder_attn.q_proj   y -> z        decoder.layers.{}.encoder_attn.out_proj
        decoder.layers.{}.fc1                   z -> x@next   decoder.layers.{}.fc2
    """,
}

PRE_NORM = {
    "encoder": """
        encoder.layers.{}.self_attn_layer_norm   x -> y        encoder.layers.{}.self_attn.out_proj
        encoder.layers.{}.final_layer_norm       y -> x@next   encoder.layers.{}.fc2
    """,
    "decoder": """
        decoder.layers.{}.self_attn_layer_norm      x -> y        decoder.layers.{}.self_attn.out_proj
        decoder.layers.{}.encoder_attn_layer_norm   y -> z        decoder.layers.{}.encoder_attn.out_proj
        decoder.layers.{}.final_layer_norm          z -> x@next   decoder.layers.{}.fc2
    """,
}

HEADS = """
lm_head.weight                   vocab <- decoder.x@last
final_logits_bias                _ vocab
qa_outputs.*                     label <- decoder.x@last
classification_head.dense.*      sentence <- decoder.x@last
classification_head.out_proj.*   label <- sentence
"""

TIES = dict.fromkeys(
    ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight"
)


def stack(name: str, config: Config, *, before: bool) -> Stack:
    """The encoder or the decoder, with norms before or behind each branch."""
    encoder = name == "encoder"
    inner = "y" if encoder else "z"
    rows = (ENCODER if encoder else DECODER).format(
        norm="x" if before else "y",
        cross_norm="y" if before else "z",
        last_norm=inner if before else "x@next",
    )
    heads = config[f"{name}_attention_heads"]
    return Stack(
        name,
        config[f"{name}_layers"],
        rows + f"{name}.layer_norm.* x@last" if before else rows,
        (*ATTENTION, POSITION) if encoder else (*ATTENTION, *CROSS, POSITION),
        sizes={
            "x": config["d_model"],
            "head": heads,
            "cross_head": heads,
            "ffn": config[f"{name}_ffn_dim"],
        },
        shortcuts=(PRE_NORM if before else POST_NORM)[name],
        points=("x", "y") if encoder else ("x", "y", "z"),
    )


def table(config: Config, names: frozenset[str], *, before: bool) -> Table:
    return Table(
        stacks=(stack("encoder", config, before=before), stack("decoder", config, before=before)),
        axes=(Axis("sentence", scope="model"), VOCAB, LABEL),
        heads=HEADS,
        unified=(("encoder.x@first", "decoder.x@first"), ("encoder.x@first", "decoder.x@last")),
        ties=TIES,
        outputs={
            "last_hidden_state": "decoder.x@last",
            "encoder_last_hidden_state": "encoder.x@last",
        },
    )


def guess(shapes: Shapes) -> tuple[dict[str, Any], str]:
    config: dict[str, Any] = {}
    for name in ("encoder", "decoder"):
        ffn, width = shapes[f"{name}.layers.0.fc1.weight"]
        heads, note = heads_of_64(width, "bart")
        config |= {
            "d_model": width,
            f"{name}_layers": depth(shapes, f"{name}.layers.{{}}."),
            f"{name}_attention_heads": heads,
            f"{name}_ffn_dim": ffn,
        }
    return config, note


SIGNATURE = (
    "shared.weight",
    "encoder.layernorm_embedding.weight",
    "encoder.layers.0.fc1.weight",
    "decoder.layers.0.encoder_attn.q_proj.weight",
    "decoder.layers.0.fc1.weight",
)
KNOWN = (
    HARMLESS
    | {"d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "encoder_layerdrop"}
    | {"num_hidden_layers", "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"}
    | {"decoder_layerdrop", "max_position_embeddings", "activation_function", "activation_dropout"}
    | {"init_std", "classif_dropout", "scale_embedding", "add_bias_logits", "extra_pos_embeddings"}
    | {"force_bos_token_to_be_generated", "normalize_embedding", "save_step"}
)
TIED = {
    **PLAIN,
    "tie_word_embeddings": (True,),
    "is_decoder": (False,),
    "static_position_embeddings": (False,),
}

FAMILIES = (
    Family(
        name="bart",
        library="transformers",
        table=partial(table, before=False),
        guess=guess,
        signature=SIGNATURE,
        fits=lambda shapes: "encoder.layer_norm.weight" not in shapes,
        model_types=("bart",),
        inputs=("tokens",),
        prefixes=("model.",),
        known_keys=KNOWN,
        required={**TIED, "normalize_before": (False,), "add_final_layer_norm": (False,)},
    ),
    Family(
        name="mbart",
        library="transformers",
        table=partial(table, before=True),
        guess=guess,
        signature=(*SIGNATURE, "encoder.layer_norm.weight"),
        model_types=("mbart",),
        inputs=("tokens",),
        prefixes=("model.",),
        known_keys=KNOWN,
        required={**TIED, "normalize_before": (True,), "add_final_layer_norm": (True,)},
    ),
)

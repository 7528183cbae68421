"""BART, mBART (pre-norm) and Marian (computed positions) as in transformers: an encoder and a decoder."""

from __future__ import annotations

from functools import partial

from transfusion.architecture.table import Axis, Config, Family, Stack, Table
from transfusion.families._shared import (
    ATTENTION,
    CROSS,
    HARMLESS,
    LABEL,
    PLAIN,
    POSITION,
    VOCAB,
)

ENCODER = """
{embeddings}
encoder.layers.{{}}.self_attn.q_proj.*         (head qk) <- x
encoder.layers.{{}}.self_attn.k_proj.*         (head qk) <- x
encoder.layers.{{}}.self_attn.v_proj.*         (head vo) <- x
encoder.layers.{{}}.self_attn.out_proj.*       y <- (head vo)
encoder.layers.{{}}.self_attn_layer_norm.*     scale {norm}
encoder.layers.{{}}.fc1.*                      ffn <- y
encoder.layers.{{}}.fc2.*                      x@next <- ffn
encoder.layers.{{}}.final_layer_norm.*         scale {last_norm}
"""

DECODER = """
{embeddings}
decoder.layers.{{}}.self_attn.q_proj.*         (head qk) <- x
decoder.layers.{{}}.self_attn.k_proj.*         (head qk) <- x
decoder.layers.{{}}.self_attn.v_proj.*         (head vo) <- x
decoder.layers.{{}}.self_attn.out_proj.*       y <- (head vo)
decoder.layers.{{}}.self_attn_layer_norm.*     scale {norm}
decoder.layers.{{}}.encoder_attn.q_proj.*      (cross_head cross_qk) <- y
decoder.layers.{{}}.encoder_attn.k_proj.*      (cross_head cross_qk) <- encoder.x@last
decoder.layers.{{}}.encoder_attn.v_proj.*      (cross_head cross_vo) <- encoder.x@last
decoder.layers.{{}}.encoder_attn.out_proj.*    z <- (cross_head cross_vo)
decoder.layers.{{}}.encoder_attn_layer_norm.*  scale {cross_norm}
decoder.layers.{{}}.fc1.*                      ffn <- z
decoder.layers.{{}}.fc2.*                      x@next <- ffn
decoder.layers.{{}}.final_layer_norm.*         scale {last_norm}
"""

SHARED = """
shared.weight   vocab -> encoder.x@first
"""

LEARNED = """
{name}.embed_positions.weight   position -> x@first
{name}.layernorm_embedding.*    scale x@first
"""

# Whether a file has them or not: they are written in the order of the units, and no file keeps them
# when the model is saved again.
COMPUTED = """
{name}.embed_positions.weight?   position -> x@first
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


def stack(name: str, config: Config, *, before: bool, embeddings: str) -> Stack:
    """The encoder or the decoder, with norms before or behind each branch."""
    encoder = name == "encoder"
    inner = "y" if encoder else "z"
    rows = (ENCODER if encoder else DECODER).format(
        embeddings=embeddings.strip().format(name=name),
        norm="x" if before else "y",
        cross_norm="y" if before else "z",
        last_norm=inner if before else "x@next",
    )
    heads = config[f"{name}_attention_heads"]
    return Stack(
        name,
        config[f"{name}_layers"],
        rows + f"{name}.layer_norm.* scale x@last" if before else rows,
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


def table(config: Config, names: frozenset[str], *, before: bool = False, embeddings: str = LEARNED) -> Table:
    why = "the library adds positions that it computes"
    return Table(
        stacks=tuple(
            stack(name, config, before=before, embeddings=embeddings) for name in ("encoder", "decoder")
        ),
        axes=(Axis("sentence", scope="model"), VOCAB, LABEL),
        rows=SHARED,
        heads=HEADS,
        buffers="encoder.version decoder.version",
        unified=(("encoder.x@first", "decoder.x@first"), ("encoder.x@first", "decoder.x@last")),
        pinned={"encoder.x@first": why} if embeddings == COMPUTED else {},
        ties=TIES,
        outputs={
            "last_hidden_state": "decoder.x@last",
            "encoder_last_hidden_state": "encoder.x@last",
        },
    )


SIGNATURE = (
    "shared.weight",
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
    | {"force_bos_token_to_be_generated", "save_step"}
)
TIED = {**PLAIN, "tie_word_embeddings": (True,), "is_decoder": (False,)}
POSITIONS_LEARNED = {"static_position_embeddings": (False,), "normalize_embedding": (True,)}
POSITIONS_COMPUTED = {"static_position_embeddings": (True,), "normalize_embedding": (False,)}
NORMS_BEHIND = {"normalize_before": (False,), "add_final_layer_norm": (False,)}
NORMS_BEFORE = {"normalize_before": (True,), "add_final_layer_norm": (True,)}
NORMED = "encoder.layernorm_embedding.weight"
LAST_NORM = "encoder.layer_norm.weight"

FAMILIES = (
    Family(
        name="bart",
        library="transformers",
        table=table,
        signature=(*SIGNATURE, NORMED),
        fits=lambda shapes: LAST_NORM not in shapes,
        model_types=("bart",),
        inputs=("tokens",),
        prefixes=("model.",),
        known_keys=KNOWN,
        required={**TIED, **POSITIONS_LEARNED, **NORMS_BEHIND},
    ),
    Family(
        name="mbart",
        library="transformers",
        table=partial(table, before=True),
        signature=(*SIGNATURE, NORMED, LAST_NORM),
        model_types=("mbart",),
        inputs=("tokens",),
        prefixes=("model.",),
        known_keys=KNOWN,
        required={**TIED, **POSITIONS_LEARNED, **NORMS_BEFORE},
    ),
    Family(
        name="marian",
        library="transformers",
        table=partial(table, embeddings=COMPUTED),
        signature=SIGNATURE,
        fits=lambda shapes: NORMED not in shapes and LAST_NORM not in shapes,
        model_types=("marian",),
        inputs=("tokens",),
        prefixes=("model.",),
        computed=("encoder.embed_positions.weight", "decoder.embed_positions.weight"),
        known_keys=KNOWN | {"decoder_vocab_size"},
        required={
            **TIED,
            **POSITIONS_COMPUTED,
            **NORMS_BEHIND,
            "share_encoder_decoder_embeddings": (True,),
        },
    ),
)

"""T5, mT5 and UMT5 as in transformers: an encoder and a decoder, pre-norm, with relative positions."""

from __future__ import annotations

from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.table import Axis, Config, Family, Shapes, Stack, Table, fixed
from transfusion.families._shared import ATTENTION, CROSS, HARMLESS, LABEL, PLAIN, VOCAB

ENCODER = """
shared.weight                                       vocab -> x@first
{distances}                                         distance -> head
encoder.block.{{}}.layer.0.layer_norm.weight        scale x
encoder.block.{{}}.layer.0.SelfAttention.q.weight   (head qk) <- x
encoder.block.{{}}.layer.0.SelfAttention.k.weight   (head qk) <- x
encoder.block.{{}}.layer.0.SelfAttention.v.weight   (head vo) <- x
encoder.block.{{}}.layer.0.SelfAttention.o.weight   y <- (head vo)
encoder.block.{{}}.layer.1.layer_norm.weight        scale y
{mlp}
encoder.final_layer_norm.weight                     scale x@last
"""

DECODER = """
{distances}                                           distance -> head
decoder.block.{{}}.layer.0.layer_norm.weight          scale x
decoder.block.{{}}.layer.0.SelfAttention.q.weight     (head qk) <- x
decoder.block.{{}}.layer.0.SelfAttention.k.weight     (head qk) <- x
decoder.block.{{}}.layer.0.SelfAttention.v.weight     (head vo) <- x
decoder.block.{{}}.layer.0.SelfAttention.o.weight     y <- (head vo)
decoder.block.{{}}.layer.1.layer_norm.weight          scale y
decoder.block.{{}}.layer.1.EncDecAttention.q.weight   (cross_head cross_qk) <- y
decoder.block.{{}}.layer.1.EncDecAttention.k.weight   (cross_head cross_qk) <- encoder.x@last
decoder.block.{{}}.layer.1.EncDecAttention.v.weight   (cross_head cross_vo) <- encoder.x@last
decoder.block.{{}}.layer.1.EncDecAttention.o.weight   z <- (cross_head cross_vo)
decoder.block.{{}}.layer.2.layer_norm.weight          scale z
{mlp}
decoder.final_layer_norm.weight                       scale x@last
"""

MLP = """
{mlp}.wi.weight?     ffn <- {point}
{mlp}.wi_0.weight?   ffn <- {point}
{mlp}.wi_1.weight?   ffn <- {point}
{mlp}.wo.weight      x@next <- ffn
"""

ENCODER_SHORTCUTS = """
encoder.block.{}.layer.0.layer_norm   x -> y        encoder.block.{}.layer.0.SelfAttention.o
encoder.block.{}.layer.1.layer_norm   y -> x@next   encoder.block.{}.layer.1.DenseReluDense.wo
"""

DECODER_SHORTCUTS = """
decoder.block.{}.layer.0.layer_norm   x -> y        decoder.block.{}.layer.0.SelfAttention.o
decoder.block.{}.layer.1.layer_norm   y -> z        decoder.block.{}.layer.1.EncDecAttention.o
decoder.block.{}.layer.2.layer_norm   z -> x@next   decoder.block.{}.layer.2.DenseReluDense.wo
"""

HEADS = """
lm_head.weight                   vocab <- decoder.x@last
qa_outputs.*                     label <- decoder.x@last
classification_head.dense.*      sentence <- decoder.x@last
classification_head.out_proj.*   label <- sentence
classifier.*                     label <- encoder.x@last
"""

ENCODER_HEADS = """
classifier.*   label <- encoder.x@last
"""

DISTANCES = "{}.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"


UNITS = ("qk", "vo", "cross_qk", "cross_vo")
"""What has as many units as the configuration gives a head."""


def stack(name: str, config: Config, names: frozenset[str]) -> Stack:
    """The encoder or the decoder.

    In T5 the first block's table of distances serves all blocks, so heads move as one; in UMT5 every
    block has a table of its own.
    """
    encoder = name == "encoder"
    alone = DISTANCES.format(name, 1) in names
    layers: int = config["num_layers"]
    if not encoder:
        layers = config.get("num_decoder_layers") or layers
    mlp = f"{name}.block.{{}}.layer.{1 if encoder else 2}.DenseReluDense"
    return Stack(
        name,
        layers,
        (ENCODER if encoder else DECODER).format(
            distances=DISTANCES.format(name, "{}" if alone else 0),
            mlp=MLP.strip().format(mlp=mlp, point="y" if encoder else "z"),
        ),
        (
            Axis("head", scope="layer" if alone else "stack"),
            *ATTENTION[1:],
            *(() if encoder else CROSS),
            fixed("distance", "distances select its rows", scope="stack"),
        ),
        sizes={
            **(dict.fromkeys(UNITS, int(config["d_kv"])) if config.get("d_kv") else {}),
            "x": config["d_model"],
            "head": config["num_heads"],
            "cross_head": config["num_heads"],
            "ffn": config["d_ff"],
        },
        shortcuts=ENCODER_SHORTCUTS if encoder else DECODER_SHORTCUTS,
        points=("x", "y") if encoder else ("x", "y", "z"),
    )


def table(config: Config, names: frozenset[str]) -> Table:
    encoder = stack("encoder", config, names)
    if not any(name.startswith("decoder.") for name in names):
        return Table(
            stacks=(encoder,),
            axes=(VOCAB, LABEL),
            heads=ENCODER_HEADS,
            ties={"encoder.embed_tokens.weight": "shared.weight"},
            outputs={"last_hidden_state": "encoder.x@last"},
        )
    tied = reads_as_it_writes(config, names)
    return Table(
        stacks=(encoder, stack("decoder", config, names)),
        axes=(Axis("sentence", scope="model"), VOCAB, LABEL),
        heads=HEADS,
        buffers="decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        unified=(
            ("encoder.x@first", "decoder.x@first"),
            *((("encoder.x@first", "decoder.x@last"),) if tied else ()),
        ),
        ties={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            **({"lm_head.weight": "shared.weight"} if tied else {}),
        },
        outputs={
            "last_hidden_state": "decoder.x@last",
            "encoder_last_hidden_state": "encoder.x@last",
        },
    )


def reads_as_it_writes(config: Config, names: frozenset[str]) -> bool:
    """Whether words are read and written with one matrix.

    T5 1.1 has two and says so; transformers 5 says it in another key, and ties them where a file has one.
    """
    if config.get("tie_word_embeddings", True) and config.get("scale_decoder_outputs", True):
        return True
    generates = (config.get("architectures") or [""])[0].endswith("ForConditionalGeneration")
    return generates and "lm_head.weight" not in names


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration: the table of relative positions has a column for every head."""
    width, ffn = shapes["encoder.block.0.layer.1.DenseReluDense.wo.weight"]
    return {
        "num_layers": depth(shapes, "encoder.block.{}."),
        "num_decoder_layers": depth(shapes, "decoder.block.{}."),
        "d_model": width,
        "d_ff": ffn,
        "num_heads": shapes[DISTANCES.format("encoder", 0)][1],
    }


FAMILIES = (
    Family(
        name="t5",
        library="transformers",
        table=table,
        from_shapes=from_shapes,
        signature=(
            "shared.weight",
            DISTANCES.format("encoder", 0),
            "encoder.block.0.layer.0.SelfAttention.q.weight",
            "encoder.block.0.layer.1.DenseReluDense.wo.weight",
        ),
        model_types=("t5", "mt5", "umt5"),
        inputs=("tokens",),
        prefixes=("transformer.",),
        tied_scale=True,
        known_keys=HARMLESS
        | {"d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "n_positions"}
        | {"relative_attention_num_buckets", "relative_attention_max_distance", "dropout_rate"}
        | {
            "feed_forward_proj",
            "dense_act_fn",
            "is_gated_act",
            "scale_decoder_outputs",
            "scalable_attention",
        },
        required={**PLAIN, "is_decoder": (False,)},
    ),
)

"""ViT as in transformers: pre-norm, learned positions, a class token."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table, fixed
from transfusion.families._shared import (
    ATTENTION,
    HARMLESS,
    LABEL,
    PATCH,
    PLAIN,
    POSITION,
    usual_sizes,
)

ROWS = """
embeddings.cls_token                            _ _ x@first
embeddings.mask_token?                          _ _ x@first
embeddings.position_embeddings                  _ position x@first
embeddings.patch_embeddings.projection.*        x@first <- channel row column
encoder.layer.{}.layernorm_before.*             scale x
encoder.layer.{}.attention.attention.query.*    (head qk) <- x
encoder.layer.{}.attention.attention.key.*      (head qk) <- x
encoder.layer.{}.attention.attention.value.*    (head vo) <- x
encoder.layer.{}.attention.output.dense.*       y <- (head vo)
encoder.layer.{}.layernorm_after.*              scale y
encoder.layer.{}.intermediate.dense.*           ffn <- y
encoder.layer.{}.output.dense.*                 x@next <- ffn
layernorm.*                                     scale x@last
"""

SHORTCUTS = """
encoder.layer.{}.layernorm_before   x -> y        encoder.layer.{}.attention.output.dense
encoder.layer.{}.layernorm_after    y -> x@next   encoder.layer.{}.output.dense
"""

HEADS = """
pooler.dense.*    pool <- x@last
classifier.*      label <- x@last
decoder.0.*       pixel <- x@last _ _
"""


def table(config: Config, names: frozenset[str]) -> Table:
    return Table(
        stacks=(
            Stack(
                "layer",
                config["num_hidden_layers"],
                ROWS,
                (*ATTENTION, POSITION, *PATCH),
                sizes=usual_sizes(config),
                shortcuts=SHORTCUTS,
            ),
        ),
        axes=(
            Axis("pool", scope="model"),
            LABEL,
            fixed("pixel", "reconstructed pixels come in this order"),
        ),
        heads=HEADS,
        outputs={"last_hidden_state": "x@last", "pooler_output": "pool"},
    )


FAMILIES = (
    Family(
        name="vit",
        library="transformers",
        table=table,
        signature=(
            "embeddings.cls_token",
            "embeddings.patch_embeddings.projection.weight",
            "encoder.layer.0.layernorm_before.weight",
            "encoder.layer.0.attention.attention.query.weight",
            "encoder.layer.0.intermediate.dense.weight",
        ),
        model_types=("vit",),
        inputs=("image",),
        prefixes=("vit.",),
        aliases=(
            ("layers.{}.attention.q_proj", "encoder.layer.{}.attention.attention.query"),
            ("layers.{}.attention.k_proj", "encoder.layer.{}.attention.attention.key"),
            ("layers.{}.attention.v_proj", "encoder.layer.{}.attention.attention.value"),
            ("layers.{}.attention.o_proj", "encoder.layer.{}.attention.output.dense"),
            ("layers.{}.mlp.fc1", "encoder.layer.{}.intermediate.dense"),
            ("layers.{}.mlp.fc2", "encoder.layer.{}.output.dense"),
            ("layers.{}", "encoder.layer.{}"),
        ),
        known_keys=HARMLESS
        | {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
        | {"image_size", "patch_size", "num_channels", "qkv_bias"}
        | {"pooler_act", "pooler_output_size"},
        required=PLAIN,
    ),
)

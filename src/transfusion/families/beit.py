"""BEiT and Data2Vec's vision model as in transformers: a ViT with LayerScale and relative positions."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table, fixed
from transfusion.families import vit
from transfusion.families._shared import (
    ATTENTION,
    BACKBONE,
    LABEL,
    PATCH,
    PLAIN,
    POSITION,
    usual_sizes,
)

ROWS = """
embeddings.cls_token                                            _ _ x@first
embeddings.position_embeddings?                                 _ position x@first
embeddings.patch_embeddings.projection.*                        x@first <- channel row column
encoder.relative_position_bias.relative_position_bias_table?    distance head
encoder.layer.{}.layernorm_before.*                             scale x
encoder.layer.{}.attention.attention.query.*                    (head qk) <- x
encoder.layer.{}.attention.attention.key.*                      (head qk) <- x
encoder.layer.{}.attention.attention.relative_position_bias.relative_position_bias_table?   distance head
encoder.layer.{}.attention.attention.value.*                    (head vo) <- x
encoder.layer.{}.attention.output.dense.*                       y <- (head vo)
encoder.layer.{}.lambda_1?                                      scale y
encoder.layer.{}.layernorm_after.*                              scale y
encoder.layer.{}.intermediate.dense.*                           ffn <- y
encoder.layer.{}.lambda_2?                                      scale x@next
encoder.layer.{}.output.dense.*                                 x@next <- ffn
"""

# Behind the scales, which are no modules, stands drop_path, for both branches.
SHORTCUTS = """
encoder.layer.{}.layernorm_before   x -> y        encoder.layer.{}.drop_path
encoder.layer.{}.layernorm_after    y -> x@next   encoder.layer.{}.drop_path
"""

HEADS = """
layernorm.*             scale x@last
pooler.layernorm.*      scale x@last
classifier.*            label <- x@last
embeddings.mask_token   _ _ x@first
lm_head.*               token <- x@last
"""

BUFFERS = """
encoder.relative_position_bias.relative_position_index
encoder.layer.{}.attention.attention.relative_position_bias.relative_position_index
"""

SHARED = "encoder.relative_position_bias.relative_position_bias_table"


def table(config: Config, names: frozenset[str]) -> Table:
    # One table of biases for all layers: then all layers have their heads in one order.
    heads = (Axis("head", scope="stack"), *ATTENTION[1:]) if SHARED in names else ATTENTION
    return Table(
        stacks=(
            Stack(
                "layer",
                config["num_hidden_layers"],
                ROWS,
                (
                    *heads,
                    POSITION,
                    fixed("distance", "relative positions select its rows", scope="stack"),
                    *PATCH,
                ),
                sizes=usual_sizes(config),
                shortcuts=SHORTCUTS,
            ),
        ),
        axes=(LABEL, fixed("token", "the image tokens of another model select its rows")),
        heads=HEADS,
        buffers=BUFFERS,
        outputs={"last_hidden_state": "x@last", "pooler_output": "x@last"},
    )


(VIT,) = vit.FAMILIES

FAMILIES = (
    Family(
        name="beit",
        library="transformers",
        table=table,
        signature=(
            "embeddings.cls_token",
            "encoder.layer.0.lambda_1",
            "encoder.layer.0.attention.attention.query.weight",
            "encoder.layer.0.intermediate.dense.weight",
        ),
        model_types=("beit", "data2vec-vision"),
        inputs=("image",),
        prefixes=("beit.", "data2vec_vision."),
        aliases=(
            ("shared_position_bias", "encoder.relative_position_bias"),
            (
                "layers.{}.relative_position_bias",
                "encoder.layer.{}.attention.attention.relative_position_bias",
            ),
            *VIT.aliases,
        ),
        known_keys=VIT.known_keys
        | BACKBONE
        | {"use_mask_token", "use_absolute_position_embeddings", "use_mean_pooling"}
        | {"use_relative_position_bias", "use_shared_relative_position_bias", "layer_scale_init_value"}
        | {"add_fpn", "pool_scales", "use_auxiliary_head", "semantic_loss_ignore_index"}
        | {"auxiliary_channels", "auxiliary_concat_input", "auxiliary_loss_weight", "auxiliary_num_convs"},
        required=PLAIN,
    ),
)

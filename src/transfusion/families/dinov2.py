"""DINOv2 as in transformers: a ViT with LayerScale, perhaps with registers or with a gated MLP."""

from __future__ import annotations

from transfusion.architecture.table import Config, Family, Stack, Table
from transfusion.families._shared import (
    ATTENTION,
    BACKBONE,
    HARMLESS,
    LABEL,
    PATCH,
    PLAIN,
    POSITION,
)

ROWS = """
embeddings.cls_token                            _ _ x@first
embeddings.mask_token?                          _ x@first
embeddings.register_tokens?                     _ _ x@first
embeddings.position_embeddings                  _ position x@first
embeddings.patch_embeddings.projection.*        x@first <- channel row column
encoder.layer.{}.norm1.*                        scale x
encoder.layer.{}.attention.attention.query.*    (head qk) <- x
encoder.layer.{}.attention.attention.key.*      (head qk) <- x
encoder.layer.{}.attention.attention.value.*    (head vo) <- x
encoder.layer.{}.attention.output.dense.*       y <- (head vo)
encoder.layer.{}.layer_scale1.lambda1           scale y
encoder.layer.{}.norm2.*                        scale y
"""

MLPS = {
    "fc1": """
encoder.layer.{}.mlp.fc1.*                      ffn <- y
encoder.layer.{}.mlp.fc2.*                      x@next <- ffn
""",
    "weights_in": """
encoder.layer.{}.mlp.weights_in.*               [ffn|ffn] <- y
encoder.layer.{}.mlp.weights_out.*              x@next <- ffn
""",
    "gate_proj": """
encoder.layer.{}.mlp.gate_proj.*                ffn <- y
encoder.layer.{}.mlp.up_proj.*                  ffn <- y
encoder.layer.{}.mlp.weights_out.*              x@next <- ffn
""",
}
"""By the module that comes first; the gated one may be stored as transformers 4 or 5 has it."""

END = """
encoder.layer.{}.layer_scale2.lambda1           scale x@next
layernorm.*                                     scale x@last
"""

SHORTCUTS = """
encoder.layer.{}.norm1   x -> y        encoder.layer.{}.layer_scale1
encoder.layer.{}.norm2   y -> x@next   encoder.layer.{}.layer_scale2
"""


def table(config: Config, names: frozenset[str]) -> Table:
    found = [rows for first, rows in MLPS.items() if f"encoder.layer.0.mlp.{first}.weight" in names]
    return Table(
        stacks=(
            Stack(
                "layer",
                config["num_hidden_layers"],
                "\n".join(rows.strip() for rows in (ROWS, *found, END)),
                (*ATTENTION, POSITION, *PATCH),
                sizes={"x": config["hidden_size"], "head": config["num_attention_heads"]},
                shortcuts=SHORTCUTS,
            ),
        ),
        axes=(LABEL,),
        heads="classifier.*   label <- [x@last|x@last]",  # the class token beside the mean of the patches
        outputs={"last_hidden_state": "x@last", "pooler_output": "x@last"},
    )


FAMILIES = (
    Family(
        name="dinov2",
        library="transformers",
        table=table,
        signature=(
            "embeddings.cls_token",
            "embeddings.position_embeddings",
            "encoder.layer.0.norm1.weight",
            "encoder.layer.0.attention.attention.query.weight",
            "encoder.layer.0.layer_scale1.lambda1",
        ),
        model_types=("dinov2", "dinov2_with_registers"),
        inputs=("image",),
        prefixes=("dinov2.", "dinov2_with_registers."),
        aliases=(
            ("encoder.layer.{}.attention.q_proj", "encoder.layer.{}.attention.attention.query"),
            ("encoder.layer.{}.attention.k_proj", "encoder.layer.{}.attention.attention.key"),
            ("encoder.layer.{}.attention.v_proj", "encoder.layer.{}.attention.attention.value"),
            ("encoder.layer.{}.attention.o_proj", "encoder.layer.{}.attention.output.dense"),
            ("encoder.layer.{}.mlp.gate_proj", "encoder.layer.{}.mlp.weights_in[0]"),
            ("encoder.layer.{}.mlp.up_proj", "encoder.layer.{}.mlp.weights_in[1]"),
            ("encoder.layer.{}.mlp.down_proj", "encoder.layer.{}.mlp.weights_out"),
        ),
        known_keys=HARMLESS
        | BACKBONE
        | {"hidden_size", "num_hidden_layers", "num_attention_heads", "mlp_ratio", "use_swiglu_ffn"}
        | {"image_size", "patch_size", "num_channels", "qkv_bias", "use_mask_token"}
        | {"num_register_tokens", "interpolate_antialias", "interpolate_offset"},
        required=PLAIN,
    ),
)

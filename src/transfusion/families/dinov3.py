"""DINOv3's ViT as in transformers: rotary positions, registers, LayerScale, a plain or a gated MLP."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table, rotary
from transfusion.families._shared import BACKBONE, HARMLESS, PATCH, PLAIN, usual_sizes

ROWS = """
embeddings.cls_token            _ _ x@first
embeddings.mask_token           _ _ x@first
embeddings.register_tokens      _ _ x@first
embeddings.patch_embeddings.*   x@first <- channel row column
layer.{}.norm1.*                scale x
layer.{}.attention.q_proj.*     (head qk) <- x
layer.{}.attention.k_proj.*     (head qk) <- x
layer.{}.attention.v_proj.*     (head vo) <- x
layer.{}.attention.o_proj.*     y <- (head vo)
layer.{}.layer_scale1.lambda1   scale y
layer.{}.norm2.*                scale y
layer.{}.mlp.gate_proj.*?       ffn <- y
layer.{}.mlp.up_proj.*          ffn <- y
layer.{}.mlp.down_proj.*        x@next <- ffn
layer.{}.layer_scale2.lambda1   scale x@next
norm.*                          scale x@last
"""

SHORTCUTS = """
layer.{}.norm1   x -> y        layer.{}.layer_scale1
layer.{}.norm2   y -> x@next   layer.{}.layer_scale2
"""

AXES = (
    Axis("head"),
    rotary("qk", "head"),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
    *PATCH,
)


def table(config: Config, names: frozenset[str]) -> Table:
    return Table(
        stacks=(
            Stack(
                "layer",
                config["num_hidden_layers"],
                ROWS,
                AXES,
                sizes=usual_sizes(config),
                shortcuts=SHORTCUTS,
            ),
        ),
        outputs={"last_hidden_state": "x@last", "pooler_output": "x@last"},
    )


FAMILIES = (
    Family(
        name="dinov3",
        library="transformers",
        table=table,
        signature=(
            "embeddings.register_tokens",
            "embeddings.patch_embeddings.weight",
            "layer.0.attention.q_proj.weight",
            "layer.0.layer_scale1.lambda1",
            "layer.0.mlp.up_proj.weight",
        ),
        model_types=("dinov3_vit",),
        inputs=("image",),
        aliases=(("model.layer.{}", "layer.{}"),),
        known_keys=HARMLESS
        | BACKBONE
        | {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
        | {"image_size", "patch_size", "num_channels", "num_register_tokens", "use_gated_mlp"}
        | {"query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias"}
        | {"rope_theta", "pos_embed_jitter", "pos_embed_rescale", "pos_embed_shift"},
        required=PLAIN,
    ),
)

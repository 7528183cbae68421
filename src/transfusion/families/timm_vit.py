"""ViT as in timm: fused projections; most parts are optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.table import Axis, Config, Family, Shapes, Stack, Table
from transfusion.errors import ArchitectureError
from transfusion.families._shared import ATTENTION, LABEL, PATCH, POSITION

ROWS = """
cls_token?                  _ _ x@first
dist_token?                 _ _ x@first
reg_token?                  _ _ x@first
pos_embed?                  _ position x@first
patch_embed.proj.*          x@first <- channel row column
norm_pre.*?                 scale x@first
blocks.{}.norm1.*           scale x
blocks.{}.attn.qkv.*        [(head qk)|(head qk)|(head vo)] <- x
blocks.{}.attn.q_norm.*?    scale qk
blocks.{}.attn.k_norm.*?    scale qk
blocks.{}.attn.norm.*?      scale (head vo)
blocks.{}.attn.proj.*       y <- (head vo)
blocks.{}.ls1.gamma?        scale y
blocks.{}.norm2.*           scale y
blocks.{}.mlp.fc1.*         ffn <- y
blocks.{}.mlp.norm.*?       scale ffn
blocks.{}.ls2.gamma?        scale x@next
blocks.{}.mlp.fc2.*         x@next <- ffn
"""

PACKED = ROWS.replace(" ffn <- y", " [ffn|ffn] <- y")
"""A gated MLP whose gate and values are one matrix."""

SHORTCUTS = """
blocks.{}.norm1   x -> y        blocks.{}.ls1
blocks.{}.norm2   y -> x@next   blocks.{}.ls2
"""

POOL = """
attn_pool.latent       _ _ latent
attn_pool.q.*          (head qk) <- latent
attn_pool.kv.*         [(head qk)|(head vo)] <- layer.x@last
attn_pool.proj.*       x <- (head vo)
attn_pool.norm.*       scale x
attn_pool.mlp.fc1.*    ffn <- x
attn_pool.mlp.fc2.*    x@next <- ffn
"""

HEADS = """
norm.*        scale layer.x@last
fc_norm.*     scale {pooled}
head.*        label <- {pooled}
head_dist.*   label <- {pooled}
"""

SIZES = {
    "tiny": {192: 3},
    "xsmall wee pwee dwee dpwee": {256: 4},
    "little dlittle": {320: 5},
    "small": {384: 6},
    "medium mediumd": {512: 8},
    "betwixt": {640: 10},
    "base": {768: 12, 896: 14},
    "so150m2": {832: 13},
    "so150m": {896: 14},
    "large intern300m": {1024: 16},
    "so400m": {1152: 16},
    "huge": {1280: 16},
    "giant": {1408: 16, 1536: 24},
    "giantopt": {1536: 16},
    "gigantic": {1664: 16},
}
"""What timm's names say: of each size, the widths and their numbers of heads."""


def table(config: Config, names: frozenset[str]) -> Table:
    architecture = config.get("architecture", "")
    if "_pe_" in architecture or "_rpn_" in architecture:
        raise ArchitectureError(
            f"timm-vit: {architecture} has a plain ViT's names, and rotary positions or norms elsewhere",
            hint="there is no table for it",
        )
    one_norm = "blocks.0.attn.q_norm.weight" in names  # then all heads have their units in one order
    pools = "attn_pool.latent" in names
    pooled = "pool.x@last" if pools else "layer.x@last"
    heads = config["num_heads"]
    backbone = Stack(
        "layer",
        depth(names, "blocks.{}."),
        PACKED if config["packed"] else ROWS,
        (Axis("qk"), *ATTENTION, POSITION, *PATCH) if one_norm else (*ATTENTION, POSITION, *PATCH),
        sizes={"head": heads},
        shortcuts=SHORTCUTS,
    )
    pool = Stack(
        "pool",
        1,
        POOL,
        (*ATTENTION, Axis("latent")),
        sizes={"head": heads},
        shortcuts="attn_pool.norm   x -> x@next   attn_pool.mlp.fc2",
    )
    return Table(
        stacks=(backbone, pool) if pools else (backbone,),
        axes=(LABEL,),
        heads=HEADS.format(pooled=pooled),
        outputs={} if "head.weight" in names else {"output": pooled},
    )


def complete(config: Config, shapes: Shapes) -> dict[str, Any]:
    """With the number of heads, which timm's names imply, and the kind of MLP."""
    width = shapes["blocks.0.norm1.weight"][0]
    packed = shapes["blocks.0.mlp.fc1.weight"][0] == 2 * shapes["blocks.0.mlp.fc2.weight"][1]
    return {**config, "num_heads": heads_of(config, width), "packed": packed}


def heads_of(config: Config, width: int) -> int:
    """The number of heads, as its name and its arguments say; a width alone does not tell it."""
    arguments, name = config.get("model_args") or {}, config.get("architecture", "")
    heads = arguments.get("num_heads")
    if heads is None and "embed_dim" not in arguments:
        heads = 16 if name == "vit_base_patch16_gap_224" else _named(name).get(width)
    if heads is None:
        raise ArchitectureError(
            f"timm-vit: {name} of width {width}: neither its name nor its arguments tell the number of"
            " attention heads",
            hint='say it in config.json: "model_args": {"num_heads": …}',
        )
    return int(heads)


def _named(name: str) -> Mapping[int, int]:
    """The widths that a name of timm's stands for, and their numbers of heads."""
    words = name.split("_")
    return next((widths for sizes, widths in SIZES.items() if not {*sizes.split()}.isdisjoint(words)), {})


ABOUT = frozenset(
    {"architecture", "num_classes", "num_features", "global_pool", "model_args", "pretrained_cfg"}
    | {"labels", "label_names", "label_descriptions", "tag", "custom_load", "input_size"}
    | {"fixed_input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std", "pool_size"}
    | {"first_conv", "classifier", "license", "url", "hf_hub_id", "source"}
)
"""Keys about the data, the training and the files."""

ARGUMENTS = frozenset(
    {"img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio"}
    | {"qkv_bias", "qk_norm", "scale_attn_norm", "scale_mlp_norm", "proj_bias", "init_values"}
    | {"class_token", "pos_embed", "no_embed_class", "reg_tokens", "pre_norm", "final_norm"}
    | {"fc_norm", "pool_include_prefix", "dynamic_img_size", "dynamic_img_pad", "drop_rate"}
    | {"pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"}
    | {"weight_init", "fix_init", "norm_layer", "act_layer"}
)
"""Arguments; what they do to a model is seen in its names and shapes."""

FAMILIES = (
    Family(
        name="timm-vit",
        library="timm",
        table=table,
        complete=complete,
        signature=(
            "patch_embed.proj.weight",
            "blocks.0.norm1.weight",
            "blocks.0.attn.qkv.weight",
            "blocks.0.mlp.fc1.weight",
            "blocks.0.mlp.fc2.weight",
        ),
        model_types=("vit_*", "deit_*", "deit3_*", "beit3_*", "flexivit_*"),
        inputs=("image",),
        known_keys=ABOUT | ARGUMENTS,
    ),
)

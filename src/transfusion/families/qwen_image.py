"""Qwen-Image and Qwen-Image-Edit as in diffusers: a stream for the image and one for the text.

Both attend jointly and are never joined. Files of ComfyUI have the library's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.original_names import PREFIXES
from transfusion.architecture.table import Axis, Config, Draw, Family, Shapes, Stack, Table, fixed
from transfusion.families._diffusion import (
    ATTENTION_NORMED,
    DIFFUSERS,
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    MODULATED,
    TEXT,
    TIME,
    three_axes,
)

IMAGE = """
img_in.*                                                x <- latent
time_text_embed.timestep_embedder.linear_1.*            clock <- frequency
time_text_embed.timestep_embedder.linear_2.*            time <- clock
time_text_embed.addition_t_embedding.weight?            choice -> time
transformer_blocks.{}.img_mod.1.*                       [x|x|x|x|x|x] <- time
transformer_blocks.{}.attn.to_q.*                       (head qk) <- x
transformer_blocks.{}.attn.to_k.*                       (head qk) <- x
transformer_blocks.{}.attn.to_v.*                       (head vo) <- x
transformer_blocks.{}.attn.norm_q.weight                scale qk
transformer_blocks.{}.attn.norm_k.weight                scale qk
transformer_blocks.{}.attn.to_out.0.*                   x <- (head vo)
transformer_blocks.{}.img_mlp.net.0.proj.*              ffn <- x
transformer_blocks.{}.img_mlp.net.2.*                   x <- ffn
norm_out.linear.*                                       [x|x] <- time
proj_out.*                                              latent_out <- x
"""

WORDS = """
txt_norm.weight                                         scale text
txt_in.*                                                x <- text
transformer_blocks.{}.txt_mod.1.*                       [x|x|x|x|x|x] <- time
transformer_blocks.{}.attn.add_q_proj.*                 (image.head image.qk) <- x
transformer_blocks.{}.attn.add_k_proj.*                 (image.head image.qk) <- x
transformer_blocks.{}.attn.add_v_proj.*                 (image.head image.vo) <- x
transformer_blocks.{}.attn.norm_added_q.weight          scale image.qk
transformer_blocks.{}.attn.norm_added_k.weight          scale image.qk
transformer_blocks.{}.attn.to_add_out.*                 x <- (image.head image.vo)
transformer_blocks.{}.txt_mlp.net.0.proj.*              ffn <- x
transformer_blocks.{}.txt_mlp.net.2.*                   x <- ffn
"""

AXES = (
    Axis("time", scope="model"),
    Axis("clock", scope="model"),
    fixed("choice", "a condition of the time step selects its rows"),
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    TEXT,
)


def table(config: Config, names: frozenset[str]) -> Table:
    layers, sizes = config["num_layers"], {"head": config["num_attention_heads"]}
    return Table(
        stacks=(
            Stack("image", layers, IMAGE, ATTENTION_NORMED, sizes, points=("x",), one_space=True),
            Stack("words", layers, WORDS, (Axis("ffn"),), points=("x",), one_space=True),
        ),
        axes=AXES,
        unrotated=MODULATED,
    )


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration: the norm of the queries has the size of a head."""
    width, channels = shapes["img_in.weight"]
    size, patch = shapes["transformer_blocks.0.attn.norm_q.weight"][0], 2
    return {
        "_class_name": "QwenImageTransformer2DModel",
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "num_layers": depth(shapes, "transformer_blocks.{}."),
        "attention_head_dim": size,
        "num_attention_heads": width // size,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": three_axes(size),
        "use_additional_t_cond": "time_text_embed.addition_t_embedding.weight" in shapes,
    }


def draws(config: Config) -> dict[str, Draw]:
    """Images of 2 × 3 patches with five tokens of text each; for editing, an image of 2 × 2 beside it."""
    edits = config.get("zero_cond_t") or config.get("use_layer3d_rope")
    sizes = [[1, 2, 3], [1, 2, 2]] if edits else [[1, 2, 3]]
    chosen = {"additional_t_cond": Draw(low=0, high=2, whole=True)}
    return {
        "hidden_states": Draw((sum(rows * columns for _, rows, columns in sizes), config["in_channels"])),
        "encoder_hidden_states": Draw((5, config["joint_attention_dim"])),
        "timestep": TIME,
        "img_shapes": Draw(same=sizes),
        **(chosen if config.get("use_additional_t_cond") else {}),
    }


def arrange(config: Config, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of images are numbers."""
    sizes = [[tuple(one) for one in images] for images in inputs["img_shapes"].tolist()]
    return {**inputs, "img_shapes": sizes}


FAMILIES = (
    Family(
        name="qwen_image",
        library="diffusers",
        table=table,
        signature=(
            "img_in.weight",
            "txt_in.weight",
            "txt_norm.weight",
            "transformer_blocks.0.img_mod.1.weight",
            "transformer_blocks.0.attn.add_q_proj.weight",
        ),
        from_shapes=from_shapes,
        model_types=("QwenImageTransformer2DModel",),
        draws=draws,
        arrange=arrange,
        prefixes=PREFIXES,
        known_keys=DIFFUSERS
        | {"in_channels", "out_channels", "num_layers", "attention_head_dim", "num_attention_heads"}
        | {"joint_attention_dim", "axes_dims_rope", "patch_size", "zero_cond_t", "use_additional_t_cond"}
        | {"use_layer3d_rope", "pooled_projection_dim"},
        required={"guidance_embeds": (False, None)},
    ),
)

"""PixArt-α and PixArt-Σ as in diffusers: cross-attention to text; the library computes the positions.

So the stream stays, and heads, neurons and the text's embedding move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfusion.architecture.original_names import PREFIXES
from transfusion.architecture.table import Axis, Config, Draw, Family, Stack, Table, fixed
from transfusion.families._diffusion import (
    COMPUTED_POSITIONS,
    DIFFUSERS,
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    MODULATED,
    PATCH_OF_IMAGE,
    TEXT,
)
from transfusion.families._shared import ATTENTION, CROSS

ROWS = """
pos_embed.proj.*                                      x <- latent row column
adaln_single.emb.timestep_embedder.linear_1.*         clock <- frequency
adaln_single.emb.timestep_embedder.linear_2.*         x <- clock
adaln_single.emb.resolution_embedder.linear_1.*?      resolution <- frequency
adaln_single.emb.resolution_embedder.linear_2.*?      third <- resolution
adaln_single.emb.aspect_ratio_embedder.linear_1.*?    aspect <- frequency
adaln_single.emb.aspect_ratio_embedder.linear_2.*?    third <- aspect
adaln_single.linear.*                                 [x|x|x|x|x|x] <- x
caption_projection.linear_1.*                         gist <- text
caption_projection.linear_2.*                         words <- gist
transformer_blocks.{}.scale_shift_table               _ x
transformer_blocks.{}.attn1.to_q.*                    (head qk) <- x
transformer_blocks.{}.attn1.to_k.*                    (head qk) <- x
transformer_blocks.{}.attn1.to_v.*                    (head vo) <- x
transformer_blocks.{}.attn1.to_out.0.*                x <- (head vo)
transformer_blocks.{}.attn2.to_q.*                    (cross_head cross_qk) <- x
transformer_blocks.{}.attn2.to_k.*                    (cross_head cross_qk) <- words
transformer_blocks.{}.attn2.to_v.*                    (cross_head cross_vo) <- words
transformer_blocks.{}.attn2.to_out.0.*                x <- (cross_head cross_vo)
transformer_blocks.{}.ff.net.0.proj.*                 ffn <- x
transformer_blocks.{}.ff.net.2.*                      x <- ffn
scale_shift_table                                     _ x
proj_out.*                                            latent_out <- x
"""

AXES = (
    *ATTENTION,
    *CROSS,
    Axis("clock", scope="model"),
    Axis("resolution", scope="model"),
    Axis("aspect", scope="model"),
    Axis("gist", scope="model"),
    Axis("words", scope="model"),
    fixed("third", "it is added to a part of the stream, which stays"),
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    TEXT,
    *PATCH_OF_IMAGE,
)


def table(config: Config, names: frozenset[str]) -> Table:
    heads = config["num_attention_heads"]
    sizes = {"head": heads, "cross_head": heads}
    return Table(
        stacks=(Stack("layer", config["num_layers"], ROWS, AXES, sizes, points=("x",), one_space=True),),
        pinned={"layer.x": COMPUTED_POSITIONS},
        unrotated=MODULATED,
    )


def draws(config: Config) -> dict[str, Draw]:
    """Images of 2 × 3 patches, and five tokens of text each; models of 1024 pixels are also told the size."""
    patch, told = config["patch_size"], config.get("use_additional_conditions")
    sizes = {
        "resolution": Draw((2,), low=500.0, high=1000.0),
        "aspect_ratio": Draw((1,), low=0.5, high=2.0),
    }
    return {
        "hidden_states": Draw((config["in_channels"], 2 * patch, 3 * patch)),
        "encoder_hidden_states": Draw((5, config["caption_channels"])),
        "timestep": Draw(low=0.0, high=1000.0),
        **(sizes if told or (told is None and config["sample_size"] == 128) else {}),
    }


def arrange(config: Config, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of an image come in one argument."""
    told = {name: inputs.get(name) for name in ("resolution", "aspect_ratio")}
    others = {name: one for name, one in inputs.items() if name not in told}
    return {**others, "added_cond_kwargs": told}


FAMILIES = (
    Family(
        name="pixart",
        library="diffusers",
        table=table,
        signature=(
            "adaln_single.linear.weight",
            "caption_projection.linear_1.weight",
            "transformer_blocks.0.scale_shift_table",
            "transformer_blocks.0.ff.net.2.weight",
        ),
        model_types=("PixArtTransformer2DModel", "Transformer2DModel"),  # the second in earlier releases
        draws=draws,
        arrange=arrange,
        prefixes=PREFIXES,
        known_keys=DIFFUSERS
        | {"num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "num_layers"}
        | {"dropout", "norm_num_groups", "cross_attention_dim", "attention_bias", "sample_size"}
        | {"patch_size", "num_embeds_ada_norm", "upcast_attention", "norm_eps", "interpolation_scale"}
        | {"use_additional_conditions", "caption_channels"},
        required={
            "activation_fn": ("gelu-approximate",),
            "norm_type": ("ada_norm_single",),
            "norm_elementwise_affine": (False,),
            "attention_type": ("default", None),
            "double_self_attention": (False, None),
            "num_vector_embeds": (None,),
            "only_cross_attention": (False, None),
            "use_linear_projection": (False, None),
        },
    ),
)

"""Flux.1 as in diffusers: blocks with a stream for the image and one for the text, then blocks with one.

Both streams end in that of the single blocks, so all are one space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.original_names import PREFIXES
from transfusion.architecture.table import Axis, Config, Draw, Family, Shapes, Stack, Table
from transfusion.families._diffusion import (
    ATTENTION_NORMED,
    DIFFUSERS,
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    MODULATED,
    POOLED,
    TEXT,
    TIME,
    three_axes,
)

DOUBLE = """
x_embedder.*                                        x <- latent
context_embedder.*                                  x <- text
time_text_embed.timestep_embedder.linear_1.*        clock <- frequency
time_text_embed.timestep_embedder.linear_2.*        time <- clock
time_text_embed.guidance_embedder.linear_1.*?       guide <- frequency
time_text_embed.guidance_embedder.linear_2.*?       time <- guide
time_text_embed.text_embedder.linear_1.*            gist <- pooled
time_text_embed.text_embedder.linear_2.*            time <- gist
transformer_blocks.{}.norm1.linear.*                [x|x|x|x|x|x] <- time
transformer_blocks.{}.norm1_context.linear.*        [x|x|x|x|x|x] <- time
transformer_blocks.{}.attn.to_q.*                   (head qk) <- x
transformer_blocks.{}.attn.to_k.*                   (head qk) <- x
transformer_blocks.{}.attn.to_v.*                   (head vo) <- x
transformer_blocks.{}.attn.norm_q.weight            scale qk
transformer_blocks.{}.attn.norm_k.weight            scale qk
transformer_blocks.{}.attn.add_q_proj.*             (head qk) <- x
transformer_blocks.{}.attn.add_k_proj.*             (head qk) <- x
transformer_blocks.{}.attn.add_v_proj.*             (head vo) <- x
transformer_blocks.{}.attn.norm_added_q.weight      scale qk
transformer_blocks.{}.attn.norm_added_k.weight      scale qk
transformer_blocks.{}.attn.to_out.0.*               x <- (head vo)
transformer_blocks.{}.attn.to_add_out.*             x <- (head vo)
transformer_blocks.{}.ff.net.0.proj.*               ffn <- x
transformer_blocks.{}.ff.net.2.*                    x <- ffn
transformer_blocks.{}.ff_context.net.0.proj.*       text_ffn <- x
transformer_blocks.{}.ff_context.net.2.*            x <- text_ffn
"""

SINGLE = """
single_transformer_blocks.{}.norm.linear.*          [x|x|x] <- time
single_transformer_blocks.{}.attn.to_q.*            (head qk) <- x
single_transformer_blocks.{}.attn.to_k.*            (head qk) <- x
single_transformer_blocks.{}.attn.to_v.*            (head vo) <- x
single_transformer_blocks.{}.attn.norm_q.weight     scale qk
single_transformer_blocks.{}.attn.norm_k.weight     scale qk
single_transformer_blocks.{}.proj_mlp.*             ffn <- x
single_transformer_blocks.{}.proj_out.*             x <- [(head vo)|ffn]
norm_out.linear.*                                   [x|x] <- time
proj_out.*                                          latent_out <- x
"""

# The last norm's modulation is shift and scale there, and scale and shift here.
ORIGINAL = """
double_blocks.{}.img_attn.qkv               transformer_blocks.{}.attn. to_q | to_k | to_v
single_blocks.{}.linear1   single_transformer_blocks.{}. attn.to_q | attn.to_k | attn.to_v | proj_mlp*
img_in                                      x_embedder
txt_in                                      context_embedder
time_in.in_layer                            time_text_embed.timestep_embedder.linear_1
time_in.out_layer                           time_text_embed.timestep_embedder.linear_2
guidance_in.in_layer                        time_text_embed.guidance_embedder.linear_1
guidance_in.out_layer                       time_text_embed.guidance_embedder.linear_2
vector_in.in_layer                          time_text_embed.text_embedder.linear_1
vector_in.out_layer                         time_text_embed.text_embedder.linear_2
double_blocks.{}.img_mod.lin                transformer_blocks.{}.norm1.linear
double_blocks.{}.txt_mod.lin                transformer_blocks.{}.norm1_context.linear
double_blocks.{}.img_attn.norm.query_norm.scale   transformer_blocks.{}.attn.norm_q.weight
double_blocks.{}.img_attn.norm.key_norm.scale     transformer_blocks.{}.attn.norm_k.weight
double_blocks.{}.img_attn.proj              transformer_blocks.{}.attn.to_out.0
double_blocks.{}.img_mlp.0                  transformer_blocks.{}.ff.net.0.proj
double_blocks.{}.img_mlp.2                  transformer_blocks.{}.ff.net.2
double_blocks.{}.txt_attn.qkv               transformer_blocks.{}.attn. add_q_proj | add_k_proj | add_v_proj
double_blocks.{}.txt_attn.norm.query_norm.scale   transformer_blocks.{}.attn.norm_added_q.weight
double_blocks.{}.txt_attn.norm.key_norm.scale     transformer_blocks.{}.attn.norm_added_k.weight
double_blocks.{}.txt_attn.proj              transformer_blocks.{}.attn.to_add_out
double_blocks.{}.txt_mlp.0                  transformer_blocks.{}.ff_context.net.0.proj
double_blocks.{}.txt_mlp.2                  transformer_blocks.{}.ff_context.net.2
single_blocks.{}.modulation.lin             single_transformer_blocks.{}.norm.linear
single_blocks.{}.norm.query_norm.scale      single_transformer_blocks.{}.attn.norm_q.weight
single_blocks.{}.norm.key_norm.scale        single_transformer_blocks.{}.attn.norm_k.weight
single_blocks.{}.linear2                    single_transformer_blocks.{}.proj_out
final_layer.linear                          proj_out
final_layer.adaLN_modulation.1              norm_out. linear[1] | linear[0]
"""

AXES = (
    Axis("time", scope="model"),
    Axis("clock", scope="model"),
    Axis("guide", scope="model"),
    Axis("gist", scope="model"),
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    TEXT,
    POOLED,
)


def table(config: Config, names: frozenset[str]) -> Table:
    heads = {"head": config["num_attention_heads"]}
    return Table(
        stacks=(
            Stack(
                "double",
                config["num_layers"],
                DOUBLE,
                (*ATTENTION_NORMED, Axis("text_ffn")),
                heads,
                points=("x",),
                one_space=True,
            ),
            Stack(
                "single",
                config["num_single_layers"],
                SINGLE,
                ATTENTION_NORMED,
                heads,
                points=("x",),
                one_space=True,
            ),
        ),
        axes=AXES,
        unified=(("double.x", "single.x"),),
        unrotated=MODULATED,
    )


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration: the norm of the queries has the size of a head."""
    width, channels = shapes["x_embedder.weight"]
    size = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": depth(shapes, "transformer_blocks.{}."),
        "num_single_layers": depth(shapes, "single_transformer_blocks.{}."),
        "attention_head_dim": size,
        "num_attention_heads": width // size,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": three_axes(size),
    }


def draws(config: Config) -> dict[str, Draw]:
    """Images of 2 × 3 patches, and five tokens of text each."""
    places = [[0.0, row, column] for row in (1.0, 2.0) for column in (1.0, 2.0, 3.0)]
    guided = {"guidance": Draw(low=1.0, high=5.0)} if config.get("guidance_embeds") else {}
    return {
        "hidden_states": Draw((len(places), config["in_channels"])),
        "encoder_hidden_states": Draw((5, config["joint_attention_dim"])),
        "pooled_projections": Draw((config["pooled_projection_dim"],)),
        "timestep": TIME,
        "img_ids": Draw(same=places),
        "txt_ids": Draw(same=[[0.0, 0.0, 0.0]] * 5),
        **guided,
    }


def arrange(config: Config, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """All images of a batch have the same places."""
    return {**inputs, "img_ids": inputs["img_ids"][0], "txt_ids": inputs["txt_ids"][0]}


FAMILIES = (
    Family(
        name="flux",
        library="diffusers",
        table=table,
        signature=(
            "x_embedder.weight",
            "context_embedder.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "transformer_blocks.0.attn.add_q_proj.weight",
            "single_transformer_blocks.0.proj_mlp.weight",
        ),
        from_shapes=from_shapes,
        model_types=("FluxTransformer2DModel",),
        draws=draws,
        arrange=arrange,
        prefixes=PREFIXES,
        original=ORIGINAL,
        known_keys=DIFFUSERS
        | {"in_channels", "out_channels", "num_layers", "num_single_layers", "attention_head_dim"}
        | {"num_attention_heads", "joint_attention_dim", "pooled_projection_dim", "guidance_embeds"}
        | {"axes_dims_rope", "patch_size"},
    ),
)

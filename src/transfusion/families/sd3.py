"""Stable Diffusion 3 and 3.5 as in diffusers: a stream for the image and one for the text.

Both attend jointly. There are no rotary positions: the units of queries and keys move, in all heads alike if
a norm scales them. The text ends in the last block's keys and values. In the medium model of 3.5, the first
blocks also attend to the image alone.
"""

from __future__ import annotations

from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.original_names import PREFIXES
from transfusion.architecture.table import Axis, Config, Draw, Family, Shapes, Stack, Table, fixed
from transfusion.errors import ArchitectureError
from transfusion.families._diffusion import (
    DIFFUSERS,
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    MODULATED,
    PATCH_OF_IMAGE,
    POOLED,
    TEXT,
)
from transfusion.families._shared import ATTENTION, needs_config

IMAGE = """
pos_embed.pos_embed                                  _ position x
pos_embed.proj.*                                     x <- latent row column
time_text_embed.timestep_embedder.linear_1.*         clock <- frequency
time_text_embed.timestep_embedder.linear_2.*         time <- clock
time_text_embed.text_embedder.linear_1.*             gist <- pooled
time_text_embed.text_embedder.linear_2.*             time <- gist
transformer_blocks.{SINGLE+}.norm1.linear.*          [x|x|x|x|x|x] <- time
transformer_blocks.{}.attn.to_q.*                    (head qk) <- x
transformer_blocks.{}.attn.to_k.*                    (head qk) <- x
transformer_blocks.{}.attn.to_v.*                    (head vo) <- x
transformer_blocks.{}.attn.norm_q.weight?            scale qk
transformer_blocks.{}.attn.norm_k.weight?            scale qk
transformer_blocks.{}.attn.add_q_proj.*              (head qk) <- words.x
transformer_blocks.{}.attn.add_k_proj.*              (head qk) <- words.x
transformer_blocks.{}.attn.add_v_proj.*              (head vo) <- words.x
transformer_blocks.{}.attn.norm_added_q.weight?      scale qk
transformer_blocks.{}.attn.norm_added_k.weight?      scale qk
transformer_blocks.{}.attn.to_out.0.*                x <- (head vo)
transformer_blocks.{}.ff.net.0.proj.*                ffn <- x
transformer_blocks.{}.ff.net.2.*                     x <- ffn
norm_out.linear.*                                    [x|x] <- time
proj_out.*                                           latent_out <- x
"""

DUAL = """
transformer_blocks.{}.norm1.linear.*                 [NINE] <- time
transformer_blocks.{}.attn2.to_q.*                   (head qk) <- image.x
transformer_blocks.{}.attn2.to_k.*                   (head qk) <- image.x
transformer_blocks.{}.attn2.to_v.*                   (head vo) <- image.x
transformer_blocks.{}.attn2.norm_q.weight?           scale qk
transformer_blocks.{}.attn2.norm_k.weight?           scale qk
transformer_blocks.{}.attn2.to_out.0.*               image.x <- (head vo)
""".replace("NINE", "|".join(["image.x"] * 9))

# All blocks but the last.
WORDS = """
context_embedder.*                                   x <- text
transformer_blocks.{}.norm1_context.linear.*         [x|x|x|x|x|x] <- time
transformer_blocks.{}.attn.to_add_out.*              x <- (image.head image.vo)
transformer_blocks.{}.ff_context.net.0.proj.*        ffn <- x
transformer_blocks.{}.ff_context.net.2.*             x <- ffn
"""

LAST = """
transformer_blocks.LAST.norm1_context.linear.*       [words.x|words.x] <- time
"""

# In the last block and the last norm, shift and scale are the other way round.
ORIGINAL = """
joint_blocks.{}.x_block.attn.qkv                      transformer_blocks.{}.attn. to_q | to_k | to_v
joint_blocks.{}.context_block.attn.qkv   transformer_blocks.{}.attn. add_q_proj | add_k_proj | add_v_proj
joint_blocks.{}.x_block.attn.ln_q                     transformer_blocks.{}.attn.norm_q
joint_blocks.{}.x_block.attn.ln_k                     transformer_blocks.{}.attn.norm_k
joint_blocks.{}.context_block.attn.ln_q               transformer_blocks.{}.attn.norm_added_q
joint_blocks.{}.context_block.attn.ln_k               transformer_blocks.{}.attn.norm_added_k
joint_blocks.{}.x_block.attn.proj                     transformer_blocks.{}.attn.to_out.0
joint_blocks.{}.context_block.attn.proj               transformer_blocks.{}.attn.to_add_out
joint_blocks.{}.x_block.attn2.qkv                     transformer_blocks.{}.attn2. to_q | to_k | to_v
joint_blocks.{}.x_block.attn2.ln_q                    transformer_blocks.{}.attn2.norm_q
joint_blocks.{}.x_block.attn2.ln_k                    transformer_blocks.{}.attn2.norm_k
joint_blocks.{}.x_block.attn2.proj                    transformer_blocks.{}.attn2.to_out.0
joint_blocks.{}.x_block.adaLN_modulation.1            transformer_blocks.{}.norm1.linear
joint_blocks.{}.context_block.adaLN_modulation.1      transformer_blocks.{}.norm1_context.linear
joint_blocks.{last}.context_block.adaLN_modulation.1  transformer_blocks.{last}. NORM[1] | NORM[0]
joint_blocks.{}.x_block.mlp.fc1                       transformer_blocks.{}.ff.net.0.proj
joint_blocks.{}.x_block.mlp.fc2                       transformer_blocks.{}.ff.net.2
joint_blocks.{}.context_block.mlp.fc1                 transformer_blocks.{}.ff_context.net.0.proj
joint_blocks.{}.context_block.mlp.fc2                 transformer_blocks.{}.ff_context.net.2
pos_embed                                             pos_embed.pos_embed
x_embedder.proj                                       pos_embed.proj
t_embedder.mlp.0                                      time_text_embed.timestep_embedder.linear_1
t_embedder.mlp.2                                      time_text_embed.timestep_embedder.linear_2
y_embedder.mlp.0                                      time_text_embed.text_embedder.linear_1
y_embedder.mlp.2                                      time_text_embed.text_embedder.linear_2
final_layer.linear                                    proj_out
final_layer.adaLN_modulation.1                        norm_out. linear[1] | linear[0]
""".replace("NORM", "norm1_context.linear")

AXES = (
    Axis("time", scope="model"),
    Axis("clock", scope="model"),
    Axis("gist", scope="model"),
    fixed("position", "positions select its rows"),
    *PATCH_OF_IMAGE,
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    TEXT,
    POOLED,
)


HEADS = {1536: 24}
"""The number of heads in the published model without a norm of the queries, by width."""


def table(config: Config, names: frozenset[str]) -> Table:
    layers, dual = config["num_layers"], list(config.get("dual_attention_layers") or ())
    if dual != list(range(len(dual))) or layers < 2:
        raise ArchitectureError(
            f"sd3: the table is for two blocks or more, of which the first attend twice, and not for"
            f" num_layers = {layers}, dual_attention_layers = {dual}",
            hint="there is no table for it",
        )
    # A norm that all heads share puts their units in one order.
    normed = (Axis("qk"),) if "transformer_blocks.0.attn.norm_q.weight" in names else ()
    axes, sizes = (*normed, *ATTENTION), {"head": config["num_attention_heads"]}
    image = IMAGE.replace("{SINGLE+}", f"{{{len(dual)}+}}" if dual else "{}")
    stacks = (
        Stack("image", layers, image, axes, sizes, points=("x",), one_space=True),
        Stack("words", layers - 1, WORDS, (Axis("ffn"),), points=("x",), one_space=True),
    )
    again = Stack("dual", len(dual), DUAL, axes, sizes)
    return Table(
        stacks=(*stacks, again) if dual else stacks,
        axes=AXES,
        rows=LAST.replace("LAST", str(layers - 1)),
        unrotated=MODULATED,
    )


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration: a norm of the queries has the size of a head; the published model without has 24."""
    width, channels, patch, _ = shapes["pos_embed.proj.weight"]
    norm = shapes.get("transformer_blocks.0.attn.norm_q.weight")
    if norm is None and width not in HEADS:
        raise needs_config("sd3", f"the number of attention heads, at width {width},")
    size = norm[0] if norm else width // HEADS[width]
    side = int(shapes["pos_embed.pos_embed"][1] ** 0.5)
    return {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "num_layers": depth(shapes, "transformer_blocks.{}."),
        "attention_head_dim": size,
        "num_attention_heads": width // size,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": shapes["context_embedder.weight"][0],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "pos_embed_max_size": side,
        "dual_attention_layers": [
            block
            for block in range(depth(shapes, "transformer_blocks.{}."))
            if f"transformer_blocks.{block}.attn2.to_q.weight" in shapes
        ],
        "qk_norm": "rms_norm" if norm else None,
    }


def draws(config: Config) -> dict[str, Draw]:
    """Images of 2 × 3 patches, and five tokens of text each."""
    patch = config["patch_size"]
    return {
        "hidden_states": Draw((config["in_channels"], 2 * patch, 3 * patch)),
        "encoder_hidden_states": Draw((5, config["joint_attention_dim"])),
        "pooled_projections": Draw((config["pooled_projection_dim"],)),
        "timestep": Draw(low=0.0, high=1000.0),
    }


FAMILIES = (
    Family(
        name="sd3",
        library="diffusers",
        table=table,
        signature=(
            "pos_embed.proj.weight",
            "context_embedder.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "transformer_blocks.0.norm1_context.linear.weight",
            "transformer_blocks.0.ff_context.net.2.weight",
        ),
        from_shapes=from_shapes,
        model_types=("SD3Transformer2DModel",),
        draws=draws,
        prefixes=PREFIXES,
        original=ORIGINAL,
        known_keys=DIFFUSERS
        | {"sample_size", "patch_size", "in_channels", "out_channels", "num_layers", "attention_head_dim"}
        | {"num_attention_heads", "joint_attention_dim", "caption_projection_dim", "pos_embed_max_size"}
        | {"pooled_projection_dim", "dual_attention_layers"},
        required={"qk_norm": ("rms_norm", None)},
    ),
)

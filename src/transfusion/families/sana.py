"""Sana as in diffusers: linear attention, cross-attention to text, and convolutions in place of an MLP.

As in Wan, one modulation is made for all blocks, and the time step's embedding lies in the stream.
"""

from __future__ import annotations

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
patch_embed.proj.*                                    x <- latent row column
time_embed.emb.timestep_embedder.linear_1.*?          clock <- frequency
time_embed.emb.timestep_embedder.linear_2.*?          x <- clock
time_embed.timestep_embedder.linear_1.*?              clock <- frequency
time_embed.timestep_embedder.linear_2.*?              x <- clock
time_embed.guidance_embedder.linear_1.*?              guide <- frequency
time_embed.guidance_embedder.linear_2.*?              x <- guide
time_embed.linear.*                                   [x|x|x|x|x|x] <- x
caption_projection.linear_1.*                         gist <- text
caption_projection.linear_2.*                         words <- gist
caption_norm.weight                                   scale words
transformer_blocks.{}.scale_shift_table               _ x
transformer_blocks.{}.attn1.to_q.*                    (head qk) <- x
transformer_blocks.{}.attn1.to_k.*                    (head qk) <- x
transformer_blocks.{}.attn1.to_v.*                    (head vo) <- x
transformer_blocks.{}.attn1.norm_q.weight?            scale (head qk)
transformer_blocks.{}.attn1.norm_k.weight?            scale (head qk)
transformer_blocks.{}.attn1.to_out.0.*                x <- (head vo)
transformer_blocks.{}.attn2.to_q.*                    (cross_head cross_qk) <- x
transformer_blocks.{}.attn2.to_k.*                    (cross_head cross_qk) <- words
transformer_blocks.{}.attn2.to_v.*                    (cross_head cross_vo) <- words
transformer_blocks.{}.attn2.norm_q.weight?            scale (cross_head cross_qk)
transformer_blocks.{}.attn2.norm_k.weight?            scale (cross_head cross_qk)
transformer_blocks.{}.attn2.to_out.0.*                x <- (cross_head cross_vo)
transformer_blocks.{}.norm2.*?                        scale x
transformer_blocks.{}.ff.conv_inverted.*              [ffn|ffn] <- x _ _
transformer_blocks.{}.ff.conv_depth.weight            [ffn|ffn] _ above beside
transformer_blocks.{}.ff.conv_depth.bias              [ffn|ffn]
transformer_blocks.{}.ff.conv_point.*                 x <- ffn _ _
scale_shift_table                                     _ x
proj_out.*                                            latent_out <- x
"""

AXES = (
    *ATTENTION,
    *CROSS,
    Axis("clock", scope="model"),
    Axis("guide", scope="model"),
    Axis("gist", scope="model"),
    Axis("words", scope="model"),
    fixed("above", "neighbours come in this order"),
    fixed("beside", "neighbours come in this order"),
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    TEXT,
    *PATCH_OF_IMAGE,
)


def table(config: Config, names: frozenset[str]) -> Table:
    sizes = {"head": config["num_attention_heads"], "cross_head": config["num_cross_attention_heads"]}
    return Table(
        stacks=(Stack("layer", config["num_layers"], ROWS, AXES, sizes, points=("x",), one_space=True),),
        pinned={} if config.get("interpolation_scale") is None else {"layer.x": COMPUTED_POSITIONS},
        unrotated=MODULATED,
    )


def draws(config: Config) -> dict[str, Draw]:
    """Images of 2 × 3 patches, and five tokens of text each."""
    patch = config["patch_size"]
    guided = {"guidance": Draw(low=1.0, high=5.0)} if config.get("guidance_embeds") else {}
    return {
        "hidden_states": Draw((config["in_channels"], 2 * patch, 3 * patch)),
        "encoder_hidden_states": Draw((5, config["caption_channels"])),
        "timestep": Draw(low=0.0, high=1000.0),
        **guided,
    }


FAMILIES = (
    Family(
        name="sana",
        library="diffusers",
        table=table,
        signature=(
            "patch_embed.proj.weight",
            "caption_norm.weight",
            "transformer_blocks.0.ff.conv_depth.weight",
        ),
        model_types=("SanaTransformer2DModel",),
        draws=draws,
        prefixes=PREFIXES,
        known_keys=DIFFUSERS
        | {"in_channels", "out_channels", "num_attention_heads", "attention_head_dim", "num_layers"}
        | {"num_cross_attention_heads", "cross_attention_head_dim", "cross_attention_dim", "caption_channels"}
        | {"mlp_ratio", "dropout", "attention_bias", "sample_size", "patch_size", "norm_elementwise_affine"}
        | {"norm_eps", "interpolation_scale", "guidance_embeds", "guidance_embeds_scale", "timestep_scale"},
        required={"qk_norm": ("rms_norm_across_heads", None)},
    ),
)

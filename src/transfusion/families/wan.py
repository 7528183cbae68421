"""Wan 2.1 and 2.2 as in diffusers: video, with cross-attention to text, and to an image in some models.

One modulation is made for all blocks, and the embedding of the time step itself is added to that of the last
norm. So the stream is one space, and the time step's embedding lies in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.original_names import PREFIXES
from transfusion.architecture.table import ANGLES, Axis, Config, Draw, Family, Shapes, Stack, Table, fixed
from transfusion.families._diffusion import (
    DIFFUSERS,
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    MODULATED,
    PATCH_OF_VIDEO,
    TEXT,
)
from transfusion.families._shared import CROSS, needs_config

# The queries and keys of self-attention are rotated, those of cross-attention are not.
ROWS = """
patch_embedding.*                                       x <- latent frame row column
condition_embedder.time_embedder.linear_1.*             clock <- frequency
condition_embedder.time_embedder.linear_2.*             x <- clock
condition_embedder.time_proj.*                          [x|x|x|x|x|x] <- x
condition_embedder.text_embedder.linear_1.*             gist <- text
condition_embedder.text_embedder.linear_2.*             words <- gist
condition_embedder.image_embedder.pos_embed?            _ position image
condition_embedder.image_embedder.norm1.*?              scale image
condition_embedder.image_embedder.ff.net.0.proj.*?      look <- image
condition_embedder.image_embedder.ff.net.2.*?           seen <- look
condition_embedder.image_embedder.norm2.*?              scale seen
blocks.{}.scale_shift_table                             _ _ x
blocks.{}.attn1.to_q.*                                  (head qk) <- x
blocks.{}.attn1.to_k.*                                  (head qk) <- x
blocks.{}.attn1.to_v.*                                  (head vo) <- x
blocks.{}.attn1.norm_q.weight                           scale (head qk)
blocks.{}.attn1.norm_k.weight                           scale (head qk)
blocks.{}.attn1.to_out.0.*                              x <- (head vo)
blocks.{}.norm2.*?                                      scale x
blocks.{}.attn2.to_q.*                                  (cross_head cross_qk) <- x
blocks.{}.attn2.to_k.*                                  (cross_head cross_qk) <- words
blocks.{}.attn2.to_v.*                                  (cross_head cross_vo) <- words
blocks.{}.attn2.norm_q.weight                           scale (cross_head cross_qk)
blocks.{}.attn2.norm_k.weight                           scale (cross_head cross_qk)
blocks.{}.attn2.add_k_proj.*?                           (cross_head cross_qk) <- seen
blocks.{}.attn2.add_v_proj.*?                           (cross_head cross_vo) <- seen
blocks.{}.attn2.norm_added_k.weight?                    scale (cross_head cross_qk)
blocks.{}.attn2.to_out.0.*                              x <- (cross_head cross_vo)
blocks.{}.ffn.net.0.proj.*                              ffn <- x
blocks.{}.ffn.net.2.*                                   x <- ffn
scale_shift_table                                       _ _ x
proj_out.*                                              latent_out <- x
"""

# The second and third norm have each other's name here.
ORIGINAL = """
blocks.{}.self_attn.q            blocks.{}.attn1.to_q
blocks.{}.cross_attn.q           blocks.{}.attn2.to_q
time_embedding.0                 condition_embedder.time_embedder.linear_1
time_embedding.2                 condition_embedder.time_embedder.linear_2
time_projection.1                condition_embedder.time_proj
text_embedding.0                 condition_embedder.text_embedder.linear_1
text_embedding.2                 condition_embedder.text_embedder.linear_2
img_emb.emb_pos                  condition_embedder.image_embedder.pos_embed
img_emb.proj.0                   condition_embedder.image_embedder.norm1
img_emb.proj.1                   condition_embedder.image_embedder.ff.net.0.proj
img_emb.proj.3                   condition_embedder.image_embedder.ff.net.2
img_emb.proj.4                   condition_embedder.image_embedder.norm2
blocks.{}.modulation             blocks.{}.scale_shift_table
blocks.{}.self_attn.k            blocks.{}.attn1.to_k
blocks.{}.self_attn.v            blocks.{}.attn1.to_v
blocks.{}.self_attn.norm_q       blocks.{}.attn1.norm_q
blocks.{}.self_attn.norm_k       blocks.{}.attn1.norm_k
blocks.{}.self_attn.o            blocks.{}.attn1.to_out.0
blocks.{}.norm3                  blocks.{}.norm2
blocks.{}.cross_attn.k           blocks.{}.attn2.to_k
blocks.{}.cross_attn.v           blocks.{}.attn2.to_v
blocks.{}.cross_attn.norm_q      blocks.{}.attn2.norm_q
blocks.{}.cross_attn.norm_k      blocks.{}.attn2.norm_k
blocks.{}.cross_attn.k_img       blocks.{}.attn2.add_k_proj
blocks.{}.cross_attn.v_img       blocks.{}.attn2.add_v_proj
blocks.{}.cross_attn.norm_k_img  blocks.{}.attn2.norm_added_k
blocks.{}.cross_attn.o           blocks.{}.attn2.to_out.0
blocks.{}.ffn.0                  blocks.{}.ffn.net.0.proj
blocks.{}.ffn.2                  blocks.{}.ffn.net.2
head.modulation                  scale_shift_table
head.head                        proj_out
"""

AXES = (
    Axis("head"),
    fixed("qk", ANGLES, scope="layer"),
    Axis("vo", within="head"),
    Axis("ffn"),
    *CROSS,
    Axis("clock", scope="model"),
    Axis("gist", scope="model"),
    Axis("words", scope="model"),
    Axis("look", scope="model"),
    Axis("seen", scope="model"),
    fixed("image", "the image encoder's units come in this order"),
    fixed("position", "positions select its rows"),
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    TEXT,
    *PATCH_OF_VIDEO,
)
HEADS = {1536: 12, 3072: 24, 5120: 40}
"""The number of heads in the published models, by width."""
TOKENS = 512
"""The text that the library's code expects where there is also an image."""


def table(config: Config, names: frozenset[str]) -> Table:
    heads = config["num_attention_heads"]
    sizes = {"head": heads, "cross_head": heads}
    stack = Stack("layer", config["num_layers"], ROWS, AXES, sizes, points=("x",), one_space=True)
    # Stored in models with an image, and never read.
    return Table(stacks=(stack,), buffers="blocks.{}.attn2.norm_added_q.weight", unrotated=MODULATED)


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration; the number of heads is that of the published model of this width."""
    width, channels, *patch = shapes["patch_embedding.weight"]
    if width not in HEADS:
        raise needs_config("wan", f"the number of attention heads, at width {width},")
    image = shapes.get("condition_embedder.image_embedder.norm1.weight")
    position = shapes.get("condition_embedder.image_embedder.pos_embed")
    return {
        "_class_name": "WanTransformer3DModel",
        "patch_size": patch,
        "num_attention_heads": HEADS[width],
        "attention_head_dim": width // HEADS[width],
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // (patch[0] * patch[1] * patch[2]),
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": depth(shapes, "blocks.{}."),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "image_dim": image and image[0],
        "added_kv_proj_dim": image and width,
        "pos_embed_seq_len": position and position[1],
    }


def draws(config: Config) -> dict[str, Draw]:
    """Two frames of 2 × 3 patches, some text, and perhaps an image, or a first and a last one."""
    image, positions = config.get("image_dim"), config.get("pos_embed_seq_len")
    frames, rows, columns = config["patch_size"]
    inputs = {
        "hidden_states": Draw((config["in_channels"], 2 * frames, 2 * rows, 3 * columns)),
        "encoder_hidden_states": Draw((TOKENS if image else 5, config["text_dim"])),
        "timestep": Draw(low=0, high=1000, whole=True),
    }
    if image:
        inputs["both_images" if positions else "encoder_hidden_states_image"] = Draw((positions or 4, image))
    return inputs


def arrange(config: Config, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The first and the last image of a video are two of a batch."""
    if (images := inputs.get("both_images")) is None:
        return dict(inputs)
    others = {name: one for name, one in inputs.items() if name != "both_images"}
    return {**others, "encoder_hidden_states_image": images.reshape(2 * len(images), -1, images.shape[2])}


FAMILIES = (
    Family(
        name="wan",
        library="diffusers",
        table=table,
        signature=(
            "patch_embedding.weight",
            "condition_embedder.time_proj.weight",
            "blocks.0.attn1.norm_q.weight",
            "blocks.0.attn2.norm_q.weight",
            "blocks.0.scale_shift_table",
        ),
        from_shapes=from_shapes,
        model_types=("WanTransformer3DModel",),
        draws=draws,
        arrange=arrange,
        prefixes=PREFIXES,
        original=ORIGINAL,
        known_keys=DIFFUSERS
        | {"patch_size", "num_attention_heads", "attention_head_dim", "in_channels", "out_channels"}
        | {"text_dim", "freq_dim", "ffn_dim", "num_layers", "cross_attn_norm", "eps", "image_dim"}
        | {"added_kv_proj_dim", "rope_max_seq_len", "pos_embed_seq_len"},
        required={"qk_norm": ("rms_norm_across_heads",)},
    ),
)

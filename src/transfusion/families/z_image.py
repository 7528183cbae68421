"""Z-Image as in diffusers: refiners of the image and of the text, then blocks for both.

Each branch has a norm at its beginning and one at its end, and all streams are one space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfusion.architecture.naming import depth
from transfusion.architecture.original_names import PREFIXES
from transfusion.architecture.table import Axis, Config, Draw, Family, Shapes, Stack, Table
from transfusion.errors import ArchitectureError
from transfusion.families._diffusion import (
    ATTENTION_NORMED,
    DIFFUSERS,
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    MODULATED,
    TEXT,
    TIME,
)
from transfusion.families._shared import below

BLOCK = """
attention_norm1.weight        scale x
attention.to_q.*              (head qk) <- x
attention.to_k.*              (head qk) <- x
attention.to_v.*              (head vo) <- x
attention.norm_q.weight       scale qk
attention.norm_k.weight       scale qk
attention.to_out.0.*          x <- (head vo)
attention_norm2.weight        scale x
ffn_norm1.weight              scale x
feed_forward.w1.*             ffn <- x
feed_forward.w3.*             ffn <- x
feed_forward.w2.*             x <- ffn
ffn_norm2.weight              scale x
"""

MODULATION = """
adaLN_modulation.0.*          [x|x|x|x] <- time
"""

ENDS = """
t_embedder.mlp.0.*            clock <- frequency
t_embedder.mlp.2.*            time <- clock
cap_embedder.0.weight         scale text
cap_embedder.1.*              layers.x <- text
x_pad_token                   _ layers.x
cap_pad_token                 _ layers.x
"""

PATCHES = """
all_x_embedder.SIZE.*                         layers.x <- latent
all_final_layer.SIZE.linear.*                 latent_out <- layers.x
all_final_layer.SIZE.adaLN_modulation.1.*     layers.x <- time
"""

ORIGINAL = """
noise_refiner.{}.attention.qkv         noise_refiner.{}.attention. to_q | to_k | to_v
noise_refiner.{}.attention.q_norm      noise_refiner.{}.attention.norm_q
noise_refiner.{}.attention.k_norm      noise_refiner.{}.attention.norm_k
noise_refiner.{}.attention.out         noise_refiner.{}.attention.to_out.0
context_refiner.{}.attention.qkv       context_refiner.{}.attention. to_q | to_k | to_v
context_refiner.{}.attention.q_norm    context_refiner.{}.attention.norm_q
context_refiner.{}.attention.k_norm    context_refiner.{}.attention.norm_k
context_refiner.{}.attention.out       context_refiner.{}.attention.to_out.0
layers.{}.attention.qkv                layers.{}.attention. to_q | to_k | to_v
layers.{}.attention.q_norm             layers.{}.attention.norm_q
layers.{}.attention.k_norm             layers.{}.attention.norm_k
layers.{}.attention.out                layers.{}.attention.to_out.0
x_embedder                             all_x_embedder.2-1
final_layer.linear                     all_final_layer.2-1.linear
final_layer.adaLN_modulation.1         all_final_layer.2-1.adaLN_modulation.1
"""

AXES = (
    Axis("time", scope="model"),
    Axis("clock", scope="model"),
    FREQUENCY,
    LATENT,
    LATENT_OUT,
    TEXT,
)


def table(config: Config, names: frozenset[str]) -> Table:
    depths = {
        "layers": config["n_layers"],
        "noise_refiner": config["n_refiner_layers"],
        "context_refiner": config["n_refiner_layers"],
    }

    def stack(name: str) -> Stack:
        rows = BLOCK if name == "context_refiner" else BLOCK + MODULATION.strip()
        sizes = {"head": config["n_heads"]}
        rows = below(f"{name}.{{}}.", rows)
        return Stack(name, depths[name], rows, ATTENTION_NORMED, sizes, points=("x",), one_space=True)

    if len(config["all_patch_size"]) != 1 or len(config["all_f_patch_size"]) != 1:
        raise ArchitectureError(
            f"z_image: all_patch_size = {config['all_patch_size']}: the table is for one size of patches",
            hint="there is no table for it",
        )
    patch = f"{config['all_patch_size'][0]}-{config['all_f_patch_size'][0]}"
    return Table(
        stacks=tuple(stack(name) for name in depths),
        axes=AXES,
        rows=ENDS + PATCHES.strip().replace("SIZE", patch),
        buffers="norm_final.weight",  # in some files, and never read
        unified=(("layers.x", "noise_refiner.x"), ("layers.x", "context_refiner.x")),
        unrotated=MODULATED,
    )


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    """The configuration: the norm of the queries has the size of a head."""
    first = next((name for name in shapes if name.startswith("all_x_embedder.")), "")
    side, frames = (int(size) for size in first.split(".")[1].split("-"))
    width, channels = shapes[f"all_x_embedder.{side}-{frames}.weight"]
    size = shapes["layers.0.attention.norm_q.weight"][0]
    return {
        "_class_name": "ZImageTransformer2DModel",
        "all_patch_size": [side],
        "all_f_patch_size": [frames],
        "in_channels": channels // (side * side * frames),
        "dim": width,
        "n_layers": depth(shapes, "layers.{}."),
        "n_refiner_layers": depth(shapes, "noise_refiner.{}."),
        "n_heads": width // size,
        "n_kv_heads": width // size,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        "axes_dims": [size // 4, size * 3 // 8, size * 3 // 8],  # of 128: 32, 48, 48
    }


def draws(config: Config) -> dict[str, Draw]:
    """Images of 2 × 3 patches, and five tokens of text each."""
    side, frames = config["all_patch_size"][0], config["all_f_patch_size"][0]
    return {
        "x": Draw((config["in_channels"], frames, 2 * side, 3 * side)),
        "cap_feats": Draw((5, config["cap_feat_dim"])),
        "t": TIME,
        "patch_size": Draw(same=side),
        "f_patch_size": Draw(same=frames),
    }


def arrange(config: Config, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Images and texts are lists, and sizes of patches numbers."""
    lists = {name: list(inputs[name].unbind()) for name in ("x", "cap_feats")}
    sizes = {name: int(inputs[name][0]) for name in ("patch_size", "f_patch_size")}
    return {"t": inputs["t"], **lists, **sizes}


FAMILIES = (
    Family(
        name="z_image",
        library="diffusers",
        table=table,
        signature=(
            "x_pad_token",
            "cap_embedder.1.weight",
            "noise_refiner.0.attention.to_q.weight",
            "layers.0.adaLN_modulation.0.weight",
        ),
        from_shapes=from_shapes,
        model_types=("ZImageTransformer2DModel",),
        draws=draws,
        arrange=arrange,
        prefixes=PREFIXES,
        original=ORIGINAL,
        known_keys=DIFFUSERS
        | {"all_patch_size", "all_f_patch_size", "in_channels", "dim", "n_layers", "n_refiner_layers"}
        | {"n_heads", "n_kv_heads", "norm_eps", "cap_feat_dim", "rope_theta", "t_scale", "axes_dims"}
        | {"axes_lens"},
        required={"qk_norm": (True, None), "siglip_feat_dim": (None,)},
    ),
)

"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL as in transformers: a tower with rotary positions along rows and columns.

Four neighbouring patches become one token of the text. Positions of the text have three parts, which rotate
different pairs of units: pairs may be rotated as in Qwen2. Qwen3-VL also adds the outputs of some blocks of
the tower to the text's stream, behind its first blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import Axis, Component, Config, Family, Stack, Table, rotary
from transfusion.families import llama, qwen3
from transfusion.families._composition import CELL, TEXT, VISION, composed, section_of
from transfusion.families._decoders import KNOWN
from transfusion.families._placeholders import Inputs, of_patches, with_image_tokens
from transfusion.families._shared import HARMLESS, PATCH, PLAIN, POSITION, usual_sizes

PATCHES = "patch_embed.proj.*   x@first <- channel _ row column"
ATTENTION = """
blocks.{}.norm1.*      scale x
blocks.{}.attn.qkv.*   [(head qk)|(head qk)|(head vo)] <- x
blocks.{}.attn.proj.*  y <- (head vo)
blocks.{}.norm2.*      scale y
"""
MLPS = {
    "qwen2_vl": """
        blocks.{}.mlp.fc1.*   ffn <- y
        blocks.{}.mlp.fc2.*   x@next <- ffn
    """,
    "qwen2_5_vl": """
        blocks.{}.mlp.gate_proj.*   ffn <- y
        blocks.{}.mlp.up_proj.*     ffn <- y
        blocks.{}.mlp.down_proj.*   x@next <- ffn
    """,
    "qwen3_vl": """
        blocks.{}.mlp.linear_fc1.*   ffn <- y
        blocks.{}.mlp.linear_fc2.*   x@next <- ffn
    """,
}
ENDS = {"qwen2_vl": "fc2", "qwen2_5_vl": "down_proj", "qwen3_vl": "linear_fc2"}
MERGER = """
visual.merger.ln_q.*    scale vision.x@last
visual.merger.mlp.0.*   merged <- (cell vision.x@last)
visual.merger.mlp.2.*   layer.x@first <- merged
"""
MERGER_3 = """
visual.merger.norm.*         scale vision.x@last
visual.merger.linear_fc1.*   merged <- (cell vision.x@last)
visual.merger.linear_fc2.*   layer.x@first <- merged
"""
DEEP = """
visual.deepstack_merger_list.{i}.norm.*         scale (cell vision.x@{read})
visual.deepstack_merger_list.{i}.linear_fc1.*   deep{i} <- (cell vision.x@{read})
visual.deepstack_merger_list.{i}.linear_fc2.*   layer.x@{added} <- deep{i}
"""

AXES = (
    Axis("head"),
    rotary("qk", "head"),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
    POSITION,
    *PATCH,
)


# ── towers ───────────────────────────────────────────────────────────────────────────────────


def _tower(kind: str, config: Config, *, width: int, ffn: int, position: str = "") -> Table:
    rows = "\n".join(part.strip() for part in (PATCHES, position, ATTENTION, MLPS[kind]) if part)
    shortcuts = f"""
    blocks.{{}}.norm1   x -> y        blocks.{{}}.attn.proj
    blocks.{{}}.norm2   y -> x@next   blocks.{{}}.mlp.{ENDS[kind]}
    """
    sizes = usual_sizes(
        {"hidden_size": width, "num_attention_heads": config["num_heads"], "intermediate_size": ffn}
    )
    return Table(stacks=(Stack("vision", config["depth"], rows, AXES, sizes, shortcuts),))


def tower_2(config: Config, names: frozenset[str]) -> Table:
    width = config["embed_dim"]
    return _tower("qwen2_vl", config, width=width, ffn=int(width * config["mlp_ratio"]))


def tower_2_5(config: Config, names: frozenset[str]) -> Table:
    return _tower("qwen2_5_vl", config, width=config["hidden_size"], ffn=config["intermediate_size"])


def tower_3(config: Config, names: frozenset[str]) -> Table:
    position = "pos_embed.weight   position -> x@first"
    width, ffn = config["hidden_size"], config["intermediate_size"]
    return _tower("qwen3_vl", config, width=width, ffn=ffn, position=position)


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def text_2(config: Config, names: frozenset[str]) -> Table:
    """A Qwen2, whose heads share the width whatever ``head_dim`` says."""
    head = shared(config["hidden_size"], config["num_attention_heads"], "the width among the heads")
    return llama.table({**config, "head_dim": head}, names)


# ── whole models ─────────────────────────────────────────────────────────────────────────────


def _composed(family: Family, config: Config, names: frozenset[str], tied: bool, *rows: str) -> Table:
    deep = tuple(Axis(f"deep{i}") for i in range(len(rows) - 1))
    axes = (Axis("merged"), CELL, *deep)
    merged = section_of(family, config, VISION).get("spatial_merge_size", 2) ** 2
    table = composed(family, config, names, tied=tied, connection="\n".join(rows), axes=axes)
    return replace(table, sizes={**table.sizes, "cell": merged})


def qwen2_vl(config: Config, names: frozenset[str]) -> Table:
    return _composed(QWEN2, config, names, _tied(config), MERGER)


def qwen2_5_vl(config: Config, names: frozenset[str]) -> Table:
    return _composed(QWEN2_5, config, names, _tied(config), MERGER)


def qwen3_vl(config: Config, names: frozenset[str]) -> Table:
    read = config[VISION].get("deepstack_visual_indexes") or []
    deep = [DEEP.format(i=i, read=block + 1, added=i + 1) for i, block in enumerate(read)]
    return _composed(QWEN3, config, names, bool(config.get("tie_word_embeddings")), MERGER_3, *deep)


def _tied(config: Config) -> bool:
    """Files of older releases say it of the text."""
    return bool(config.get("tie_word_embeddings") or (config.get(TEXT) or {}).get("tie_word_embeddings"))


# ── inputs ───────────────────────────────────────────────────────────────────────────────────

DOWN, ACROSS = 4, 2
"""The tokens of a probe's image; the model takes any number."""


def frame(config: Config) -> tuple[int, int, int]:
    """Return the size of a probe's image, which is not square."""
    vision = config[VISION]
    side = vision["patch_size"] * vision.get("spatial_merge_size", 2)
    return vision.get("in_channels", vision.get("in_chans", 3)), DOWN * side, ACROSS * side


def inputs(config: Config, given: Inputs) -> Inputs:
    """The image stands between the tokens for its beginning and its end."""
    vision = config[VISION]
    merge = vision["spatial_merge_size"]
    pixels, grid = of_patches(
        given["pixel_values"], vision["patch_size"], merge, vision["temporal_patch_size"]
    )
    special = {key: config[f"{key}_token_id"] for key in ("vision_start", "video", "vision_end")}
    count = len(pixels) // (merge**2 * len(grid))
    ids = with_image_tokens(
        given["input_ids"], config["image_token_id"], count, before=2, others=special.values()
    )
    ids[:, 1] = special["vision_start"]
    shown: dict[str, Any] = {**given, "input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    return {**shown, "mm_token_type_ids": (ids == config["image_token_id"]).int()}


# ── families ─────────────────────────────────────────────────────────────────────────────────

TOWER_KEYS = HARMLESS | {
    *("depth", "embed_dim", "hidden_size", "intermediate_size", "num_heads", "mlp_ratio", "out_hidden_size"),
    *("in_channels", "in_chans", "patch_size", "spatial_patch_size", "temporal_patch_size", "window_size"),
    *("spatial_merge_size", "fullatt_block_indexes", "tokens_per_second", "num_position_embeddings"),
    *("deepstack_visual_indexes", "rope_parameters", "rope_theta", "image_size"),
}
TEXT_KEYS = KNOWN | {"mrope_section"}


def _part(name: str, table: Any, keys: frozenset[str]) -> Family:
    """A component, which does not stand alone."""
    return Family(name=name, library="transformers", table=table, known_keys=keys, required=PLAIN)


TOKENS = frozenset(
    {"image_token_id", "video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id"}
)

QWEN2 = Family(
    name="qwen2_vl",
    library="transformers",
    table=qwen2_vl,
    model_types=("qwen2_vl",),
    inputs=("image", "tokens"),
    frame=frame,
    arrange=inputs,
    components={
        VISION: Component("visual.", family=_part("qwen2_vl-tower", tower_2, TOWER_KEYS)),
        TEXT: Component("language_model.", family=_part("qwen2_vl-text", text_2, TEXT_KEYS)),
    },
    prefixes=("model.",),
    aliases=(
        ("embed_tokens", "language_model.embed_tokens"),
        ("layers.{}", "language_model.layers.{}"),
        ("norm", "language_model.norm"),
    ),
    known_keys=TEXT_KEYS | TOKENS,
    required=PLAIN,
)
QWEN2_5 = replace(
    QWEN2,
    name="qwen2_5_vl",
    table=qwen2_5_vl,
    model_types=("qwen2_5_vl",),
    components={
        **QWEN2.components,
        VISION: Component("visual.", family=_part("qwen2_5_vl-tower", tower_2_5, TOWER_KEYS)),
    },
)
QWEN3 = replace(
    QWEN2,
    name="qwen3_vl",
    table=qwen3_vl,
    model_types=("qwen3_vl",),
    components={
        VISION: Component("visual.", family=_part("qwen3_vl-tower", tower_3, TOWER_KEYS)),
        TEXT: Component("language_model.", family=_part("qwen3_vl-text", qwen3.table, TEXT_KEYS)),
    },
    known_keys=HARMLESS | TOKENS,
)

FAMILIES = (QWEN2, QWEN2_5, QWEN3)

"""SigLIP and SigLIP 2 as in transformers: CLIP's towers, and a head that pools by attention."""

from __future__ import annotations

from dataclasses import replace

from transfusion.architecture.table import Config, Family, Stack, Table
from transfusion.families import clip
from transfusion.families._shared import (
    ATTENTION,
    LABEL,
    PIXEL,
    PLAIN,
    VOCAB,
    below,
    both_ends_below,
)

VISION = f"""
embeddings.patch_embedding.*           x@first <- channel row column
embeddings.position_embedding.weight   position -> x@first
{clip.BLOCKS.strip()}
post_layernorm.*                       scale x@last
"""

VISION_2 = VISION.replace("channel row column", "pixel")
"""SigLIP 2 is fed patches."""

TEXT = f"""
{clip.TEXT.strip()}
head.*                                 joint <- x@last
"""

# One matrix makes the queries, of the probe, and the keys and values, of the stream: so the probe
# has to be in the stream's space. What the attention gives is a small stream of its own, at whose
# end is the image's embedding. If there is a text tower, all of it is the joint space.
POOL = """
head.probe                      _ _ vision.x@last
head.attention.in_proj_weight   [(head qk)|(head qk)|(head vo)] <- vision.x@last
head.attention.in_proj_bias     [(head qk)|(head qk)|(head vo)]
head.attention.out_proj.*       x <- (head vo)
head.layernorm.*                scale x
head.mlp.fc1.*                  ffn <- x
head.mlp.fc2.*                  x@next <- ffn
"""

POOL_JOINT = POOL.replace(" x@next ", " joint ").replace(" x", " joint")

SHORTCUT = "head.layernorm   x -> x@next   head.mlp.fc2"

HEADS = """
classifier.*   label <- vision.x@last
logit_scale    _
logit_bias     _
"""


def vision(config: Config, names: frozenset[str], prefix: str = "", *, joint: bool) -> tuple[Stack, ...]:
    """The vision tower, and its pooling head if it has one."""
    tower = clip.tower("vision", config, prefix)
    rows = VISION_2 if config.get("model_type") == "siglip2_vision_model" else VISION
    tower = replace(tower, rows=below(prefix, rows), axes=(*tower.axes, PIXEL))
    if f"{prefix}head.probe" not in names:
        return (tower,)
    pool = Stack(
        "pool",
        1,
        below(prefix, POOL_JOINT if joint else POOL),
        ATTENTION,
        sizes={"head": tower.sizes["head"], "ffn": tower.sizes["ffn"]},
        shortcuts="" if joint else both_ends_below(prefix, SHORTCUT),
    )
    return (tower, pool)


def text(config: Config, prefix: str = "") -> Stack:
    whole = {**clip.DEFAULTS["vision"], **config}  # SigLIP's towers have one set of defaults
    return replace(clip.tower("text", whole, prefix), rows=below(prefix, TEXT))


def both_towers(config: Config, names: frozenset[str]) -> Table:
    """Both, or the vision tower alone under its longer name, with a classifier."""
    joint = "text_model.head.weight" in names
    towers = vision(config["vision_config"], names, "vision_model.", joint=joint)
    outputs = {"vision_model_output.last_hidden_state": "vision.x@last"}
    if joint:
        towers = (*towers, text(config["text_config"], "text_model."))
        outputs["text_model_output.last_hidden_state"] = "text.x@last"
    return Table(
        stacks=towers,
        axes=(VOCAB, clip.JOINT, LABEL),
        heads=HEADS,
        buffers="vision_model.embeddings.position_ids text_model.embeddings.position_ids",
        outputs=outputs,
    )


def vision_alone(config: Config, names: frozenset[str]) -> Table:
    towers = vision(config, names, joint=False)
    pooled = {"pooler_output": "pool.x@last"} if len(towers) == 2 else {}
    return Table(
        stacks=towers,
        axes=(LABEL,),
        heads=HEADS,
        buffers="embeddings.position_ids",
        outputs={"last_hidden_state": "vision.x@last", **pooled},
    )


def text_alone(config: Config, names: frozenset[str]) -> Table:
    return Table(
        stacks=(text(config),),
        axes=(VOCAB, clip.JOINT),
        buffers="embeddings.position_ids",
        outputs={"last_hidden_state": "x@last"},
    )


KNOWN = clip.KNOWN | {"projection_size", "vision_use_head", "num_patches"}

BOTH = Family(
    name="siglip",
    library="transformers",
    table=both_towers,
    signature=(
        "vision_model.embeddings.patch_embedding.weight",
        "vision_model.head.probe",
        "vision_model.encoder.layers.0.mlp.fc1.weight",
        "text_model.head.weight",
        "text_model.encoder.layers.0.mlp.fc1.weight",
    ),
    model_types=("siglip",),
    inputs=("image", "tokens"),
    known_keys=KNOWN | {"vision_config", "text_config"},
    required=PLAIN,
)

ONE = Family(
    name="siglip-vision",
    library="transformers",
    table=vision_alone,
    signature=(
        "embeddings.patch_embedding.weight",
        "head.probe",
        "encoder.layers.0.mlp.fc1.weight",
    ),
    model_types=("siglip_vision_model",),
    inputs=("image",),
    prefixes=("vision_model.",),
    known_keys=KNOWN,
    required=PLAIN,
)

FAMILIES = (
    BOTH,
    replace(BOTH, name="siglip2", model_types=("siglip2",), inputs=("patches", "tokens")),
    ONE,
    replace(
        ONE,
        name="siglip2-vision",
        model_types=("siglip2_vision_model",),
        inputs=("patches",),
    ),
    Family(
        name="siglip-text",
        library="transformers",
        table=text_alone,
        signature=(
            "embeddings.token_embedding.weight",
            "head.weight",
            "encoder.layers.0.mlp.fc1.weight",
        ),
        model_types=("siglip_text_model", "siglip2_text_model"),
        inputs=("tokens",),
        prefixes=("text_model.",),
        known_keys=KNOWN,
        required=PLAIN,
    ),
)

"""CLIP as in transformers: two pre-norm towers with projections into one space."""

from __future__ import annotations

from transfusion.architecture.table import Config, Family, Stack, Table, fixed
from transfusion.families._shared import (
    ATTENTION,
    HARMLESS,
    LABEL,
    PATCH,
    PLAIN,
    POSITION,
    VOCAB,
    below,
    both_ends_below,
    usual_sizes,
)

BLOCKS = """
encoder.layers.{}.layer_norm1.*          scale x
encoder.layers.{}.self_attn.q_proj.*     (head qk) <- x
encoder.layers.{}.self_attn.k_proj.*     (head qk) <- x
encoder.layers.{}.self_attn.v_proj.*     (head vo) <- x
encoder.layers.{}.self_attn.out_proj.*   y <- (head vo)
encoder.layers.{}.layer_norm2.*          scale y
encoder.layers.{}.mlp.fc1.*              ffn <- y
encoder.layers.{}.mlp.fc2.*              x@next <- ffn
"""

VISION = f"""
embeddings.class_embedding             x@first
embeddings.patch_embedding.weight      x@first <- channel row column
embeddings.position_embedding.weight   position -> x@first
pre_layrnorm.*                         scale x@first
{BLOCKS.strip()}
post_layernorm.*                       scale x@last
"""

TEXT = f"""
embeddings.token_embedding.weight      vocab -> x@first
embeddings.position_embedding.weight   position -> x@first
{BLOCKS.strip()}
final_layer_norm.*                     scale x@last
"""

SHORTCUTS = """
encoder.layers.{}.layer_norm1   x -> y        encoder.layers.{}.self_attn.out_proj
encoder.layers.{}.layer_norm2   y -> x@next   encoder.layers.{}.mlp.fc2
"""

HEADS = """
visual_projection.weight   joint <- vision.x@last
text_projection.weight     joint <- text.x@last
classifier.*               label <- vision.x@last
logit_scale
"""

JOINT = fixed("joint", "images and texts are compared in it, and embeddings are kept outside the model")

DEFAULTS: dict[str, dict[str, int]] = {
    "vision": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "text": {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
    },
}
"""What transformers 4 does not write into the configurations of towers."""


def tower(name: str, config: Config, prefix: str = "") -> Stack:
    """One tower; ``prefix`` is what the names of its modules begin with."""
    vision = name == "vision"
    config = {**DEFAULTS[name], **config}
    return Stack(
        name,
        config["num_hidden_layers"],
        below(prefix, VISION if vision else TEXT),
        (*ATTENTION, POSITION, *PATCH) if vision else (*ATTENTION, POSITION),
        sizes=usual_sizes(config),
        shortcuts=both_ends_below(prefix, SHORTCUTS),
    )


def _only(name: str) -> str:
    """The heads that a single tower can have."""
    lines = [line for line in HEADS.strip().splitlines() if f" {name}." in line]
    return "\n".join(lines)


def both_towers(config: Config, names: frozenset[str]) -> Table:
    present = [name for name in ("vision", "text") if any(n.startswith(f"{name}_model.") for n in names)]
    towers = tuple(tower(name, config[f"{name}_config"], f"{name}_model.") for name in present)
    outputs: dict[str, str | None] = {}
    for name in present:
        outputs[f"{name}_model_output.last_hidden_state"] = f"{name}.x@last"
        outputs[f"{name}_model_output.pooler_output"] = None  # projected since transformers 5
    return Table(
        stacks=towers,
        axes=(VOCAB, JOINT, LABEL),
        heads=HEADS if len(present) == 2 else _only(*present),
        buffers="vision_model.embeddings.position_ids text_model.embeddings.position_ids",
        outputs=outputs,
    )


def vision_alone(config: Config, names: frozenset[str]) -> Table:
    return Table(
        stacks=(tower("vision", config),),
        axes=(JOINT, LABEL),
        heads=_only("vision"),
        buffers="embeddings.position_ids",
        outputs={"last_hidden_state": "x@last", "pooler_output": "x@last"},
    )


def text_alone(config: Config, names: frozenset[str]) -> Table:
    return Table(
        stacks=(tower("text", config),),
        axes=(VOCAB, JOINT),
        heads=_only("text"),
        buffers="embeddings.position_ids",
        outputs={"last_hidden_state": "x@last", "pooler_output": "x@last"},
    )


KNOWN = (
    HARMLESS
    | {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    | {"image_size", "patch_size", "num_channels", "max_position_embeddings"}
    | {"logit_scale_init_value", "text_config_dict", "vision_config_dict"}
    | {"is_decoder"}
)

FAMILIES = (
    Family(
        name="clip",
        library="transformers",
        table=both_towers,
        signature=(
            "vision_model.embeddings.class_embedding",
            "text_model.embeddings.token_embedding.weight",
            "vision_model.encoder.layers.0.mlp.fc1.weight",
            "text_model.encoder.layers.0.mlp.fc1.weight",
        ),
        model_types=("clip",),
        inputs=("image", "tokens"),
        known_keys=KNOWN | {"vision_config", "text_config"},
        required=PLAIN,
    ),
    Family(
        name="clip-vision",
        library="transformers",
        table=vision_alone,
        signature=("embeddings.class_embedding", "encoder.layers.0.self_attn.q_proj.weight"),
        model_types=("clip_vision_model",),
        inputs=("image",),
        prefixes=("vision_model.",),
        known_keys=KNOWN,
        required=PLAIN,
    ),
    Family(
        name="clip-text",
        library="transformers",
        table=text_alone,
        signature=("embeddings.token_embedding.weight", "encoder.layers.0.self_attn.q_proj.weight"),
        model_types=("clip_text_model",),
        inputs=("tokens",),
        prefixes=("text_model.",),
        known_keys=KNOWN,
        required=PLAIN,
    ),
)

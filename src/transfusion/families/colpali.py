"""ColPali and ColQwen2 as in transformers: a model that sees and reads, and a linear map for every token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transfusion.architecture.table import Component, Config, Family, Table
from transfusion.families import family_of_component
from transfusion.families._composition import DECODER
from transfusion.families._placeholders import Inputs
from transfusion.families._shared import HARMLESS, MATCH, PLAIN
from transfusion.families.llava import ALIASES, paligemma_inputs
from transfusion.families.qwen_vl import QWEN2
from transfusion.families.qwen_vl import frame as qwen_frame
from transfusion.families.qwen_vl import inputs as qwen_inputs

VLM = "vlm_config"
PROJECTION = f"embedding_proj_layer.*   match <- {DECODER}.x@last"


def table(config: Config, names: frozenset[str]) -> Table:
    """The table of the model below, with the map on top."""
    section: dict[str, Any] = config[VLM]
    below = family_of_component(Component("", "paligemma"), section, VLM).table(section, names)
    return replace(below, rows=f"{below.rows}\n{PROJECTION}", axes=(*below.axes, MATCH))


def colpali_inputs(config: Config, given: Inputs) -> Inputs:
    return paligemma_inputs(config[VLM], given)


def colqwen2_inputs(config: Config, given: Inputs) -> Inputs:
    """The patches of each image are a row of their own."""
    made = qwen_inputs(config[VLM], given)
    pixels = made["pixel_values"].reshape(len(made["input_ids"]), -1, made["pixel_values"].shape[1])
    return {key: one for key, one in made.items() if key != "mm_token_type_ids"} | {"pixel_values": pixels}


COLPALI = Family(
    name="colpali",
    library="transformers",
    table=table,
    model_types=("colpali",),
    inputs=("image", "tokens"),
    arrange=colpali_inputs,
    components={VLM: Component("", "paligemma")},
    prefixes=("vlm.model.", "vlm."),
    aliases=ALIASES,
    known_keys=HARMLESS | {"embedding_dim"},
    required=PLAIN,
)

FAMILIES = (
    COLPALI,
    replace(
        COLPALI,
        name="colqwen2",
        model_types=("colqwen2",),
        frame=lambda config: qwen_frame(config[VLM]),
        arrange=colqwen2_inputs,
        components={VLM: Component("", "qwen2_vl")},
        aliases=QWEN2.aliases,
    ),
)

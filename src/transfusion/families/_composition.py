"""Models made of models: tables of components put together, with what connects them.

A component stands below a prefix and has a section of the configuration to itself. Its table is that of its
own family: a vision tower has a stack ``vision``, a language model a stack ``layer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transfusion.architecture.table import Axis, Component, Config, Family, Stack, Table, fixed
from transfusion.errors import ArchitectureError
from transfusion.families import family_of_component
from transfusion.families._shared import below, both_ends_below

VISION, TEXT = "vision_config", "text_config"
TOWER, DECODER = "vision", "layer"
"""The stacks of a vision tower and of a language model."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "gemma": {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}
"""What transformers 4 leaves out of the sections of a configuration: the defaults of its classes."""


CELL = fixed("cell", "patches that become one token come in this order")
"""The place of a patch among those that become one token."""

OUTPUTS: Mapping[str, str | None] = {
    "last_hidden_state": f"{DECODER}.x@last",
    "image_hidden_states": f"{DECODER}.x@first",
    "image_hidden_states.last_hidden_state": f"{TOWER}.x@last",
    "image_hidden_states.pooler_output.{}": f"{DECODER}.x@first",
}
"""Outputs of these models: some give the projected image, some all outputs of the tower."""


def section_of(family: Family, config: Config, section: str) -> dict[str, Any]:
    """Return the settings of a component, with those that files leave out.

    Files of some families have the settings of the language model outside of any section.
    """
    component = family.components[section]
    part = config.get(section) or (config if section == TEXT else {})
    kind = component.model_type if part is config else part.get("model_type", component.model_type)
    return {**DEFAULTS.get(kind, {}), **part}


def component_table(family: Family, config: Config, names: frozenset[str], section: str) -> Table:
    """Return the table of a component, under the names that its tensors have in the whole model."""
    component, settings = family.components[section], section_of(family, config, section)
    prefix, kind = component.prefix, _kind(component, config, section)
    own = family_of_component(component, {**settings, "model_type": kind}, section)
    inner = frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return placed_below(prefix, own.table(settings, inner))


def _kind(component: Component, config: Config, section: str) -> str:
    kind: str = (config.get(section) or {}).get("model_type", component.model_type)
    return kind


def placed_below(prefix: str, table: Table) -> Table:
    """Return the same table, of modules that stand below ``prefix``. Task heads stay where they are."""

    def placed(stack: Stack) -> Stack:
        rows, shortcuts = below(prefix, stack.rows), both_ends_below(prefix, stack.shortcuts)
        return replace(stack, rows=rows, shortcuts=shortcuts)

    return replace(
        table,
        stacks=tuple(map(placed, table.stacks)),
        rows=below(prefix, table.rows),
        buffers=below(prefix, "\n".join(table.buffers.split())),
        ties={second: prefix + first for second, first in table.ties.items()},
    )


def composed(
    family: Family,
    config: Config,
    names: frozenset[str],
    *,
    tied: bool,
    connection: str,
    axes: tuple[Axis, ...] = (),
) -> Table:
    """Return the table of a model that shows images to a language model.

    ``connection`` has the rows of what maps the tower's outputs to the text's stream, ``axes`` their axes;
    ``vision.x@last`` and ``layer.x@first`` are the points that it connects. ``tied`` says whether the
    embeddings of the text are tied: files say so within the section, outside of it, or not at all.
    """
    settings = {**section_of(family, config, TEXT), "tie_word_embeddings": tied}
    text = component_table(family, {**config, TEXT: settings}, names, TEXT)
    tower = component_table(family, config, names, VISION)
    for table, name, what in ((tower, TOWER, VISION), (text, DECODER, TEXT)):
        if name not in (stack.name for stack in table.stacks):
            raise ArchitectureError(
                f"{family.name}: {what} describes a model that cannot be a part of it",
                hint="this composition has no table",
            )
    return Table(
        stacks=(*tower.stacks, *text.stacks),
        axes=(*tower.axes, *(axis for axis in text.axes if axis not in tower.axes), *axes),
        rows="\n".join(part.strip() for part in (tower.rows, text.rows, connection) if part.strip()),
        heads=_qualified(text.heads),
        buffers=f"{tower.buffers} {text.buffers}",
        sizes={**tower.sizes, **text.sizes},
        unified=tuple((f"{DECODER}.{one}", f"{DECODER}.{other}") for one, other in text.unified),
        ties=text.ties,
        outputs=OUTPUTS,
    )


def _qualified(heads: str) -> str:
    """Return rows of task heads that name the end of the language model's stream from outside."""
    return heads.replace(" x@", f" {DECODER}.x@")

"""Writing: a draft as a file of Python that ``--architecture`` takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from transfusion.architectures import HARMLESS
from transfusion.proposal.drafting import Draft
from transfusion.tables import Axis, Group

PROBES = {"pixel_values": "image", "input_ids": "tokens", "token_type_ids": "tokens"}
"""Inputs that `live.probes` knows how to make, and the kinds that it knows them by."""


def write(
    draft: Draft,
    name: str,
    class_name: str,
    library: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
) -> str:
    """The whole file."""
    known = library == "transformers" and set(inputs) <= set(PROBES)
    sections = [
        _head(draft, name, class_name),
        _imports(draft, known, library),
        _text("ROWS", _columns(draft.rows)),
        _text("HEADS", _columns(draft.heads)) if draft.heads else "",
        _text("SHORTCUTS", _columns(draft.shortcuts)),
        _declarations("AXES", draft.axes),
        _declarations("OUTER_AXES", draft.outer_axes) if draft.outer_axes else "",
        _table(draft),
        "" if known else _probes(inputs),
        _family(draft, name, library, config, sorted({PROBES[key] for key in inputs}) if known else None),
    ]
    return "\n".join(section.rstrip("\n") + "\n" for section in sections if section)


def _head(draft: Draft, name: str, class_name: str) -> str:
    lines = [f'"""{name}, as in {class_name}: a draft, made by trials on a live model.', ""]
    lines += [
        "The names are those of the module's parameters in memory; a checkpoint may call them otherwise,"
    ]
    lines += ["which is what aliases are for. It holds for the configuration that it was made with."]
    if draft.idle:
        lines += ["", "Tensors that nothing depended on, and that are left alone:", *draft.idle]
    return "\n".join([*lines, '"""'])


def _imports(draft: Draft, known: bool, library: str) -> str:
    lines = ["from __future__ import annotations", ""]
    if not known:
        lines += ["import torch", "from torch import Tensor", ""]
    if library == "transformers":
        lines += ["from transfusion.architectures import HARMLESS"]
    fixed = any(axis.group is Group.FIXED for axis in (*draft.axes, *draft.outer_axes))
    names = ["Axis", "Config", "Family", "Stack", "Table", *(["fixed"] if fixed else [])]
    return "\n".join([*lines, f"from transfusion.tables import {', '.join(names)}"])


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["   ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _text(name: str, lines: list[str]) -> str:
    return "\n".join([f'{name} = """', *lines, '"""'])


def _declarations(name: str, axes: list[Axis]) -> str:
    return "\n".join([f"{name} = (", *(f"    {_declaration(axis)}," for axis in axes), ")"])


def _declaration(axis: Axis) -> str:
    if axis.group is Group.FIXED:
        scope = "" if axis.scope == "model" else f', scope="{axis.scope}"'
        return f'fixed("{axis.name}", "{axis.why}"{scope})'
    words = [f'"{axis.name}"']
    words += [f'within="{axis.within}"'] if axis.within else []
    words += [f'scope="{axis.scope}"'] if axis.scope != "layer" else []
    words += [f'twin="{axis.twin}"'] if axis.twin else []
    return f"Axis({', '.join(words)})"


def _table(draft: Draft) -> str:
    sizes = [f'"{axis}": {size}' for axis, size in draft.sizes.items()]
    points = ", ".join(f'"{point}"' for point in draft.points) + ("," if len(draft.points) == 1 else "")
    lines = ["", "def table(config: Config, names: frozenset[str]) -> Table:"]
    lines += ["    sizes = {", *(f"        {size}," for size in sizes), "    }"]
    lines += [f'    stack = Stack("layer", {draft.depth}, ROWS, AXES, sizes, SHORTCUTS, points=({points}))']
    lines += ["    return Table(", "        stacks=(stack,),"]
    if draft.outer_axes:
        lines += ["        axes=OUTER_AXES,"]
    if draft.heads:
        lines += ["        heads=HEADS,"]
    if draft.buffers:
        lines += [f'        buffers="{" ".join(draft.buffers)}",']
    if draft.unified:
        lines += [f"        unified={_literal(tuple(draft.unified))},"]
    if draft.ties:
        lines += [f"        ties={_literal(draft.ties)},"]
    if draft.outputs:
        lines += [f"        outputs={_literal(draft.outputs)},"]
    return "\n".join([*lines, "    )"])


def _probes(inputs: Mapping[str, Tensor]) -> str:
    lines = ["", "def probes(config: Config) -> dict[str, Tensor]:"]
    lines += ["    generator = torch.Generator().manual_seed(0)", "    return {"]
    for name, value in inputs.items():
        shape = tuple(value.shape)
        if value.is_floating_point():
            made = f"torch.randn({shape}, generator=generator, dtype=torch.float64)"
        else:
            made = f"torch.randint(0, {int(value.max()) + 1}, {shape}, generator=generator)"
        lines += [f'        "{name}": {made},']
    return "\n".join([*lines, "    }"])


def _family(draft: Draft, name: str, library: str, config: Mapping[str, Any], kinds: list[str] | None) -> str:
    of_library = library == "transformers"
    own = sorted(set(config) - (HARMLESS if of_library else frozenset()) - {"model_type"})
    required = {key: (config[key],) for key in own if _must_stay(key, config[key], draft)}
    if draft.ties and "tie_word_embeddings" in config:
        required["tie_word_embeddings"] = (config["tie_word_embeddings"],)
    keys = own if of_library else sorted({*config, "model_type"})
    lines = ["", "FAMILIES = (", "    Family("]
    lines += [f'        name="{name}",', f'        library="{library}",', "        table=table,"]
    lines += [f"        model_types={_literal((config.get('model_type', name),))},"]
    lines += [f"        inputs={_literal(tuple(kinds))}," if kinds is not None else "        probes=probes,"]
    if draft.prefix:
        lines += [f"        prefixes={_literal((draft.prefix,))},"]
    lines += [f"        known_keys={'HARMLESS' if of_library else 'frozenset()'}"]
    lines += [f"        | {{{line}}}" for line in _wrapped(_literal(key) for key in keys)]
    lines[-1] += ","
    if required:
        lines += ["        required={"]
        lines += [f"            {_literal(key)}: {_literal(value)}," for key, value in required.items()]
        lines += ["        },"]
    return "\n".join([*lines, "    ),", ")"])


def _must_stay(key: str, value: object, draft: Draft) -> bool:
    """Whether a setting may decide what a model computes, rather than how large it is."""
    if isinstance(value, list):
        return False
    if isinstance(value, int) and not isinstance(value, bool):
        return value not in draft.extents or "rot" in key or str(value) == draft.sizes.get("rot")
    return True


def _wrapped(words: Iterable[str], width: int = 90) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 2 <= width:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines


def _literal(value: object) -> str:
    """A value as Python writes it, with double quotes."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        inside = ", ".join(map(_literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)

"""A draft as Python source for ``--architecture``, which defines the same objects as `draft_family`.

Names have been checked by `declarations`; values are written by `literal` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from transfusion.architecture.table import Axis, Symmetry
from transfusion.verification.drafting.declarations import Declaration, Probe
from transfusion.verification.drafting.draft import Draft
from transfusion.verification.drafting.draft_family import STACK, rows_of
from transfusion.verification.drafting.symbolic_counts import Count, Term


def write(draft: Draft, said: Declaration) -> str:
    """The whole file."""
    sections = [
        _head(draft, said),
        _imports(draft, said),
        _text("ROWS", draft.rows),
        _text("HEADS", draft.heads) if draft.heads else "",
        _text("SHORTCUTS", draft.shortcuts),
        _declarations("AXES", draft.axes),
        _declarations("OUTER_AXES", draft.outer_axes) if draft.outer_axes else "",
        _table(draft),
        _probes(said.probes) if said.kinds is None else "",
        _family(said),
    ]
    return "\n".join(section.rstrip("\n") + "\n" for section in sections if section)


def literal(value: object) -> str:
    """A value as Python writes it, with double quotes where the text itself has no quotes."""
    if isinstance(value, tuple):
        inside = ", ".join(map(literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and text[0] == "'" and '"' not in text else text


def _head(draft: Draft, said: Declaration) -> str:
    lines = [f'"""{said.name}, as in {said.class_name}: a draft, made by trials on a live model.', ""]
    lines += [
        "The names are those of the module's parameters in memory; a checkpoint may call them otherwise,"
    ]
    lines += ["which is what aliases are for. It holds for the configuration that it was made with."]
    if draft.idle:
        lines += ["", "Tensors that nothing depended on, and that are left alone:", *draft.idle]
    return "\n".join([*lines, '"""'])


def _imports(draft: Draft, said: Declaration) -> str:
    lines = ["from __future__ import annotations", ""]
    if said.kinds is None:
        lines += ["import torch", "from torch import Tensor", ""]
    if said.of_library:
        lines += ["from transfusion.architecture.families import HARMLESS"]
    fixed = any(axis.group is Symmetry.FIXED for axis in (*draft.axes, *draft.outer_axes))
    names = ["Axis", "Config", "Family", "Stack", "Table", *(["fixed"] if fixed else [])]
    return "\n".join([*lines, f"from transfusion.architecture.table import {', '.join(names)}"])


def _text(name: str, rows: Iterable[tuple[str, ...]]) -> str:
    return f'{name} = """{rows_of(rows)}"""'


def _declarations(name: str, axes: list[Axis]) -> str:
    return "\n".join([f"{name} = (", *(f"    {_declaration(axis)}," for axis in axes), ")"])


def _declaration(axis: Axis) -> str:
    usual = "model" if axis.group is Symmetry.FIXED else "layer"
    named = {
        "within": axis.within,
        "scope": axis.scope if axis.scope != usual else None,
        "tied_with": axis.tied_with,
    }
    words = [f"{name}={literal(value)}" for name, value in named.items() if value]
    if axis.group is Symmetry.FIXED:
        return f"fixed({', '.join([literal(axis.name), literal(axis.why), *words])})"
    return f"Axis({', '.join([literal(axis.name), *words])})"


def _table(draft: Draft) -> str:
    lines = ["", "def table(config: Config, names: frozenset[str]) -> Table:"]
    sizes = (f"        {literal(axis)}: {_count(size)}," for axis, size in draft.sizes.items())
    lines += ["    sizes = {", *sizes, "    }"]
    about = f"{literal(STACK)}, {_count(draft.depth)}, ROWS, AXES, sizes, SHORTCUTS"
    lines += [f"    stack = Stack({about}, points={literal(draft.points)})"]
    lines += ["    return Table(", "        stacks=(stack,),"]
    if draft.outer_axes:
        lines += ["        axes=OUTER_AXES,"]
    if draft.heads:
        lines += ["        heads=HEADS,"]
    if draft.buffers:
        lines += [f"        buffers={literal(' '.join(draft.buffers))},"]
    if draft.unified:
        lines += [f"        unified={literal(tuple(draft.unified))},"]
    if draft.ties:
        lines += [f"        ties={literal(draft.ties)},"]
    if draft.outputs:
        lines += [f"        outputs={literal(draft.outputs)},"]
    return "\n".join([*lines, "    )"])


def _count(count: Count) -> str:
    return _term(count.of) if count.per is None else f"{_term(count.of)} // {_term(count.per)}"


def _term(term: Term) -> str:
    return f"config[{literal(term)}]" if isinstance(term, str) else literal(term)


def _probes(probes: Mapping[str, Probe]) -> str:
    lines = ["", "def probes(config: Config) -> dict[str, Tensor]:"]
    lines += ["    generator = torch.Generator().manual_seed(0)", "    return {"]
    for name, probe in probes.items():
        shape = literal(probe.shape)
        if probe.below is None:
            made = f"torch.randn({shape}, generator=generator, dtype=torch.float64)"
        else:
            made = f"torch.randint(0, {literal(probe.below)}, {shape}, generator=generator)"
        lines += [f"        {literal(name)}: {made},"]
    return "\n".join([*lines, "    }"])


def _family(said: Declaration) -> str:
    lines = ["", "FAMILIES = (", "    Family("]
    lines += [f"        name={literal(said.name)},", f"        library={literal(said.library)},"]
    lines += ["        table=table,", f"        model_types={literal(said.model_types)},"]
    lines += ["        probes=probes," if said.kinds is None else f"        inputs={literal(said.kinds)},"]
    if said.prefixes:
        lines += [f"        prefixes={literal(said.prefixes)},"]
    lines += [f"        known_keys={'HARMLESS' if said.of_library else 'frozenset()'}"]
    lines += [f"        | {{{line}}}" for line in _wrapped(map(literal, said.keys))]
    lines[-1] += ","
    if said.required:
        lines += ["        required={"]
        lines += [f"            {literal(key)}: {literal(value)}," for key, value in said.required.items()]
        lines += ["        },"]
    return "\n".join([*lines, "    ),", ")"])


def _wrapped(words: Iterable[str], width: int = 90) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 2 <= width:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines

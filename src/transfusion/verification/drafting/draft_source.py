"""The Python source of a draft, for ``--architecture``. It defines the same objects as `draft_family`.

All names have been checked by `declarations`, and all values are written by `literal`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, StrictUndefined

from transfusion.architecture.table import Axis, Symmetry
from transfusion.verification.drafting.axis_labels import Count, Term
from transfusion.verification.drafting.declarations import Declaration, Probe
from transfusion.verification.drafting.draft import Draft
from transfusion.verification.drafting.draft_family import STACK, rows_of

_SOURCE = '''\
"""{{ family.name }}, as in {{ family.class_name }}: a draft, made by trials on a live model.

The names are those of the module's parameters in memory; if a checkpoint has others, add aliases.
The table is valid for the configuration that it was made with.
{% if draft.idle %}

Tensors without an effect on the outputs, which stay as they are:
{{ draft.idle | join("\n") }}
{% endif %}
"""

from __future__ import annotations

{% if family.kinds is none %}
import torch
from torch import Tensor

{% endif %}
{% if family.of_library %}
from transfusion.families import HARMLESS
{% endif %}
from transfusion.architecture.table import Axis, Config, Family, Stack, Table{{ ", fixed" if fixed }}

ROWS = """{{ draft.rows | rows }}"""
{% if draft.heads %}

HEADS = """{{ draft.heads | rows }}"""
{% endif %}

SHORTCUTS = """{{ draft.shortcuts | rows }}"""

AXES = (
{% for axis in draft.axes %}
    {{ axis | axis }},
{% endfor %}
)
{% if draft.outer_axes %}

OUTER_AXES = (
{% for axis in draft.outer_axes %}
    {{ axis | axis }},
{% endfor %}
)
{% endif %}


def table(config: Config, names: frozenset[str]) -> Table:
    sizes = {
{% for axis, size in draft.sizes.items() %}
        {{ axis | literal }}: {{ size | count }},
{% endfor %}
    }
    depth, points = {{ draft.depth | count }}, {{ draft.points | literal }}
    return Table(
        stacks=(Stack({{ stack | literal }}, depth, ROWS, AXES, sizes, SHORTCUTS, points=points),),
{% for name, value in options.items() if value %}
        {{ name }}={{ value }},
{% endfor %}
    )
{% if family.kinds is none %}


def probes(config: Config) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
{% for name, probe in family.probes.items() %}
        {{ name | literal }}: torch.{{ probe | drawn }},
{% endfor %}
    }
{% endif %}


FAMILIES = (
    Family(
        name={{ family.name | literal }},
        library={{ family.library | literal }},
        table=table,
        model_types={{ family.model_types | literal }},
        {{ "probes=probes" if family.kinds is none else "inputs=" ~ (family.kinds | literal) }},
{% if family.prefixes %}
        prefixes={{ family.prefixes | literal }},
{% endif %}
        known_keys={{ "HARMLESS" if family.of_library else "frozenset()" }}
        | {
{% for key in family.keys %}
            {{ key | literal }},
{% endfor %}
        },
{% if family.required %}
        required={
{% for key, value in family.required.items() %}
            {{ key | literal }}: {{ value | literal }},
{% endfor %}
        },
{% endif %}
    ),
)
'''


def write(draft: Draft, family: Declaration) -> str:
    """Return the source of a draft."""
    options = {
        "axes": "OUTER_AXES" if draft.outer_axes else "",
        "heads": "HEADS" if draft.heads else "",
        "buffers": literal(" ".join(draft.buffers)) if draft.buffers else "",
        "unified": literal(tuple(draft.unified)) if draft.unified else "",
        "ties": literal(draft.ties) if draft.ties else "",
        "outputs": literal(draft.outputs) if draft.outputs else "",
    }
    fixed = any(axis.group is Symmetry.FIXED for axis in (*draft.axes, *draft.outer_axes))
    source = _ENVIRONMENT.from_string(_SOURCE)
    return source.render(draft=draft, family=family, options=options, fixed=fixed, stack=STACK)


def literal(value: object) -> str:
    """Return a value as a Python literal, in double quotes unless the text has quotes itself."""
    if isinstance(value, tuple):
        inside = ", ".join(map(literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and text[0] == "'" and '"' not in text else text


def _axis(axis: Axis) -> str:
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


def _drawn(probe: Probe) -> str:
    if probe.below is None:
        return f"randn({literal(probe.shape)}, generator=generator, dtype=torch.float64)"
    return f"randint(0, {literal(probe.below)}, {literal(probe.shape)}, generator=generator)"


def _count(count: Count) -> str:
    return _term(count.of) if count.per is None else f"{_term(count.of)} // {_term(count.per)}"


def _term(term: Term) -> str:
    return f"config[{literal(term)}]" if isinstance(term, str) else literal(term)


_ENVIRONMENT = Environment(
    autoescape=False, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
)
_ENVIRONMENT.filters |= {
    "literal": literal,
    "rows": rows_of,
    "axis": _axis,
    "count": _count,
    "drawn": _drawn,
}

"""Drafts as families: the objects that the source of a draft defines, made without running it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from transfusion.architecture.table import Config, Family, Stack, Table
from transfusion.verification.drafting.declarations import Declaration, Probe
from transfusion.verification.drafting.draft import Draft

STACK = "layer"
"""The name of a draft's stack of blocks."""


def family_of(draft: Draft, declaration: Declaration) -> Family:
    """Return the family of a draft."""
    return Family(
        name=declaration.name,
        library=declaration.library,
        table=partial(_table, draft),
        model_types=declaration.model_types,
        inputs=declaration.kinds or (),
        probes=partial(_probes, declaration.probes) if declaration.kinds is None else None,
        prefixes=declaration.prefixes,
        known_keys=declaration.known_keys,
        required=declaration.required,
    )


def rows_of(rows: Iterable[tuple[str, ...]]) -> str:
    """Return the text of a table's rows, in columns."""
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(["", *lines, ""])


def _table(draft: Draft, config: Config, names: frozenset[str]) -> Table:
    sizes = {axis: count.under(config) for axis, count in draft.sizes.items()}
    stack = Stack(
        STACK,
        draft.depth.under(config),
        rows_of(draft.rows),
        tuple(draft.axes),
        sizes,
        rows_of(draft.shortcuts),
        points=draft.points,
    )
    return Table(
        stacks=(stack,),
        axes=tuple(draft.outer_axes),
        heads=rows_of(draft.heads) if draft.heads else "",
        buffers=" ".join(draft.buffers),
        unified=tuple(draft.unified),
        ties=draft.ties,
        outputs=draft.outputs,
    )


def _probes(probes: Mapping[str, Probe], config: Config) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: _draw(probe, generator) for name, probe in probes.items()}


def _draw(probe: Probe, generator: torch.Generator) -> Tensor:
    if probe.below is None:
        return torch.randn(probe.shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, probe.below, probe.shape, generator=generator)

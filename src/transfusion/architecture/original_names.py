"""The names in the files that a model's authors distribute, in terms of the table's names.

diffusers names the modules of many models anew. A family lists the authors' names as data, one line per
module or tensor, ``original  ours``; ``{}`` is the number of a block. One stored tensor may hold several of
ours, along its first dimension: ``double_blocks.{}.img_attn.qkv   transformer_blocks.{}.attn. to_q | to_k |
to_v``. What ends in a point is the beginning of all parts. Parts have equal sizes, unless one is marked with
``*``: then the others are as long as the module's input, and it has the rest. ``linear[1]`` is the part 1 of
a tensor of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import Family, Shapes
from transfusion.errors import ArchitectureError

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What files with more than one model, and those of ComfyUI, put before every name."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class OriginalModule:
    """The modules or tensors of ours that one of the authors' holds, in order."""

    parts: tuple[str, ...]
    rest: int | None = None
    """The part that has the rest of the rows, if the parts differ in size."""

    def heights(self, rows: int, inputs: int | None, name: str) -> tuple[int, ...]:
        """Return the rows of each part, of ``rows`` rows of a module with so many inputs."""
        if self.rest is None:
            return (shared(rows, len(self.parts), f"{name} into {len(self.parts)} parts"),) * len(self.parts)
        left = rows - (len(self.parts) - 1) * (inputs or 0)
        if not inputs or left < 1:
            raise ArchitectureError(
                f"{name} has {rows} rows, too few for {' | '.join(self.parts)}",
                hint="is this the right file? the download may be incomplete",
            )
        return tuple(left if part == self.rest else inputs for part in range(len(self.parts)))


class OriginalNames:
    """The authors' names of one family."""

    def __init__(self, family: Family) -> None:
        self.modules = _parsed(family.original)

    def module(self, name: str) -> OriginalModule | None:
        """Return what a module of the authors' is here, such as ``double_blocks.0.img_attn.qkv``, or a
        tensor of it; None if there is no such module.
        """
        name = without_prefix(name)
        above, _, leaf = name.rpartition(".")
        for found, ending in ((name, ""), (above, f".{leaf}")):
            for pattern in (found, _NUMBER.sub("{}", found, count=1)):
                if module := self.modules.get(pattern):
                    block = number[0] if (number := _NUMBER.search(found)) else ""
                    parts = tuple(part.replace("{}", block) + ending for part in module.parts)
                    return OriginalModule(parts, module.rest)
        return None

    def share(self, names: Iterable[str]) -> float:
        """Return the share of names that are the authors' for this family."""
        known = [self.module(name) is not None for name in names]
        return sum(known) / max(1, len(known))


def without_prefix(name: str) -> str:
    """Return a name without what files with more than one model put before it."""
    prefix = next((one for one in PREFIXES if name.startswith(one)), "")
    return name.removeprefix(prefix)


def split_rows(names: OriginalNames, name: str, shapes: Shapes) -> list[tuple[str, slice]] | None:
    """Return the tensors of ours in a stored one, with the rows of each; None if its name is unknown."""
    module = names.module(name)
    if module is None:
        return None
    if len(module.parts) == 1:
        return [(module.parts[0], slice(None))]
    weight = shapes.get(f"{name.rpartition('.')[0]}.weight", ())
    heights = module.heights(shapes[name][0], weight[1] if len(weight) > 1 else None, name)
    ends = [sum(heights[: part + 1]) for part in range(len(heights))]
    return [
        (part, slice(end - height, end))
        for part, height, end in zip(module.parts, heights, ends, strict=True)
    ]


@cache
def _parsed(text: str) -> dict[str, OriginalModule]:
    modules: dict[str, OriginalModule] = {}
    for line in text.strip().splitlines():
        original, *ours = line.split()
        beginning = ours.pop(0) if ours[0].endswith(".") else ""
        parts = [part for part in ours if part != "|"]
        rest = next((number for number, part in enumerate(parts) if part.endswith("*")), None)
        modules[original] = OriginalModule(tuple(beginning + part.removesuffix("*") for part in parts), rest)
    return modules

"""The names in the files that a model's authors distribute, in terms of the table's names.

diffusers names the modules of many models anew. A family lists the authors' names as data, one line per
module or tensor, ``original  ours``; ``{}`` is the number of a block. One stored tensor may hold several of
ours, along its first dimension: ``double_blocks.{}.img_attn.qkv   transformer_blocks.{}.attn. to_q | to_k |
to_v``. What ends in a point is the beginning of all parts. Parts have equal sizes, unless one is marked with
``*``: then the others are as long as the module's input, and it has the rest. ``linear[1]`` is the part 1 of
a tensor of ours. A line with ``{last}`` replaces another one in the last block. Names that are the same need
no line. A checkpoint with the names of the first two lines is in the authors' names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

from transfusion.architecture.naming import depth
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
        count = len(self.parts)
        left = rows - (count - 1) * (inputs or 0)
        if self.rest is None and rows and rows % count == 0:
            return (rows // count,) * count
        if self.rest is None or not inputs or left < 1:
            raise ArchitectureError(
                f"{name} has {rows} rows, which cannot be divided among {' | '.join(self.parts)}",
                hint="is this the right file? the download may be incomplete",
            )
        return tuple(left if part == self.rest else inputs for part in range(count))


class OriginalNames:
    """The authors' names of one family, for models with so many blocks.

    >>> OriginalNames(flux).module("double_blocks.3.img_attn.qkv.weight").parts[0]
    'transformer_blocks.3.attn.to_q.weight'
    """

    def __init__(self, family: Family, blocks: int | None = None) -> None:
        self.family = family
        self.modules = _parsed(family.original)
        self.last = None if blocks is None else str(blocks - 1)

    @classmethod
    def of(cls, family: Family, names: Collection[str]) -> OriginalNames | None:
        """Return the authors' names of a family if these are such names, with their number of blocks."""
        given = {without_prefix(name) for name in names}
        first = [pattern.replace("{}", "0") for pattern in islice(_parsed(family.original), 2)]
        if not first or not all(given & {name, f"{name}.weight"} for name in first):
            return None
        numbered = next((pattern for pattern in _parsed(family.original) if "{last}" in pattern), "{last}")
        return cls(family, depth(given, numbered.partition("{last}")[0] + "{}."))

    def module(self, name: str) -> OriginalModule | None:
        """Return what a module of the authors' is here, such as ``double_blocks.0.img_attn.qkv``, or a
        tensor of it; None if there is no such module.
        """
        name = without_prefix(name)
        above, _, leaf = name.rpartition(".")
        for found, ending in ((name, ""), (above, f".{leaf}")):
            for pattern, block in self._patterns(found):
                if module := self.modules.get(pattern):
                    parts = (part.replace("{}", block).replace("{last}", block) for part in module.parts)
                    return OriginalModule(tuple(part + ending for part in parts), module.rest)
        return None

    def _patterns(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield a name with each of its numbers in turn replaced by ``{last}`` or ``{}``, and the number."""
        yield name, ""
        for number in _NUMBER.finditer(name):
            for which in ("{last}", "{}") if number[0] == self.last else ("{}",):
                yield name[: number.start()] + which + name[number.end() :], number[0]


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
    rows = shapes[name][0] if shapes[name] else 0
    heights = module.heights(rows, weight[1] if len(weight) > 1 else None, name)
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

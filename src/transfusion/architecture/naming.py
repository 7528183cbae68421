"""Names: translates the names that libraries and authors give to a tensor into the table's name.

A checkpoint, a live module and an adapter may name the same tensor differently. Tables know one
name, the canonical one. Other names are translated when a model is opened; files keep their own names.

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
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice

from transfusion.architecture.table import Family, Shapes
from transfusion.errors import ArchitectureError

WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")
"""Prefixes of distributed training, compilation and PEFT."""
_BLOCK = re.compile(r"(.*?(?:^|\.)\d+)\.")


class Naming:
    """Translates the names of one family."""

    def __init__(self, family: Family, *, live: bool = False) -> None:
        """``live`` names may be those of parts of a tensor that files keep whole."""
        self.family = family
        self.parts = {below: Naming(part, live=live) for below, part in family.whole_parts.items()}
        self.aliases = [
            (_pattern(other), _template(ours))
            for other, ours in family.aliases
            if live or "[" not in ours or "#" in ours
        ]

    def canonical(self, name: str) -> str:
        """Return the table's name of a tensor or module."""
        name = unwrapped(name)
        for below, part in self.parts.items():
            if name.startswith(below):
                return below + part.canonical(name.removeprefix(below))
        for prefix in self.family.prefixes:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        for pattern, template in self.aliases:
            if pattern.match(name):
                return pattern.sub(template, name, count=1)
        return name

    def table(self, names: Iterable[str]) -> dict[str, str]:
        """Return the name of every tensor by canonical name; refuse two names of one tensor."""
        result: dict[str, str] = {}
        for name in names:
            ours = self.canonical(name)
            if ours in result:
                raise ArchitectureError(
                    f"{result[ours]} and {name} are two names of one tensor, and the checkpoint has both",
                    hint="save the checkpoint again with only one of the two",
                )
            result[ours] = name
        return result


def unwrapped(name: str) -> str:
    """Return the name without the prefixes of wrappers."""
    while wrapper := next((w for w in WRAPPERS if name.startswith(w)), None):
        name = name.removeprefix(wrapper)
    return name


def block_of(name: str) -> str:
    """Return the block of a tensor: its canonical name up to the block's number, or "" outside the blocks."""
    found = _BLOCK.match(name)
    return found[1] if found else ""


def without_part(name: str) -> tuple[str, int | None]:
    """Split ``name[part]`` into the name of the tensor and the number of the part, if there is one."""
    found = re.search(r"\[(\d{1,9})\]", name)
    return (name.replace(found[0], "", 1), int(found[1])) if found else (name, None)


def _pattern(text: str) -> re.Pattern[str]:
    escaped = re.escape(text).replace(r"\{\}", r"(\d+)").replace(r"\*", r"(.*)")
    return re.compile(rf"^{escaped}(?=\.|$)")


def _template(text: str) -> str:
    parts = re.split(r"\{\}|\*", text)
    return "".join(part + (rf"\g<{i}>" if i < len(parts) else "") for i, part in enumerate(parts, 1))


def depth(names: Iterable[str], pattern: str) -> int:
    """How many blocks the names count, for a pattern like ``encoder.layer.{}.``."""
    regex = re.compile(re.escape(pattern).replace(r"\{\}", r"(\d{1,6})"))
    found = [int(match.group(1)) for name in names if (match := regex.match(name))]
    return max(found, default=-1) + 1


# ── the authors' names ───────────────────────────────────────────────────────────────────────

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What files with more than one model, and those of ComfyUI, put before every name."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class OriginalModule:
    """The modules or tensors of ours that one of the authors' holds, in order."""

    parts: tuple[str, ...]
    rest: int | None = None
    """The part that has the rest of the rows, if the parts differ in size."""


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

    def sign(self, names: Iterable[str]) -> bool:
        """Whether these are the names of the family's own tensors, and not those of a relative."""
        modules = ((name, self.module(name)) for name in names)
        ours = {
            one for name, module in modules for one in (module.parts if module else (without_prefix(name),))
        }
        return ours >= set(self.family.signature)

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


def split_rows(names: OriginalNames, name: str, shapes: Shapes) -> list[tuple[str, slice | None]] | None:
    """Return the tensors of ours in a stored one, with the rows of each, or None for all; None if its name
    is unknown.
    """
    module = names.module(name)
    if module is None:
        return None
    if len(module.parts) == 1:
        return [(module.parts[0], None)]
    weight = shapes.get(f"{name.rpartition('.')[0]}.weight", ())
    rows, count = shapes[name][0] if shapes[name] else 0, len(module.parts)
    each = rows // count if module.rest is None else weight[1] if len(weight) > 1 else 0
    heights = [each] * count
    if module.rest is not None:
        heights[module.rest] = rows - (count - 1) * each
    if min(each, *heights) < 1 or sum(heights) != rows:
        raise ArchitectureError(
            f"{name} has {rows} rows, which cannot be divided among {' | '.join(module.parts)}",
            hint="is this the right file? the download may be incomplete",
        )
    ends = zip(module.parts, heights, accumulate(heights), strict=True)
    return [(part, slice(end - height, end)) for part, height, end in ends]


def tensors_in_memory(family: Family, shapes: Shapes) -> dict[str, list[tuple[str, slice | None]]]:
    """Return the tensors of ours that parameters of a live module hold, with the rows of each.

    A module of the user's own may have the names of its files. Those of libraries have none of them.
    """
    names = OriginalNames.of(family, shapes)
    found = {} if names is None else {name: split_rows(names, name, shapes) for name in shapes}
    return {name: tensors for name, tensors in found.items() if tensors}


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

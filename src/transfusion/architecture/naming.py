"""Names: translates the names that libraries give to a tensor into the table's name.

A checkpoint, a live module and an adapter may name the same tensor differently. Tables know one
name, the canonical one. Other names are translated when a model is opened; files keep their own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transfusion.architecture.table import Family
from transfusion.errors import ArchitectureError

WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")
"""Prefixes of distributed training, compilation and PEFT."""
_BLOCK = re.compile(r"(.*?(?:^|\.)\d+)\.")


class Naming:
    """Translates the names of one family."""

    def __init__(self, family: Family, *, live: bool = False) -> None:
        """``live`` names may be those of parts of a tensor that files keep whole."""
        self.family = family
        self.aliases = [
            (_pattern(other), _template(ours))
            for other, ours in family.aliases
            if live or "[" not in ours or "#" in ours
        ]

    def canonical(self, name: str) -> str:
        """Return the table's name of a tensor or module."""
        name = unwrapped(name)
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

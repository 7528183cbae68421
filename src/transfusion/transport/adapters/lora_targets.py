"""The modules of a LoRA file on a base, by every name that the base's family knows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TypeAlias

from transfusion.architecture.naming import without_part
from transfusion.architecture.original_names import OriginalNames
from transfusion.errors import AdapterError, listing
from transfusion.files.lora_keys import LoraKey
from transfusion.model.lora_recognition import Shapes, fitting_models
from transfusion.transport.adapters.adapter_targets import TargetWeight, TensorSlice

_BLOCK = re.compile(r"\{(?:last)?\}")
"""In the authors' names: the number of a block, or of the last block."""

Places: TypeAlias = tuple[TensorSlice, ...]
"""The tensors that a module is on a base, joined along their outputs; mostly one."""


class LoraTargets:
    """Finds the tensors of a base that the modules of a LoRA file change.

    Names that are joined with underscores are compared with all names of the base's modules. No name is
    taken apart at its underscores.
    """

    def __init__(self, place: TargetWeight) -> None:
        self._place = place

    def find(self, label: str, keys: Collection[LoraKey], base: str, shapes: Shapes) -> dict[str, Places]:
        """Return the places of every module, by its full name; refuse names that the base lacks."""
        modules = {one.owner: one for one in keys}
        found = {owner: self._places(label, one) for owner, one in modules.items()}
        if unknown := [owner for owner, places in found.items() if not places]:
            raise AdapterError(
                f"{label}: {len(unknown)} of {len(modules)} modules are not in {base}, a"
                f" {self._place.naming.family.name}: {listing(unknown)}",
                hint=f"the names are those of {' or '.join(fits)}; give such a base as `base`"
                if (fits := fitting_models(keys, shapes))
                else "give the base that the LoRA was trained on as `base`",
            )
        return {owner: places for owner, places in found.items() if places}

    def has(self, label: str, keys: Iterable[LoraKey]) -> bool:
        """Whether the base has all modules of these names."""
        return all(self._places(label, one) for one in keys)

    def _places(self, label: str, key: LoraKey) -> Places | None:
        if key.underscored:
            return self._by_underscores(label, key)
        if key.module in self._known:
            return self._known[key.module]
        place = self._place.weight_of(key.module)
        return (place,) if place.tensor in self._place.architecture.tensors else None

    def _by_underscores(self, label: str, key: LoraKey) -> Places | None:
        found = {self._known[name]: name for name in self._underscored.get(key.module, ())}
        if len(found) > 1:
            raise AdapterError(
                f"{label}: {key.owner} may be {listing(sorted(found.values()))}",
                hint="save the LoRA with points in the names of its modules, as diffusers does",
            )
        return next(iter(found), None)

    @cached_property
    def _underscored(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name in self._known:
            names.setdefault(name.replace(".", "_"), []).append(name)
        return names

    @cached_property
    def _known(self) -> dict[str, Places]:
        """The places of every module, by the table's name and by the authors' name, if it has another."""
        tensors = self._place.architecture.tensors
        ours = {name.removesuffix(".weight"): (TensorSlice(name),) for name in tensors}
        prefixed = {prefix + name: one for prefix in self._prefixes for name, one in ours.items()}
        return {**prefixed, **ours, **dict(self._originals(ours))}

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return self._place.naming.family.prefixes

    def _originals(self, ours: Mapping[str, Places]) -> Iterator[tuple[str, Places]]:
        for original, module in OriginalNames(self._place.naming.family).modules.items():
            for block in _blocks(without_part(module.parts[0])[0], ours):
                parts = (without_part(_in_block(part, block)) for part in module.parts)
                pieces = [(ours.get(name.removesuffix(".weight")), piece) for name, piece in parts]
                if all(found for found, _ in pieces):
                    places = (TensorSlice(found[0].tensor, piece) for found, piece in pieces if found)
                    yield _in_block(original, block), tuple(places)


def _blocks(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the numbers of the blocks that have a module; one empty number if it is in no block."""
    if "{" not in pattern:
        return [""]
    wanted = re.compile(r"(\d+)".join(map(re.escape, _BLOCK.split(pattern.removesuffix(".weight")))))
    blocks = sorted((found[1] for name in names if (found := wanted.fullmatch(name))), key=int)
    return blocks[-1:] if "{last}" in pattern else blocks


def _in_block(pattern: str, block: str) -> str:
    """Return a name with the number of a block."""
    return _BLOCK.sub(block, pattern)

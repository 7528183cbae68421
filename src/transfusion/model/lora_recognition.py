"""The models that a LoRA file may be for: by the names of its modules, by its shapes, and by its header."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from transfusion.architecture.naming import OriginalNames
from transfusion.architecture.table import Family
from transfusion.families import all_families
from transfusion.files.lora_keys import DENOISER, LoraKey

UNET = "unet"
"""The family of U-Nets, whose names have several numbers."""
_UNETS = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "Stable Diffusion XL"}
"""U-Nets, by the width of the text that their cross-attention reads."""
_UNET_NAMES = re.compile(
    r"(?:down_blocks|mid_block|up_blocks|input_blocks|middle_block|output_blocks)[._].+|(?:conv|time)_\w+"
)
_UNET_CLAIMS = ("sdxl", "sdv1", "sdv2", "sd1", "sd2", "stablediffusionxl", "stablediffusionv")
_CLAIMS = ("ss_base_model_version", "modelspec.architecture", "base_model_name_or_path", "ss_sd_model_name")
"""Entries of a header that name the base, the most general first."""
_LISTS = {"dual_attention_layers": [0], "all_patch_size": [2], "all_f_patch_size": [1]}
"""Settings of tables that are no numbers."""
_BLOCK = re.compile(r"\{[^}]*\}")
"""The number of a block in a pattern of names."""
_MOST = 0.5
"""The share of modules from which the names are those of a family."""

Shapes = Mapping[str, tuple[int, ...]]


class _AnySize(int):
    """A number where a table asks for one, and a list of numbers where it asks for an item."""

    def __getitem__(self, place: int) -> int:
        return self


class _AnySizes(dict[str, Any]):
    """A configuration for tables of which only the names are asked: any number will do."""

    def __missing__(self, key: str) -> _AnySize:
        return _AnySize(24)


def fitting_models(keys: Iterable[LoraKey], shapes: Shapes) -> list[str]:
    """Return the families whose modules have these names; several, if the names do not decide."""
    own = [one for one in keys if one.component == DENOISER]
    modules = {(one.module, one.underscored) for one in own}
    if not modules:
        return []
    shares = {name: _share(patterns, modules) for name, patterns in _patterns().items()}
    unet = sum(bool(_UNET_NAMES.fullmatch(module)) for module, _ in modules) / len(modules)
    best = max([unet, *shares.values()])
    if best < _MOST:
        return []
    found = [name for name, share in shares.items() if share == best]
    return found or [_unet(own, shapes)]


def claims(header: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of a header that name the base."""
    return {key: header[key] for key in _CLAIMS if header.get(key) not in (None, "", "None")}


def contradiction(header: Mapping[str, str], family: str) -> str | None:
    """Return an entry of the header that names a model of another family than the base's, if any."""
    others = [_plain(name) for name in _patterns() if name != family]
    others += [] if family == UNET else _UNET_CLAIMS
    for key, value in claims(header).items():
        if key not in _CLAIMS[:2]:  # a file may have any name
            continue
        claim = _plain(value)
        if not claim.startswith(_plain(family)) and claim.startswith(tuple(others)):
            return f"{value} ({key})"
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unet(keys: Iterable[LoraKey], shapes: Shapes) -> str:
    """Return which U-Net it is, by the width of the text that it reads."""
    for key in keys:
        if key.part == "lora_A" and re.search(r"attn2[._]to_k$", key.module):
            return _UNETS.get(shapes[key.key][1] if len(shapes[key.key]) > 1 else 0, UNET)
    return UNET


def _share(patterns: tuple[re.Pattern[str], re.Pattern[str]], modules: set[tuple[str, bool]]) -> float:
    dotted, underscored = patterns
    known = [bool((underscored if flat else dotted).fullmatch(module)) for module, flat in modules]
    return sum(known) / len(known)


@cache
def _patterns() -> dict[str, tuple[re.Pattern[str], re.Pattern[str]]]:
    """Return, for every family of diffusion models, its modules' names with points and with underscores."""
    found = {}
    for family in all_families():
        if family.library == "diffusers" and family.name != UNET:
            names = {*OriginalNames(family).modules, *_modules(family)}
            flat = {name.replace(".", "_") for name in names}
            found[family.name] = _any_of(names), _any_of(flat)
    return found


def _modules(family: Family) -> Iterator[str]:
    """Yield the names of the modules in a family's table, with ``{}`` for the number of a block."""
    table = family.table(_AnySizes(_LISTS), frozenset())
    for rows in (table.rows, *(stack.rows for stack in table.stacks)):
        for row in rows.strip().splitlines():
            yield re.sub(r"(\.\*|\.weight|\.bias)?\??$", "", row.split()[0])


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(r"\d+".join(map(re.escape, _BLOCK.split(name))) for name in sorted(names)))

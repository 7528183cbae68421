"""Recognition: which family a checkpoint belongs to, by its configuration or by its tensors' names."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from transfusion.architecture.binding import bind
from transfusion.architecture.config_schema import WRONG_FILE, require_sensible, settings_of
from transfusion.architecture.naming import Naming, OriginalNames
from transfusion.architecture.table import Config, Family, Shapes
from transfusion.errors import ArchitectureError, CheckpointError, LayoutError, listing
from transfusion.families import NO_CONFIG, all_families, family_of_component
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.lora_keys import DENOISER, LoraKey

CLASS_NAME = "_class_name"
"""The setting by which diffusers names a class."""


def recognise(checkpoint: Checkpoint) -> tuple[Family, Config, str]:
    """Return the family of a checkpoint, its configuration, and how the family was recognised."""
    if checkpoint.config is None:
        return _by_names(checkpoint)
    config = checkpoint.config
    family, why = declared_family(checkpoint)
    with _odd_tensors(checkpoint.label, family):
        return family, family.complete(config, _shapes(checkpoint, family)), why


def declared_family(checkpoint: Checkpoint) -> tuple[Family, str]:
    """Return the family that a configuration names, and the setting that names it; no tensor is needed."""
    config = checkpoint.config or {}
    _refuse_quantisation(checkpoint.label, config)
    require_sensible(config, f"{checkpoint.label}: {checkpoint.config_label}")
    kind, name, family = _by_config(config)
    if family is None:
        if name is None:
            raise ArchitectureError(
                f"{checkpoint.label}: {checkpoint.config_label} has no {kind}", hint=WRONG_FILE
            )
        nearest = _nearest_family(checkpoint, name)
        raise ArchitectureError(
            f"{checkpoint.label}: {name!r} is not supported."
            + (f" Nearest: {nearest}." if nearest else "")
            + " See docs/your-own.md",
            hint=f"of diffusers, there are tables for {listing(_of_diffusers(), 20)}"
            if kind == CLASS_NAME
            else "'transfusion inspect MODEL --propose' drafts a table for it",
        )
    _refuse_unknown_settings(checkpoint, family, config)
    return family, f'{checkpoint.config_label} says {kind} "{name}"'


def _by_config(config: Config) -> tuple[str, str | None, Family | None]:
    """Return the key that names the architecture, the name, and its family.

    timm names every size, and diffusers the class.
    """
    if CLASS_NAME in config and "model_type" not in config:
        name = config[CLASS_NAME]
        return CLASS_NAME, name, next((f for f in all_families() if name in f.model_types), None)
    if "architecture" in config and "model_type" not in config:
        name = config["architecture"]
        of_timm = (f for f in all_families() if f.library == "timm")
        return "architecture", name, next((f for f in of_timm if _one_of(name, f.model_types)), None)
    name = "open_clip" if "model_cfg" in config else config.get("model_type")
    return "model_type", name, next((f for f in all_families() if name in f.model_types), None)


def _of_diffusers() -> list[str]:
    return sorted(name for f in all_families() if f.library == "diffusers" for name in f.model_types)


def _nearest_family(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the family with most of its signature in a checkpoint, or else with the most similar name."""
    shares: list[tuple[float, int, str]] = []
    for family in all_families():
        if size := len(family.signature):
            there = len(_shapes(checkpoint, family).keys() & set(family.signature))
            shares.append((there / size, size, family.name))
    share, _, nearest = max(shares)
    if share > 0.5:
        return nearest
    called = {kind: family.name for family in all_families() for kind in family.model_types}
    return next((called[kind] for kind in get_close_matches(name, called, n=1, cutoff=0.75)), None)


def _one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shapes(checkpoint: Checkpoint, family: Family) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by canonical name."""
    naming = Naming(family, live=True)
    return {naming.canonical(name): info.shape for name, info in checkpoint.tensors.items()}


def _by_names(checkpoint: Checkpoint) -> tuple[Family, Config, str]:
    found: list[tuple[Family, dict[str, tuple[int, ...]]]] = []
    for family in all_families():
        shapes = _shapes(checkpoint, family)
        named = family.signature and all(name in shapes for name in family.signature)
        if named and _fits(family, shapes):
            found.append((family, shapes))
    found = [
        one for one in found if not any(set(one[0].signature) < set(other[0].signature) for other in found)
    ]
    if len(found) > 1:  # a part of this model, or a related family, may have no other names
        found = [(family, shapes) for family, shapes in found if _knows_all(family, shapes)] or found
    if len(found) != 1:
        raise ArchitectureError(
            f"{checkpoint.label}: no configuration, and the tensors' names belong to"
            + (f" several families: {listing(f.name for f, _ in found)}" if found else " no known family")
            + f" (for instance {listing(checkpoint.tensors, 3)})",
            hint=NO_CONFIG,
        )
    family, shapes = found[0]
    if family.from_shapes is None:
        raise ArchitectureError(
            f"{checkpoint.label}: a {family.name} by its tensors' names, but there is no configuration, and"
            " the number of attention heads does not follow from the shapes",
            hint=NO_CONFIG,
        )
    with _odd_tensors(checkpoint.label, family):
        return family, family.from_shapes(shapes), "the tensors' names and shapes; there is no config.json"


def _fits(family: Family, shapes: Shapes) -> bool:
    try:
        with _odd_tensors(family.name, family):
            return family.fits(shapes)
    except ArchitectureError:
        return False


def _knows_all(family: Family, shapes: Shapes) -> bool:
    """Whether a family's table, filled in from the shapes, describes every one of these tensors."""
    if family.from_shapes is None:
        return False
    try:
        with _odd_tensors(family.name, family):
            table = family.table(family.from_shapes(shapes), frozenset(shapes))
        bind(table, shapes, family.name)
    except (ArchitectureError, LayoutError):
        return False
    return True


@contextmanager
def _odd_tensors(label: str, family: Family) -> Iterator[None]:
    """Within the block, refuse tensors that are absent or have too few dimensions."""
    try:
        yield
    except (KeyError, IndexError, ValueError, ArithmeticError) as error:
        raise ArchitectureError(
            f"{label}: the tensors do not have the names and shapes of a {family.name} ({error})",
            hint="is this the right file? the download may be incomplete",
        ) from error


def _refuse_quantisation(label: str, config: Mapping[str, Any]) -> None:
    if quantisation := config.get("quantization_config"):
        method = (
            quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        )
        raise CheckpointError(
            f"{label}: the checkpoint is quantised ({method})",
            hint="quantised checkpoints cannot be moved; use the original weights",
        )


def _unknown_settings(family: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the settings that a table does not know; those of its components by their own tables."""
    for section, component in family.components.items():
        if isinstance(part := config.get(section), dict):
            whole = family_of_component(component, part, section)
            whole = replace(
                whole,
                known_keys=whole.known_keys | component.known_keys,
                required={**whole.required, **component.required},
            )
            yield from ((f"{section}.{key}", value) for key, value in _unknown_settings(whole, part))
    own = {key: value for key, value in config.items() if key not in family.components}
    for key, value in settings_of(own):
        leaf = key if key in family.known_keys else key.rsplit(".", 1)[-1]  # some keys have a dot
        if value not in family.required[leaf] if leaf in family.required else leaf not in family.known_keys:
            yield key, value


def _refuse_unknown_settings(checkpoint: Checkpoint, family: Family, config: Mapping[str, Any]) -> None:
    """Refuse settings that the table does not know: they may change the symmetries of the model."""
    unknown = [f"{key}={reprlib.repr(value)}" for key, value in _unknown_settings(family, config)]
    if unknown:
        raise ArchitectureError(
            f"{checkpoint.label}: {checkpoint.config_label} has settings that the {family.name} table"
            f" does not know: {listing(unknown)}",
            hint="they may change which units can be permuted; remove a key only if you know that it"
            " does not, or extend the table",
        )


# ── The models that a LoRA file may be for: by the names of its modules, by its s… ──────────────────


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

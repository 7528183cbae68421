"""LoRA files for image and video models, in the formats of kohya, diffusers, ComfyUI and LyCORIS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from transfusion.errors import AdapterError, CheckpointError, listing
from transfusion.files.checkpoint import CONFIGS, Checkpoint
from transfusion.files.lora_keys import DENOISER, LoraKey, format_of, is_lora, read_key, read_keys
from transfusion.files.references import resolve
from transfusion.files.tensor_files import FLOATS, PICKLES, TensorInfo, header_metadata, headers
from transfusion.model.model import Model
from transfusion.model.recognition import contradiction, fitting_models
from transfusion.runtime.untrusted_files import parse_json, require_closed
from transfusion.transport.adapters.adapter import Adapter, AdapterTensor
from transfusion.transport.adapters.conversions import MOST, ConvertedCheckpoint, Kronecker, kronecker_sides
from transfusion.transport.adapters.kinds import LORA, MAGNITUDE, MERGE, kind_in_file, refuse_odd_settings
from transfusion.transport.adapters.outputs import SINGLE, AdapterFiles
from transfusion.transport.adapters.places import Places
from transfusion.transport.adapters.settings import CONFIG, ModuleSettings, require_sensible
from transfusion.transport.record import HEADER

CONFIGURATION = "lora_adapter_metadata"
"""The entry of a header in which diffusers keeps PEFT's configuration, by component."""
_AGAIN = "the file is damaged or incomplete; download or save it again"
_INNER = ("lora_A", "hada_w1_b", "lokr_w1_b", "lokr_w2_b")
"""Parts whose first dimension is the rank of their module."""


class OtherParts(StrEnum):
    """What becomes of the parts of a LoRA that change another model than the base, such as a text encoder."""

    REFUSE = "refuse"
    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True)
class LoraFile(Adapter):
    """A LoRA in a single file; the names of its tensors and its header say all there is to know."""

    header: Mapping[str, str] = field(kw_only=True)
    others: OtherParts = field(default=OtherParts.REFUSE, kw_only=True)

    @cached_property
    def keys(self) -> Mapping[str, LoraKey]:
        return read_keys(self.label, self.checkpoint.tensors)

    @classmethod
    def of_file(cls, label: str, root: Path, file: Path, others: OtherParts) -> LoraFile:
        """Read the header of a file; refuse parts that cannot be moved. LoKr becomes LoRA."""
        checkpoint = Checkpoint(label, root, headers(file), (file,))
        found = cls(checkpoint, {}, LORA, header=header_metadata(file), others=others)
        found._require_movable()
        found._require_once()
        parts = {one.part for one in found.keys.values()}
        found = replace(found, config=found._configuration(), kind=kind_in_file(parts))
        return found._as_lora(MOST) if any(part.startswith("lokr") for part in parts) else found

    def to_merge(self) -> LoraFile:
        """Return the file as it becomes part of a model, which has no place for parts of other models."""
        merged = self if self.original is None else self.original._as_lora(None)
        assert isinstance(merged, LoraFile)
        return replace(merged, others=OtherParts.DROP) if self.others is OtherParts.KEEP else merged

    def _as_lora(self, most: int | None) -> LoraFile:
        """Return the file with LoRAs of at most this rank in place of its LoKr."""
        owners = {one.owner: one for one in self.keys.values() if one.part.startswith("lokr")}
        alphas = [key for key, one in self.keys.items() if one.part == "alpha" and one.owner in owners]
        modules = {}
        for owner, sides in kronecker_sides(self.checkpoint).items():
            one = Kronecker(sides, self.settings(owner).scale, most)
            kohya = owners[owner].format not in ("diffusers", "PEFT")
            modules[owner] = replace(one, endings=(".lora_down.weight", ".lora_up.weight")) if kohya else one
        rank = str(max(one.rank for one in modules.values()))
        now = {"ss_network_dim": rank, "ss_network_alpha": rank, "ss_network_module": "networks.lora"}
        header = {key: now.get(key, text) for key, text in self.header.items() if key != "ss_network_args"}
        checkpoint = ConvertedCheckpoint.over(self.checkpoint, modules, alphas)
        found = replace(self, checkpoint=checkpoint, header=header, original=self)
        found._require_once()
        return found

    @property
    def about(self) -> dict[str, Any]:
        return {"file_format": format_of(self.keys), **super().about}

    def other_base(self, base: Model) -> str | None:
        """Return what the header says about the base, if it names a diffusion model of another family."""
        family = base.family
        return contradiction(self.header, family.name) if family.library == "diffusers" else None

    @property
    def trained_on(self) -> str | None:
        """The name of the file or folder that it was trained on, if the header has it; None once moved."""
        return None if HEADER in self.header else self.header.get("ss_sd_model_name")

    def was_trained_on(self, onto: Model, base: Model) -> bool:
        """Whether the header names B, and not A: only names can be compared."""
        names = (self.trained_on or "", onto.label, base.label)
        trained, ours, theirs = (Path(one).name.removesuffix(SINGLE) for one in names)
        return trained == ours != theirs

    @property
    def files(self) -> AdapterFiles:
        return AdapterFiles(self.checkpoint.files[0].with_suffix(SINGLE).name, self.header)

    @property
    def drops_absent(self) -> bool:
        return self.others is OtherParts.DROP

    @property
    def components(self) -> set[str]:
        """The models that it changes."""
        return {one.component for one in self.keys.values()}

    @property
    def naming(self) -> frozenset[tuple[str, str]]:
        """The prefixes and endings of the names of all factors for the denoiser."""
        return frozenset(
            (one.prefix, one.key.removeprefix(one.owner))
            for one in self.keys.values()
            if one.component == DENOISER and one.part.startswith("lora_")
        )

    @property
    def _stated(self) -> Mapping[str, str]:
        return dict(self.header)

    def settings(self, module: str) -> ModuleSettings:
        return self._settings[module]

    @cached_property
    def _settings(self) -> dict[str, ModuleSettings]:
        """By module: its name in a configuration, its rank by the shapes of its factors, and its alpha."""
        modules: dict[str, dict[str, str]] = {}
        for key, one in self.keys.items():
            modules.setdefault(one.owner, {})[one.part] = key
        found = {}
        for owner, parts in modules.items():
            inner = next((parts[part] for part in _INNER if part in parts), None)
            rank = next(iter(self.checkpoint.tensors[inner].shape), None) if inner else None
            scaled = rank is not None and "alpha" in parts  # without a rank, nothing is scaled
            alpha = float(self.checkpoint.read_finite(parts["alpha"])) if scaled else None
            name = self.keys[next(iter(parts.values()))].module
            found[owner] = ModuleSettings(self.config, name, rank or 1, alpha)
        return found

    # ── on a base ────────────────────────────────────────────────────────────────────────────

    def _of_base(self, base: Model) -> list[str]:
        """Return the names of the tensors that change the base, and not another model."""
        diffusion = base.family.library == "diffusers"  # or else a text encoder
        own = {one for one in self.components if (one == DENOISER) == diffusion}
        if len(own) > 1:  # several text encoders: the one whose modules the base has
            places = self._places_on(base)
            keys = [one for one in self.keys.values() if one.component in own]
            lacking = {one.component for one in keys if not places.of_key(self.label, one)}
            own = own - lacking or own
        return [key for key, one in self.keys.items() if one.component in own]

    def _own(self, base: Model, places: Places) -> list[str]:
        own = self._of_base(base)
        if not own:
            raise self.error(
                f"all its tensors belong to other models than {base.label} ({self._listed_others(own)})",
                "give the model that the LoRA was trained on as `base`",
            )
        if len(own) < len(self.keys) and self.others is OtherParts.REFUSE:
            raise self.error(
                f"{len(own)} tensors are for the image or video model itself, and others for other models:"
                f" {self._listed_others(own)}",
                '`other_parts="keep"` keeps these as they are, `other_parts="drop"` leaves them out',
            )
        modules = {self.keys[key].owner: self.keys[key] for key in own}
        if unknown := [owner for owner, one in modules.items() if not places.of_key(self.label, one)]:
            shapes = {name: info.shape for name, info in self.checkpoint.tensors.items()}
            fits = fitting_models([self.keys[key] for key in own], shapes)
            raise self.error(
                f"{len(unknown)} of {len(modules)} modules are not in {base.label}, a {base.family.name}:"
                f" {listing(unknown)}",
                f"the names are those of {' or '.join(fits)}; give such a base as `base`"
                if fits
                else "give the base that the LoRA was trained on as `base`",
            )
        return own

    def kept(self, base: Model) -> list[str]:
        own = self._of_base(base)
        return [key for key in self.keys if key not in own] if self.others is OtherParts.KEEP else []

    def _factor(self, key: LoraKey, places: Places) -> AdapterTensor:
        spots, part = places.of_key(self.label, key), self.kind.parts[key.part]
        if places.architecture.tensors[spots[0].tensor].arrow is None:
            part = replace(part, rigid=True)  # the vector of a norm, or of a scale
        return self._on_places(key, part, spots, places)

    def notes(self, base: Model) -> list[str]:
        found, others = super().notes(base), self._listed_others(self._of_base(base))
        if others:
            what = "are kept as they are" if self.others is OtherParts.KEEP else "are left out"
            found.append(f"tensors for other models {what}: {others}")
        return found

    def _listed_others(self, own: Collection[str]) -> str:
        others = Counter(one.component for key, one in self.keys.items() if key not in own)
        return listing(f"{count} of {name}" for name, count in others.items())

    # ── refusals ─────────────────────────────────────────────────────────────────────────────

    def _require_movable(self) -> None:
        """Refuse kinds that cannot be moved, an alpha that is not one number, and odd types and shapes."""
        for key, one in self.keys.items():
            shape, dtype = self.checkpoint.tensors[key].shape, self.checkpoint.tensors[key].dtype
            if one.refused:
                count = sum(other.kind == one.kind for other in self.keys.values())
                raise self.error(
                    f"{count} tensor(s) of kind {one.kind}, such as {key:.120}, cannot be moved:"
                    f" {one.refused}",
                    MERGE,
                )
            if one.part == "alpha" and shape not in ((), (1,)):
                raise self.error(f"{key} has shape {shape}, and alpha is one number", _AGAIN)
            if 0 in shape:
                raise self.error(f"{key} has shape {shape}, and is empty", _AGAIN)
            if one.part != "alpha" and dtype not in FLOATS:
                raise self.error(
                    f"{key} is stored as {str(dtype).removeprefix('torch.')}, which cannot be moved",
                    "save the LoRA as float16, bfloat16 or float32",
                )

    def _require_once(self) -> None:
        """Refuse two tensors for one part of a module, and an alpha without factors."""
        seen: dict[tuple[str, str], str] = {}
        for key, one in self.keys.items():
            first = seen.setdefault((one.owner, one.part), key)
            if first != key:
                raise self.error(f"{first} and {key} are the same part of {one.owner}", _AGAIN)
        changed = {owner for owner, part in seen if part != "alpha"}
        if alone := [owner for owner, part in seen if owner not in changed]:
            raise self.error(f"alpha without factors: {listing(alone)}", _AGAIN)

    def _configuration(self) -> dict[str, Any]:
        """Return PEFT's configuration of the denoiser, if diffusers put it into the header."""
        where = f"{self.label}: {CONFIGURATION} in its header"
        if (text := self.header.get(CONFIGURATION)) is None:
            return {}
        found = parse_json(text, where, AdapterError)
        if not isinstance(found, dict):
            raise AdapterError(f"{where}: a JSON object was expected", hint=_AGAIN)
        beginnings = {one.prefix for one in self.keys.values() if one.component == DENOISER}
        config = {
            key.removeprefix(prefix): value
            for prefix in sorted(beginnings)
            for key, value in found.items()
            if prefix and key.startswith(prefix)
        }
        require_sensible(where, config)
        refuse_odd_settings(self.label, LORA, config)
        if config.get("use_dora") and not any(one.part == MAGNITUDE for one in self.keys.values()):
            raise AdapterError(f"{where} says that it is a DoRA, and the file has no magnitudes", hint=_AGAIN)
        return config


# ── opening ──────────────────────────────────────────────────────────────────────────────────

_FILES = PICKLES | {".safetensors"}
_DIFFUSERS = "pytorch_lora_weights"  # the name of the file that diffusers writes, without its ending
_PEFT = "base_model.model."


def is_adapter(reference: str | Path) -> bool:
    """Whether a reference is an adapter's folder, local or on the hub, or a LoRA file."""
    root = resolve(reference)
    return (root / CONFIG).exists() or lora_file_in(root) is not None


def open_adapter(reference: str | Path, others: OtherParts | str = OtherParts.REFUSE) -> Adapter:
    """Read the headers of an adapter; refuse kinds that cannot be moved. A LoKr becomes a LoRA.

    ``others`` says what becomes of the parts of a LoRA file that belong to another model than the base.
    """
    root = resolve(reference)
    if (file := lora_file_in(root)) is None:
        return Adapter.open(reference)
    return LoraFile.of_file(str(reference), root, file, OtherParts(others))


def lora_file_in(root: Path) -> Path | None:
    """Return the LoRA file that a path is, or that its folder holds; None if there is none."""
    file = root if root.is_file() else _only_file(root) if root.is_dir() else None
    if file is None or file.suffix not in _FILES:
        return None
    try:
        names = headers(file)
    except CheckpointError:
        return None  # opened as a model, it is refused with the reason
    if not is_lora(names):
        return None
    of_peft = any(name.startswith(_PEFT) for name in names)
    return None if of_peft and not _is_for_images(file, names) else file


def _is_for_images(file: Path, names: Mapping[str, TensorInfo]) -> bool:
    """Whether a file with PEFT's names, as ai-toolkit writes some, is whole without a configuration."""
    keys = [one for one in map(read_key, names) if one is not None]
    alone = not (file.parent / CONFIG).exists()
    return alone and bool(fitting_models(keys, {name: info.shape for name, info in names.items()}))


def _only_file(folder: Path) -> Path | None:
    """Return the file of diffusers, or the only file with weights in a folder that is no model's."""
    if any((folder / name).exists() for name in (CONFIG, *CONFIGS)):
        return None
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _FILES]
    named = [path for path in files if path.stem == _DIFFUSERS]
    if named or len(files) == 1:
        require_closed(folder)
        return (named or files)[0]
    return None

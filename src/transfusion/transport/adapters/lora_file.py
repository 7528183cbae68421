"""LoRA files for image and video models, in the formats of kohya, diffusers, ComfyUI and LyCORIS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from transfusion.errors import AdapterError, CheckpointError, listing
from transfusion.files.checkpoint import CONFIGS, Checkpoint
from transfusion.files.lora_keys import DENOISER, LoraKey, format_of, is_lora, read_keys, require_movable
from transfusion.files.references import PICKLES, resolve
from transfusion.files.tensor_files import FLOATS, TensorInfo, header_metadata, headers
from transfusion.model.model import Model
from transfusion.model.recognition import contradiction
from transfusion.runtime.untrusted_files import parse_json, require_closed
from transfusion.transport.adapters.adapter import SINGLE, Adapter, AdapterFiles
from transfusion.transport.adapters.checks import refuse_odd_settings
from transfusion.transport.adapters.kinds import LORA, kind_in_file
from transfusion.transport.adapters.kronecker import MOST, Kronecker, as_lora, kronecker_parts
from transfusion.transport.adapters.settings import CONFIG, ModuleSettings, require_sensible
from transfusion.transport.adapters.targets import AdapterTensor, LoraTargets, Places, TargetWeight
from transfusion.transport.record import HEADER

CONFIGURATION = "lora_adapter_metadata"
"""The entry of a header in which diffusers keeps PEFT's configuration, by component."""
_AGAIN = "the file is damaged or incomplete; download or save it again"


class OtherParts(StrEnum):
    """What becomes of the parts of a LoRA that change another model than the base, such as a text encoder."""

    REFUSE = "refuse"
    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True)
class LoraModuleSettings(ModuleSettings):
    """The settings of one module: its alpha / rank, or the configuration in the header."""

    stored_rank: int = 1
    stored_alpha: float | None = None

    @property
    def rank(self) -> int:
        return self.stored_rank

    @property
    def lora_scale(self) -> float:
        if self.stored_alpha is not None:
            return self.stored_alpha / self.stored_rank
        return super().lora_scale if self.config else 1.0

    @property
    def loha_scale(self) -> float:
        return 1.0 if self.stored_alpha is None else self.stored_alpha / self.stored_rank


@dataclass(frozen=True)
class LoraFile(Adapter):
    """A LoRA in a single file; the names of its tensors and its header say all there is to know."""

    keys: Mapping[str, LoraKey] = field(kw_only=True)
    header: Mapping[str, str] = field(kw_only=True)
    others: OtherParts = field(default=OtherParts.REFUSE, kw_only=True)

    @classmethod
    def of_file(
        cls,
        label: str,
        root: Path,
        file: Path,
        others: OtherParts = OtherParts.REFUSE,
        *,
        exact: bool = False,
    ) -> LoraFile:
        """Read the header of a file; refuse parts that cannot be moved. LoKr becomes LoRA."""
        tensors, header = headers(file), header_metadata(file)
        keys = read_keys(label, tensors)
        require_movable(label, keys)
        _require_once(label, keys)
        _require_numbers(label, keys, tensors)
        config = _configuration(label, header, keys)
        kind = kind_in_file({one.part for one in keys.values()})
        checkpoint = Checkpoint(label, root, tensors, (file,))
        found = cls(checkpoint, config, kind, keys=keys, header=header, others=others)
        return found._as_lora(None if exact else MOST) if _has_lokr(keys) else found

    def _as_lora(self, most: int | None) -> LoraFile:
        """Return the file with LoRAs of at most this rank in place of its LoKr."""
        owners = {one.owner: one for one in self.keys.values() if one.part.startswith("lokr")}
        alphas = [key for key, one in self.keys.items() if one.part == "alpha" and one.owner in owners]
        modules = {}
        for owner, parts in kronecker_parts(self.checkpoint).items():
            inner = next((parts[name].shape[0] for name in ("w1_b", "w2_b") if name in parts), None)
            scale = self._alphas.get(owner, inner) / inner if inner else 1.0
            one = Kronecker(parts, scale, most)
            kohya = owners[owner].format not in ("diffusers", "PEFT")
            modules[owner] = replace(one, endings=(".lora_down.weight", ".lora_up.weight")) if kohya else one
        checkpoint = as_lora(self.checkpoint, modules, alphas)
        keys = read_keys(self.label, checkpoint.tensors)
        _require_once(self.label, keys)
        rank = str(max(checkpoint.ranks.values()))
        now = {"ss_network_dim": rank, "ss_network_alpha": rank, "ss_network_module": "networks.lora"}
        header = {key: now.get(key, text) for key, text in self.header.items() if key != "ss_network_args"}
        kind = kind_in_file({one.part for one in keys.values()})
        return replace(self, checkpoint=checkpoint, kind=kind, keys=keys, header=header, original=self)

    @property
    def format(self) -> str:
        """The program whose names it uses."""
        return format_of(self.keys)

    @property
    def stated_format(self) -> dict[str, str]:
        return {"file_format": self.format}

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
    def components(self) -> set[str]:
        """The models that it changes."""
        return {one.component for one in self.keys.values()}

    @property
    def naming(self) -> frozenset[tuple[str, str]]:
        """The prefixes and endings of the names of all factors for the denoiser."""
        own = (
            one for one in self.keys.values() if one.component == DENOISER and one.part.startswith("lora_")
        )
        return frozenset((one.prefix, one.key.removeprefix(one.owner)) for one in own)

    @property
    def _stated(self) -> Mapping[str, str]:
        return dict(self.header)

    def settings(self, module: str) -> ModuleSettings:
        name, rank, alpha = self._modules[module], self._ranks.get(module, 1), self._alphas.get(module)
        return LoraModuleSettings(self.config, name, rank, alpha)

    @cached_property
    def _modules(self) -> dict[str, str]:
        """The name of every module without its prefix, as a configuration has it."""
        return {one.owner: one.module for one in self.keys.values()}

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """The rank of every module, from the shapes of its factors."""
        tensors = self.checkpoint.tensors
        return {
            one.owner: tensors[key].shape[0]
            for key, one in self.keys.items()
            if one.part in ("lora_A", "hada_w1_b") and tensors[key].shape
        }

    @cached_property
    def _alphas(self) -> dict[str, float]:
        """The alpha of every module that has one."""
        alphas = {one.owner: key for key, one in self.keys.items() if one.part == "alpha"}
        return {owner: float(self.checkpoint.read_finite(key)) for owner, key in alphas.items()}

    # ── on a base ────────────────────────────────────────────────────────────────────────────

    def _own(self, base: Model) -> dict[str, LoraKey]:
        """Return the names of the tensors that change the base, and not another model."""
        own = {one for one in self.components if _belongs(one, base)}
        if len(own) > 1:  # several text encoders: the one whose modules the base has
            targets = LoraTargets(self._place_on(base))
            own = {one for one in own if targets.has(self.label, self._of_component(one))} or own
        return {key: one for key, one in self.keys.items() if one.component in own}

    def _of_component(self, component: str) -> list[LoraKey]:
        return [one for one in self.keys.values() if one.component == component]

    def kept(self, base: Model) -> list[str]:
        own = self._own(base)
        return [key for key in self.keys if key not in own] if self.others is OtherParts.KEEP else []

    def factors(self, base: Model) -> list[AdapterTensor]:
        own = self._own(base)
        if not own or (len(own) < len(self.keys) and self.others is OtherParts.REFUSE):
            self._refuse_others(own, base)
        place = self._place_on(base)
        shapes = {name: info.shape for name, info in self.checkpoint.tensors.items()}
        places = LoraTargets(place).find(self.label, own.values(), base.label, shapes)
        found = [self._of(key, places[key.owner], place) for key in own.values()]
        return self._checked(found, base, place)

    def _of(self, key: LoraKey, places: Places, place: TargetWeight) -> AdapterTensor:
        part = self.kind.part(key.part)
        assert part is not None, "every ending is a part of the kind, or refused"
        if place.architecture.tensors[places[0].tensor].arrow is None:
            part = replace(part, rigid=True)  # the vector of a norm, or of a scale
        return self._on_places(key.key, part, key.owner, places, place)

    def _wholes(self, base: Model) -> dict[str, tuple[int, ...]]:
        return {}

    def notes(self, base: Model) -> list[str]:
        found, others = super().notes(base), self._listed_others(self._own(base))
        if others:
            what = "are kept as they are" if self.others is OtherParts.KEEP else "are left out"
            found.append(f"tensors for other models {what}: {others}")
        return found

    def _listed_others(self, own: Mapping[str, LoraKey]) -> str:
        others = Counter(one.component for key, one in self.keys.items() if key not in own)
        return listing(f"{count} of {name}" for name, count in others.items())

    def _refuse_others(self, own: Mapping[str, LoraKey], base: Model) -> None:
        shown = self._listed_others(own)
        if not own:
            raise AdapterError(
                f"{self.label}: all its tensors belong to other models than {base.label} ({shown})",
                hint="give the model that the LoRA was trained on as `base`",
            )
        raise AdapterError(
            f"{self.label}: {len(own)} tensors are for the image or video model itself, and others for other"
            f" models: {shown}",
            hint='`other_parts="keep"` keeps these as they are, `other_parts="drop"` leaves them out',
        )


def _belongs(component: str, base: Model) -> bool:
    """Whether a component is the model that is given: a diffusion model, or else a text encoder."""
    return (component == DENOISER) == (base.family.library == "diffusers")


def _has_lokr(keys: Mapping[str, LoraKey]) -> bool:
    return any(one.part.startswith("lokr") for one in keys.values())


def _require_once(label: str, keys: Mapping[str, LoraKey]) -> None:
    """Refuse two tensors for one part of a module, and an alpha without factors."""
    seen: dict[tuple[str, str], str] = {}
    for key, one in keys.items():
        first = seen.setdefault((one.owner, one.part), key)
        if first != key:
            raise AdapterError(f"{label}: {first} and {key} are the same part of {one.owner}", hint=_AGAIN)
    changed = {owner for owner, part in seen if part != "alpha"}
    if alone := [owner for owner, part in seen if owner not in changed]:
        raise AdapterError(f"{label}: alpha without factors: {listing(alone)}", hint=_AGAIN)


def _require_numbers(label: str, keys: Mapping[str, LoraKey], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse an alpha that is not one number, empty factors, and factors in a type that cannot be moved."""
    for key, one in keys.items():
        shape, dtype = tensors[key].shape, tensors[key].dtype
        if one.part == "alpha" and shape not in ((), (1,)):
            raise AdapterError(f"{label}: {key} has shape {shape}, and alpha is one number", hint=_AGAIN)
        if 0 in shape:
            raise AdapterError(f"{label}: {key} has shape {shape}, and is empty", hint=_AGAIN)
        if one.part != "alpha" and dtype not in FLOATS:
            raise AdapterError(
                f"{label}: {key} is stored as {str(dtype).removeprefix('torch.')}, which cannot be moved",
                hint="save the LoRA as float16, bfloat16 or float32",
            )


def _configuration(label: str, header: Mapping[str, str], keys: Mapping[str, LoraKey]) -> dict[str, Any]:
    """Return PEFT's configuration of the denoiser, if diffusers put it into the header."""
    where = f"{label}: {CONFIGURATION} in its header"
    if (text := header.get(CONFIGURATION)) is None:
        return {}
    found = parse_json(text, where, AdapterError)
    if not isinstance(found, dict):
        raise AdapterError(f"{where}: a JSON object was expected", hint=_AGAIN)
    beginnings = {one.prefix for one in keys.values() if one.component == DENOISER}
    config = {
        key.removeprefix(prefix): value
        for prefix in sorted(beginnings)
        for key, value in found.items()
        if prefix and key.startswith(prefix)
    }
    require_sensible(where, config)
    refuse_odd_settings(label, LORA, config)
    if config.get("use_dora") and not any(one.part == "lora_magnitude_vector" for one in keys.values()):
        raise AdapterError(f"{where} says that it is a DoRA, and the file has no magnitudes", hint=_AGAIN)
    return config


# ── opening ─────────────────────────────────────────────────────────────────────────────────────


_FILES = PICKLES | {".safetensors"}
_DIFFUSERS = "pytorch_lora_weights"
"""The name of the file that diffusers writes, without its ending."""
_PEFT = "base_model.model."


def is_adapter(reference: str | Path) -> bool:
    """Whether a reference is an adapter's folder, local or on the hub, or a LoRA file."""
    root = resolve(reference)
    return (root / CONFIG).exists() or lora_file_in(root) is not None


def open_adapter(
    reference: str | Path, others: OtherParts | str = OtherParts.REFUSE, *, exact: bool = False
) -> Adapter:
    """Read the headers of an adapter; refuse kinds that cannot be moved.

    ``others`` says what becomes of the parts of a LoRA file that belong to another model than the base. A
    LoKr becomes a LoRA: of full rank if ``exact``.
    """
    root = resolve(reference)
    file = None if (root / CONFIG).exists() else lora_file_in(root)
    if file is None:
        return Adapter.open(reference, exact=exact)
    return LoraFile.of_file(str(reference), root, file, OtherParts(others), exact=exact)


def is_lora_file(reference: str | Path) -> bool:
    """Whether a reference is a LoRA file, or a folder that holds one and no configuration."""
    root = resolve(reference)
    return not (root / CONFIG).exists() and lora_file_in(root) is not None


def lora_file_in(root: Path) -> Path | None:
    """Return the LoRA file that a path is, or that its folder holds; None if there is none."""
    file = root if root.is_file() else _only_file(root) if root.is_dir() else None
    if file is None or file.suffix not in _FILES:
        return None
    try:
        names = headers(file)
    except CheckpointError:
        return None  # opened as a model, it is refused with the reason
    return file if is_lora(names) and not any(name.startswith(_PEFT) for name in names) else None


def _only_file(folder: Path) -> Path | None:
    """Return the file of diffusers, or the only file with weights in a folder that is no model's."""
    if any((folder / name).exists() for name in CONFIGS):
        return None
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _FILES]
    named = [path for path in files if path.stem == _DIFFUSERS]
    if named or len(files) == 1:
        require_closed(folder)
        return (named or files)[0]
    return None

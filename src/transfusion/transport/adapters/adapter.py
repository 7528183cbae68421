"""Adapters: their files, and the layout of every stored tensor on a base."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import save
from torch import Tensor

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.binding import bind
from transfusion.architecture.layouts import ANONYMOUS, Layout, Name, size_of
from transfusion.architecture.naming import Naming, unwrapped
from transfusion.architecture.table import Table
from transfusion.errors import AdapterError, CheckpointError, OutputError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.publishing import write_json, write_text
from transfusion.files.references import resolve
from transfusion.files.staging import StagingFolder
from transfusion.files.tensor_files import FLOATS, headers
from transfusion.files.writing import LazyTensor, write_shard
from transfusion.model.model import Model
from transfusion.runtime.run_record import shareable_path, shareable_text
from transfusion.runtime.untrusted_files import read_json, require_closed
from transfusion.transport.adapters.checks import (
    movable_kind,
    refuse_odd_settings,
    require_biases,
    require_exchangeable,
    require_targets,
    require_tokens,
    require_whole,
)
from transfusion.transport.adapters.classes import class_for
from transfusion.transport.adapters.kinds import (
    LORA,
    PROMPT,
    WHOLE,
    AdapterKind,
    AdapterPart,
    WeightReference,
)
from transfusion.transport.adapters.kronecker import (
    LOKR,
    MOST,
    Kronecker,
    KroneckerCheckpoint,
    as_lora,
    kronecker_parts,
    lora_config,
)
from transfusion.transport.adapters.settings import CONFIG, WEIGHTS, ModuleSettings, require_sensible
from transfusion.transport.adapters.targets import (
    AdapterTensor,
    TargetWeight,
    TensorSlice,
    joined_layout,
    prompt_layout,
)
from transfusion.transport.output import Output
from transfusion.transport.record import HEADER

SINGLE = ".safetensors"
HASHES = ("sshs_model_hash", "sshs_legacy_hash")
"""Hashes of the file that kohya's programs keep in its header."""
_STALE = "modelspec.hash_sha256"
"""An entry of a header that is false for other tensors."""


@dataclass(frozen=True)
class AdapterFiles:
    """How an adapter is stored: PEFT's folder, or a LoRA file whose header says how it was made."""

    lora: str | None = None
    """The name of the LoRA file in a folder; None for PEFT's files."""
    header: Mapping[str, str] = field(default_factory=dict)
    """The header of the LoRA before it was moved."""

    def require_path(self, path: Path) -> None:
        """Refuse a path that cannot hold these files."""
        if self.lora is None and path.suffix == SINGLE:
            raise OutputError(
                f"{path}: an adapter is a folder with a configuration and weights",
                hint="give a name without .safetensors",
            )

    def write(self, staging: StagingFolder, tensors: Mapping[str, Tensor], output: Output) -> None:
        """Write all files into a staging folder."""
        metadata, single = output.metadata(), staging.path.suffix == SINGLE
        if self.lora is None:
            write_shard(staging.output / WEIGHTS[0], _lazy(tensors))
            write_json(staging.output / CONFIG, output.config or {})
        else:
            ordered = dict(sorted(tensors.items()))
            header = {**self._kept(ordered), HEADER: json.dumps(_shareable(metadata), ensure_ascii=False)}
            name = staging.path.name if single else self.lora
            write_shard(staging.output / name, _lazy(ordered), metadata=header)
        if not single:
            for name, text in output.texts(metadata).items():
                write_text(staging.output / name, text)

    def _kept(self, tensors: dict[str, Tensor]) -> dict[str, str]:
        """Return the entries of the header, with the hashes of the new tensors."""
        kept = {key: value for key, value in self.header.items() if key not in (_STALE, HEADER)}
        if any(key in kept for key in HASHES):
            kept |= {key: one for key, one in _hashes(tensors, kept).items() if key in kept}
        return kept or {"format": "pt"}


def _hashes(tensors: dict[str, Tensor], header: Mapping[str, str]) -> dict[str, str]:
    """Return kohya's two hashes: of the bytes after the header, and of 64 kB that begin at 1 MB.

    They are those of a file whose header has only the entries that begin with ``ss_``.
    """
    whole = save(tensors, {key: value for key, value in header.items() if key.startswith("ss_")})
    start = 8 + int.from_bytes(whole[:8], "little")
    model = hashlib.sha256(memoryview(whole)[start:]).hexdigest()
    legacy = hashlib.sha256(whole[0x100000 : 0x100000 + 0x10000]).hexdigest()[:8]
    return dict(zip(HASHES, (model, legacy), strict=True))


def _shareable(value: Any) -> Any:
    """Return metadata without absolute paths: LoRA files are passed on."""
    if isinstance(value, Mapping):
        return {key: _shareable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shareable(one) for one in value]
    return shareable_text(shareable_path(value)) if isinstance(value, str) else value


def _lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}


# ── adapters ────────────────────────────────────────────────────────────────────────────────────


_BOTH = "the configuration and the weights belong to different adapters; download both again"
_REPLACED = ".original_module."
"""In a key: a module of the base that one of `modules_to_save` replaces. PEFT stores it without using it."""
LABEL = "label"
"""The name in tables for the axis of a task head with one unit per label."""


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk: its files, its configuration and its kind."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    kind: AdapterKind
    original: Adapter | None = None
    """The adapter as it is stored, if this one is of another kind or in another vocabulary."""

    @property
    def label(self) -> str:
        return self.checkpoint.label

    @property
    def files(self) -> AdapterFiles:
        """How it is stored, and will be when it has been moved."""
        return AdapterFiles()

    @property
    def stated_format(self) -> dict[str, str]:
        """The format of a LoRA file, for the metadata; nothing for PEFT's."""
        return {}

    @classmethod
    def open(cls, reference: str | Path, *, exact: bool = False) -> Adapter:
        """Read the headers of an adapter; refuse kinds that cannot be moved.

        A LoKr becomes a LoRA: of full rank if ``exact``.
        """
        root = resolve(reference)
        config = read_json(require_closed(root) / CONFIG)
        require_sensible(str(reference), config)
        kind = movable_kind(str(reference), config)
        refuse_odd_settings(str(reference), kind, config)
        file = next((root / name for name in WEIGHTS if (root / name).exists()), None)
        if file is None:
            raise CheckpointError(
                f"{root}: {CONFIG} without {listing(WEIGHTS)}", hint="download the adapter's weights too"
            )
        tensors = headers(file)
        if odd := [name for name, info in tensors.items() if info.dtype not in FLOATS]:
            raise AdapterError(
                f"{reference}: {listing(odd)} is stored in a type that cannot be moved",
                hint="save the adapter as float16, bfloat16 or float32",
            )
        found = cls(Checkpoint(str(reference), root, tensors, (file,)), config, kind)
        return found._as_lora(None if exact else MOST) if kind.name == LOKR else found

    def _as_lora(self, most: int | None) -> Adapter:
        """Return a LoKr as a LoRA of at most this rank."""
        modules = {
            owner: Kronecker(parts, self.settings(unwrapped(owner)).loha_scale, most)
            for owner, parts in kronecker_parts(self.checkpoint).items()
        }
        if not modules:
            raise AdapterError(f"{self.label}: the file has no tensor of a LOKR adapter", hint=_BOTH)
        config = lora_config(self.config, {unwrapped(owner): one.rank for owner, one in modules.items()})
        return replace(
            self, checkpoint=as_lora(self.checkpoint, modules), config=config, kind=LORA, original=self
        )

    @property
    def converted(self) -> dict[str, Any]:
        """What a kind that cannot move became, for records; empty if it is the stored kind."""
        return self.checkpoint.about if isinstance(self.checkpoint, KroneckerCheckpoint) else {}

    def settings(self, module: str) -> ModuleSettings:
        """Return the settings for one module."""
        return ModuleSettings(self.config, module)

    def read(self, factor: AdapterTensor) -> Tensor:
        """Read one stored tensor, or its stack; refuse NaN and infinite values."""
        if factor.stack:
            return torch.stack([self.checkpoint.read_finite(key) for key in factor.stack])
        return self.checkpoint.read_finite(factor.key)

    def notes(self, base: Model) -> list[str]:
        """Return warnings about an adapter on this base."""
        name, _, revision = base.label.partition("@")
        trained = self.config.get("revision")
        same = self.config.get("base_model_name_or_path") == name
        found = []
        if about := self.converted:
            share = "all" if about["kept"] == 1 else f"at least {about['kept']:.1%}"
            found.append(
                f"{self.label} is a LoKr, and becomes a LoRA of rank {about['rank']}, which holds {share} of"
                " the change of every module; `full=True` merges all of it into the model"
            )
        if same and revision and trained and trained != revision:
            found.append(
                f"{self.label} was trained on revision {trained} of {name}, and the base is {revision}"
            )
        return found

    @cached_property
    def modules(self) -> list[str]:
        """The modules whose weights it changes by factors, in PEFT's names."""
        matches = map(self._keys.fullmatch, self.checkpoint.tensors)
        return sorted({unwrapped(match["module"]) for match in matches if match})

    @property
    def fingerprint(self) -> str:
        """A hash of the settings, and of the name, type, shape and a fixed sample of every tensor."""
        if self.original is not None:
            return self.original.fingerprint
        total = blake3(json.dumps(self._stated, sort_keys=True, default=str).encode())
        for key, info in sorted(self.checkpoint.tensors.items()):
            total.update(f"{key} {info.dtype} {info.shape} ".encode() + self.checkpoint.sample([key]))
        return total.hexdigest()

    @property
    def _stated(self) -> Mapping[str, Any]:
        """The settings that the fingerprint covers."""
        return self.config

    # ── on a base ────────────────────────────────────────────────────────────────────────────

    def factors(self, base: Model) -> list[AdapterTensor]:
        """Return every stored tensor with its layout on a base; refuse an adapter that does not fit."""
        place = self._place_on(base)
        keys = [key for key in self.checkpoint.tensors if _REPLACED not in key]
        return self._checked(self._stacked([self._factor(key, place) for key in keys], place), base, place)

    def kept(self, base: Model) -> list[str]:
        """Return the names of stored tensors that do not change the base, and stay as they are."""
        return [key for key in self.checkpoint.tensors if _REPLACED in key]

    def _checked(self, found: list[AdapterTensor], base: Model, place: TargetWeight) -> list[AdapterTensor]:
        """Return the stored tensors; refuse missing parts, ranks that disagree, and wrong shapes."""
        require_whole(self.label, self.kind, self.config, found)
        require_biases(self.label, found, base.names)
        require_targets(
            self.label, self.config, found, [*base.architecture.backbone, *base.checkpoint.tensors]
        )
        for factor in found:
            self._require_fit(factor, place.architecture)
            if isinstance(self.checkpoint, KroneckerCheckpoint) and factor.places:
                dims = len(base.info(factor.places[0].tensor).shape)
                self.checkpoint.require_kernel(factor.key, dims)
        return found

    @cached_property
    def _keys(self) -> re.Pattern[str]:
        """The pattern of the keys of the kind's parts."""
        names = "|".join(part.name for part in self.kind.parts if "." not in part.name) or "(?!)"
        return re.compile(
            rf"(?P<module>.+?)\.(token_adapter\.)?(?P<part>{names})(\.default)?(\.(?P<leaf>weight|bias))?"
        )

    def _place_on(self, base: Model) -> TargetWeight:
        """Return the base's architecture with the adapter's own heads and its prompt."""
        table, bound = self._bound_on(base)
        if self.kind.prompt:
            layout = prompt_layout(self.kind.name, self.config, bound)
            bound = replace(bound, tensors={**bound.tensors, PROMPT: layout})
        naming = Naming(base.family, live=True)
        return TargetWeight(naming, bound.under(base.architecture.policy), table.ties)

    def _bound_on(self, base: Model) -> tuple[Table, Architecture]:
        """Return the table for a model of the adapter's class, bound to the shapes of base and adapter."""
        own, shapes = self._wholes(base), {name: base.info(name).shape for name in base.names}
        if new := {name for name, shape in own.items() if shapes.get(name) != shape}:
            shapes = {name: one for name, one in shapes.items() if name in own or not _labels(base, name)}
        name = class_for(self.config, base.config) if new else None
        config = {**base.config, "architectures": [name]} if name else base.config
        table = base.family.table(config, frozenset({*shapes, *own}))
        return table, bind(table, {**shapes, **own}, base.family.name)

    def _wholes(self, base: Model) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that are stored as a whole, by canonical name."""
        naming = Naming(base.family, live=True)
        return {
            naming.canonical(self._plain(key)): info.shape
            for key, info in self.checkpoint.tensors.items()
            if not (self._keys.fullmatch(key) or self._is_prompt(key) or _REPLACED in key)
        }

    def read_through(self, base: Model, own: Iterable[str]) -> frozenset[str]:
        """Return the head tensors of the base that the adapter's own heads read through, such as a pooler."""
        _, bound = self._bound_on(base)
        layouts = {name: bound.tensors[name] for name in bound.heads if name not in own}
        read = {axis for name in own for axis in _axes(bound.tensors[name], bound.tensors[name].inputs)}
        found: set[str] = set()
        while new := {n for n, one in layouts.items() if n not in found and _axes(one, one.outputs) & read}:
            found |= new
            read |= {axis for name in new for axis in _axes(layouts[name], layouts[name].inputs)}
        written = {axis for name in found for axis in _axes(layouts[name], layouts[name].outputs)}
        plain = {name: set(one.names()) for name, one in layouts.items() if one.arrow is None}
        return frozenset(found | {name for name, axes in plain.items() if axes and axes <= written})

    def _is_prompt(self, key: str) -> bool:
        return self.kind.prompt and key == PROMPT

    def _plain(self, key: str) -> str:
        """Return the key of a whole tensor without the wrappers that PEFT puts into it."""
        wrappers = (".modules_to_save.default.", ".modules_to_save.", ".base_layer.")
        for wrapper in (*wrappers, ".ln_tuning_layers.default.", ".ln_tuning_layers."):
            key = key.replace(wrapper, ".")
        return key.removeprefix("base_model.") if self.kind.prompt else key

    def _factor(self, key: str, place: TargetWeight) -> AdapterTensor:
        match = self._keys.fullmatch(key)
        if match is not None:
            return self._part_of_change(key, match, place)
        tensor = PROMPT if self._is_prompt(key) else place.naming.canonical(self._plain(key))
        part = self.kind.parts[0] if self._is_prompt(key) else WHOLE
        return AdapterTensor(key, tensor, self._layout_of(tensor, key, place), part)

    def _part_of_change(self, key: str, match: re.Match[str], place: TargetWeight) -> AdapterTensor:
        name = match["part"] + (".bias" if match["leaf"] == "bias" else "")
        if (part := self.kind.part(name)) is None:
            raise AdapterError(
                f"{self.label}: {key} is no part of a {self.kind.name} adapter",
                hint="merge the adapter into its base, and move the merged model",
            )
        spot = place.weight_of(match["module"])
        if spot.tensor not in place.architecture.tensors and part.reference is WeightReference.ROWS:
            spot = replace(spot, tensor=place.ties.get(spot.tensor, spot.tensor))
        return self._on_places(key, part, unwrapped(match["module"]), (spot,), place)

    def _on_places(
        self,
        key: str,
        part: AdapterPart,
        module: str,
        spots: tuple[TensorSlice, ...],
        place: TargetWeight,
    ) -> AdapterTensor:
        """Return a part with its layout on the weight of its module, or on several that are joined."""
        wholes = [self._layout_of(spot.tensor, key, place) for spot in spots]
        weight = joined_layout([spot.layout(whole) for spot, whole in zip(spots, wholes, strict=True)])
        shape = self.checkpoint.tensors[key].shape
        if weight.arrow is None and part.form not in ("", "weight", "bias"):
            raise AdapterError(
                f"{self.label}: {key} changes {spots[0].tensor}, which is not a linear map ('{weight}')",
                hint="this adapter was made for another architecture",
            )
        if (found := part.on(weight, shape)) is None:
            raise AdapterError(
                f"{self.label}: {key} has shape {shape}, which {part.name} ('{part.form}') cannot have on a"
                f" weight '{weight}'",
                hint="give the base that the adapter was trained on as `base`",
            )
        layout, rank = found
        stack = spots[0].stack(wholes[0])
        layout = Layout((*stack, *layout.items), layout.arrow, layout.split + len(stack) * bool(layout.arrow))
        tensor = spots[0].tensor if part.of == "weight" else spots[0].bias.tensor
        return AdapterTensor(key, tensor, layout, part, module, spots, rank)

    def _stacked(self, found: list[AdapterTensor], place: TargetWeight) -> list[AdapterTensor]:
        """Return the tensors, with the keys of the whole stack in each member of a stack."""
        stacks: dict[tuple[str, int | None, str], dict[int, AdapterTensor]] = {}
        for factor in found:
            if factor.places and (spot := factor.places[0]).member is not None:
                stacks.setdefault((spot.tensor, spot.piece, factor.part.name), {})[spot.member] = factor
        keys: dict[str, tuple[str, ...]] = {}
        for (tensor, _, _), members in stacks.items():
            size = size_of(place.architecture.tensors[tensor].items[0], place.architecture.sizes)
            shapes = {self.checkpoint.tensors[factor.key].shape for factor in members.values()}
            require_exchangeable(self.label, self.config, size, members, shapes)
            stack = tuple(members[member].key for member in range(size))
            keys.update(dict.fromkeys(stack, stack))
        return [replace(factor, stack=keys.get(factor.key, ())) for factor in found]

    def _layout_of(self, tensor: str, key: str, place: TargetWeight) -> Layout:
        if tensor not in place.architecture.tensors:
            raise AdapterError(
                f"{self.label}: {key} belongs to {tensor}, which the base does not have",
                hint="give the base that the adapter was trained on as `base`",
            )
        return place.architecture.tensors[tensor]

    def _require_fit(self, factor: AdapterTensor, architecture: Architecture) -> None:
        shape = self.checkpoint.tensors[factor.key].shape
        shape = (len(factor.stack), *shape) if factor.stack else shape
        wanted = tuple(
            extent if item == Name(ANONYMOUS) else size_of(item, architecture.sizes)
            for item, extent in zip(factor.layout.items, shape, strict=False)
        )
        if shape != wanted:
            raise AdapterError(
                f"{self.label}: {factor.key} has shape {shape}, and on this base"
                f" '{factor.layout}' is {wanted}",
                hint="the adapter belongs to a base of another size; give that one as `base`",
            )
        if factor.part.reference is WeightReference.ROWS:
            vocabulary = size_of(architecture.tensors[factor.tensor].items[0], architecture.sizes)
            require_tokens(self.label, factor.key, shape[0], self.settings(factor.module).tokens, vocabulary)


def _labels(base: Model, name: str) -> bool:
    """Whether a tensor of the base belongs to a head with labels, whose number the adapter may change."""
    heads = base.architecture.heads
    return name in heads and LABEL in base.architecture.tensors[name].names()


def _axes(layout: Layout, dims: range) -> set[str]:
    return set(layout.part(dims).names())

"""Adapters: their files, and the layout of every stored tensor on a base."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.binding import bind
from transfusion.architecture.layouts import ANONYMOUS, Layout, Name, size_of
from transfusion.architecture.naming import Naming, unwrapped
from transfusion.errors import AdapterError, CheckpointError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.lora_keys import LoraKey
from transfusion.files.references import resolve
from transfusion.files.sentence_modules import split_name
from transfusion.files.tensor_files import FLOATS, headers
from transfusion.model.model import Model
from transfusion.runtime.untrusted_files import read_json, require_closed
from transfusion.transport.adapters.classes import class_for
from transfusion.transport.adapters.conversions import (
    LOKR,
    MOST,
    ConvertedCheckpoint,
    Kronecker,
    kronecker_sides,
)
from transfusion.transport.adapters.kinds import (
    COMMON,
    LORA,
    MERGE,
    PARTS,
    PROMPT,
    TOKENS,
    WHOLE,
    AdapterKind,
    AdapterPart,
    movable_kind,
    refuse_odd_settings,
)
from transfusion.transport.adapters.multiplied import OFT, VERA, about_products, lora_on_base
from transfusion.transport.adapters.outputs import AdapterFiles
from transfusion.transport.adapters.places import Place, Places, joined_layout, prompt_layout
from transfusion.transport.adapters.settings import (
    CONFIG,
    WEIGHTS,
    ModuleSettings,
    rank_settings,
    require_sensible,
)

LABEL = "label"  # the name in tables for the axis of a task head with one unit per label
AGAIN = "the adapter's file is damaged or incomplete; download or save it again"
_BOTH = "the configuration and the weights belong to different adapters; download both again"
_OTHER_BASE = "give the base that the adapter was trained on as `base`"
_REPLACED = ".original_module."
"""In a key: a module of the base that one of `modules_to_save` replaces. Old versions of PEFT stored it."""
_WRAPPERS = re.compile(r"\.(?:(?:modules_to_save|ln_tuning_layers)(?:\.default)?|base_layer)\.")
"""In the key of a whole tensor: what PEFT puts into it."""


@dataclass(frozen=True)
class AdapterTensor:
    """One stored tensor of an adapter, with its layout on a base."""

    key: str  # the name in the adapter's file
    tensor: str  # the canonical name of the tensor that it changes or replaces
    layout: Layout  # the axes; for a member of a stack, those of the whole stack
    part: AdapterPart = WHOLE
    module: str = ""  # the live model's name of the target module; empty for a whole tensor
    places: tuple[Place, ...] = ()
    """The places of the module's weight: one, or several tensors that are joined along their outputs."""
    rank: int | None = None
    stack: tuple[str, ...] = ()  # the keys of all members of the stack that it belongs to; π may permute them

    @property
    def whole(self) -> bool:
        """Whether this is a copy of the whole tensor, and not a factor of a change."""
        return self.part is WHOLE

    def tensor_at(self, place: Place) -> str:
        """Return the canonical name of the tensor that it changes at one of its places."""
        return place.tensor if self.part.of == "weight" else place.bias.tensor


def by_module(found: Iterable[AdapterTensor]) -> dict[str, dict[str, AdapterTensor]]:
    """Return the stored tensors of every module that an adapter changes, by the names of their parts."""
    modules: dict[str, dict[str, AdapterTensor]] = {}
    for factor in found:
        if factor.module:
            modules.setdefault(factor.module, {})[factor.part.name] = factor
    return modules


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk: its files, its configuration and its kind."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    kind: AdapterKind
    original: Adapter | None = None
    """The adapter as it is stored, if this one is of another kind or in another vocabulary."""
    base: Model | None = None
    """The base that it became a LoRA on."""

    @classmethod
    def open(cls, reference: str | Path) -> Adapter:
        """Read the headers of an adapter; refuse kinds that cannot be moved. A LoKr becomes a LoRA."""
        root, label = resolve(reference), str(reference)
        config = read_json(require_closed(root) / CONFIG)
        if str(config.get("peft_type")).upper() == OFT:
            config.pop("r", None)  # 0 if the size of the blocks is given; the tensors tell both
        require_sensible(label, config)
        kind = movable_kind(label, config)
        refuse_odd_settings(label, kind, config)
        file = next((root / name for name in WEIGHTS if (root / name).exists()), None)
        if file is None:
            raise CheckpointError(
                f"{root}: {CONFIG} without {listing(WEIGHTS)}", hint="download the adapter's weights too"
            )
        tensors = {key: info for key, info in headers(file).items() if _REPLACED not in key}
        found = cls(Checkpoint(label, root, tensors, (file,)), config, kind)
        if odd := [name for name, info in tensors.items() if info.dtype not in FLOATS]:
            raise found.error(
                f"{listing(odd)} is stored in a type that cannot be moved",
                "save the adapter as float16, bfloat16 or float32",
            )
        return found._as_lora(MOST) if kind.name == LOKR else found

    def to_merge(self) -> Adapter:
        """Return the adapter as it becomes part of a model: as a LoRA of full rank, if it became a LoRA."""
        if self.base is not None and self.original is not None:
            return self.original.on_base(self.base, None)
        return self if self.original is None else self.original._as_lora(None)

    def on_base(self, base: Model, most: int | None = MOST) -> Adapter:
        """Return the adapter as a LoRA, if it can be moved as such only, and its base tells which."""
        if self.kind.name not in (VERA, OFT):
            return self
        return replace(lora_on_base(self, base, most), base=base)

    def _as_lora(self, most: int | None) -> Adapter:
        """Return a LoKr as a LoRA of at most this rank."""
        modules = {
            owner: Kronecker(sides, self.settings(unwrapped(owner)).scale, most)
            for owner, sides in kronecker_sides(self.checkpoint).items()
        }
        if not modules:
            raise self.error("the file has no tensor of a LOKR adapter", _BOTH)
        common = set(COMMON.split()) - {"init_weights"}
        kept = {key: value for key, value in self.config.items() if key in common}
        config = kept | rank_settings({unwrapped(owner): one.rank for owner, one in modules.items()})
        checkpoint = ConvertedCheckpoint.over(self.checkpoint, modules)
        return replace(self, checkpoint=checkpoint, config=config, kind=LORA, original=self)

    @property
    def label(self) -> str:
        return self.checkpoint.label

    def error(self, message: str, hint: str) -> AdapterError:
        """Return an error about this adapter."""
        return AdapterError(f"{self.label}: {message}", hint=hint)

    @property
    def files(self) -> AdapterFiles:
        """How it is stored, and will be when it has been moved."""
        return AdapterFiles()

    @property
    def about(self) -> dict[str, Any]:
        """What the metadata says about it: the format of a LoRA file, and what a LoKr became."""
        return self.checkpoint.about if isinstance(self.checkpoint, ConvertedCheckpoint) else {}

    @property
    def drops_absent(self) -> bool:
        """Whether modules that a B of another family lacks are left out, and not refused."""
        return False

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
        if kept := self.about.get("kept"):
            about = about_products(self.about["converted_from"], self.about)
            rest = "; `full=True` merges all of it into the model" if kept < 1 else ""
            found.append(f"{self.label} {about}{rest}")
        if same and revision and trained and trained != revision:
            found.append(
                f"{self.label} was trained on revision {trained} of {name}, and the base is {revision}"
            )
        return found

    @cached_property
    def keys(self) -> Mapping[str, LoraKey]:
        """The names of its tensors, taken apart. A whole tensor has no part."""
        names = "" if self.kind.prompt else "|".join(name for name in self.kind.parts if "." not in name)
        pattern = re.compile(
            rf"(?P<module>.+?)\.(token_adapter\.)?(?P<part>{names or '(?!)'})(\.default)?"
            r"(\.weight|(?P<bias>\.bias))?"
        )
        found = {}
        for key in self.checkpoint.tensors:
            module, part = _WRAPPERS.sub(".", key), ""
            if match := pattern.fullmatch(key):
                module, part = unwrapped(match["module"]), match["part"] + (match["bias"] or "")
            elif self.kind.prompt:
                module, part = module.removeprefix("base_model."), PROMPT if key == PROMPT else ""
            found[key] = LoraKey(
                key, prefix="", format="PEFT", component="", module=module, part=part, kind="", refused=""
            )
        return found

    @property
    def modules(self) -> list[str]:
        """The modules whose weights it changes by factors, in PEFT's names."""
        return sorted({one.module for one in self.keys.values() if one.part not in ("", PROMPT)})

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
        places = self._places_on(base)
        found = [self._factor(self.keys[key], places) for key in self._own(base, places)]
        found = self._stacked(found, places.architecture)
        self._require_complete(found, base)
        for factor in found:
            self._require_fit(factor, places.architecture)
            if isinstance(self.checkpoint, ConvertedCheckpoint) and factor.places:
                self.checkpoint.require_kernel(factor.key, len(base.info(factor.places[0].tensor).shape))
        return found

    def _own(self, base: Model, places: Places) -> list[str]:
        """Return the names of the stored tensors that change the base."""
        return list(self.keys)

    def kept(self, base: Model) -> list[str]:
        """Return the names of stored tensors that do not change the base, and stay as they are."""
        return []

    def _factor(self, key: LoraKey, places: Places) -> AdapterTensor:
        if key.part in ("", PROMPT):
            tensor, part = key.part or places.naming.canonical(key.module), PARTS.get(key.part, WHOLE)
            return AdapterTensor(key.key, tensor, self._layout_of(tensor, key, places), part)
        if (part_of := self.kind.parts.get(key.part)) is None:
            raise self.error(f"{key.key} is no part of a {self.kind.name} adapter", MERGE)
        place = places.of_module(key.module)
        absent = place.tensor not in places.architecture.tensors
        if absent and part_of is TOKENS:
            place = replace(place, tensor=places.ties.get(place.tensor, place.tensor))
        return self._on_places(key, part_of, (place,), places)

    def _on_places(
        self, key: LoraKey, part: AdapterPart, spots: tuple[Place, ...], places: Places
    ) -> AdapterTensor:
        """Return a part with its layout on the weight of its module, or on several that are joined."""
        wholes = [self._layout_of(spot.tensor, key, places) for spot in spots]
        weight = joined_layout([spot.layout(whole) for spot, whole in zip(spots, wholes, strict=True)])
        shape = self.checkpoint.tensors[key.key].shape
        if weight.arrow is None and part.form not in ("", "weight", "bias"):
            raise self.error(
                f"{key.key} changes {spots[0].tensor}, which is not a linear map ('{weight}')",
                "this adapter was made for another architecture",
            )
        if (found := part.on(weight, shape)) is None:
            why = f"which {part.name} ('{part.form}') cannot have on a weight '{weight}'"
            raise self.error(f"{key.key} has shape {shape}, {why}", _OTHER_BASE)
        layout, rank = found
        if spots[0].member is not None:
            split = layout.split + bool(layout.arrow)
            layout = Layout((wholes[0].items[0], *layout.items), layout.arrow, split)
        tensor = spots[0].tensor if part.of == "weight" else spots[0].bias.tensor
        return AdapterTensor(key.key, tensor, layout, part, key.owner, spots, rank)

    def _layout_of(self, tensor: str, key: LoraKey, places: Places) -> Layout:
        if tensor not in places.architecture.tensors:
            raise self.error(f"{key.key} belongs to {tensor}, which the base does not have", _OTHER_BASE)
        return places.architecture.tensors[tensor]

    def _stacked(self, found: list[AdapterTensor], architecture: Architecture) -> list[AdapterTensor]:
        """Return the tensors, with the keys of the whole stack in each member of a stack."""
        stacks: dict[tuple[str, int | None, str], dict[int, AdapterTensor]] = {}
        for factor in found:
            if factor.places and (place := factor.places[0]).member is not None:
                stacks.setdefault((place.tensor, place.piece, factor.part.name), {})[place.member] = factor
        keys: dict[str, tuple[str, ...]] = {}
        for (tensor, _, _), members in stacks.items():
            size = size_of(architecture.tensors[tensor].items[0], architecture.sizes)
            self._require_exchangeable(tensor, size, members)
            stack = tuple(members[member].key for member in range(size))
            keys.update(dict.fromkeys(stack, stack))
        return [replace(factor, stack=keys.get(factor.key, ())) for factor in found]

    # ── heads of its own ─────────────────────────────────────────────────────────────────────

    def _places_on(self, base: Model) -> Places:
        """Return the base's architecture with the adapter's own heads and its prompt."""
        bound = self._bound_on(base)
        if self.kind.prompt:
            bound = replace(bound, tensors={**bound.tensors, PROMPT: prompt_layout(bound)})
        return Places(Naming(base.family, live=True), bound.under(base.architecture.policy), base.ties)

    def _bound_on(self, base: Model) -> Architecture:
        """Return the table for a model of the adapter's class, bound to the shapes of base and adapter."""
        naming, stored = Naming(base.family, live=True), self.checkpoint.tensors
        whole = {key: naming.canonical(one.module) for key, one in self.keys.items() if not one.part}
        own = {name: stored[key].shape for key, name in whole.items()}
        shapes = {name: base.info(name).shape for name in base.names if not split_name(name)[0]}
        config, known = base.config, base.architecture
        if any(shapes.get(name) != shape for name, shape in own.items()):
            labelled = {name for name in known.task_heads if LABEL in known.tensors[name].names()}
            shapes = {name: one for name, one in shapes.items() if name in own or name not in labelled}
            if (class_name := class_for(self.config, config)) is not None:
                config = {**config, "architectures": [class_name]}
        table = base.family.table(config, frozenset({*shapes, *own}))
        return bind(table, {**shapes, **own}, base.family.name)

    def read_through(self, base: Model, own: Iterable[str]) -> frozenset[str]:
        """Return the head tensors of the base that the adapter's own heads read through, such as a pooler."""
        bound = self._bound_on(base)
        layouts = {name: bound.tensors[name] for name in bound.task_heads if name not in own}
        read = {axis for name in own for axis in _axes(bound.tensors[name], bound.tensors[name].inputs)}
        found: set[str] = set()
        while new := {n for n, one in layouts.items() if n not in found and _axes(one, one.outputs) & read}:
            found |= new
            read |= {axis for name in new for axis in _axes(layouts[name], layouts[name].inputs)}
        written = {axis for name in found for axis in _axes(layouts[name], layouts[name].outputs)}
        plain = {name: set(one.names()) for name, one in layouts.items() if one.arrow is None}
        return frozenset(found | {name for name, axes in plain.items() if axes and axes <= written})

    # ── refusals ─────────────────────────────────────────────────────────────────────────────

    def _require_complete(self, found: Sequence[AdapterTensor], base: Model) -> None:
        """Refuse missing parts and modules, and ranks that disagree."""
        kind = self.kind
        if kind.parts and not any(factor.part.name in kind.parts for factor in found):
            raise self.error(f"the file has no tensor of a {kind.name} adapter", _BOTH)
        for module, parts in by_module(found).items():
            if absent := sorted(kind.absent(parts.keys())):
                there = sorted(parts.keys() & set(kind.needs.split()))
                raise self.error(f"{module} has {listing(there)} without {listing(absent)}", AGAIN)
            ranks = {one.rank: name for name, one in sorted(parts.items()) if one.rank is not None}
            if len(ranks) > 1:
                shown = " and ".join(f"{rank} in {name}" for rank, name in ranks.items())
                raise self.error(f"{module} has rank {shown}", AGAIN)
            promised = self.settings(module).rank if ranks else None
            if promised not in (None, *ranks):
                raise self.error(
                    f"{module} has rank {next(iter(ranks))}, and the configuration says {promised}", _BOTH
                )
        whole = {factor.tensor for factor in found if factor.whole}
        for weight in sorted(name for name in whole if name.endswith(".weight")):
            bias = weight.removesuffix("weight") + "bias"
            if bias in base.names and bias not in whole:
                raise self.error(f"it has {weight} without {bias}", AGAIN)
        self._require_targets(found, base)

    def _require_targets(self, found: Sequence[AdapterTensor], base: Model) -> None:
        """Refuse a target module that the base has and for which nothing is stored."""
        targets = self.config.get("target_modules")
        if not isinstance(targets, list) or self.config.get("exclude_modules"):
            return
        stored = [factor.module or factor.tensor.rpartition(".")[0] for factor in found]
        names = (*base.architecture.backbone, *base.checkpoint.tensors)
        theirs = [name.rpartition(".")[0] for name in names]
        here, there = (
            {one for one in targets if any(f".{name}".endswith(f".{one}") for name in modules)}
            for modules in (stored, theirs)
        )
        if missing := sorted(there - here):
            raise self.error(
                f"missing target module: the configuration names {listing(missing)}, and the file has no"
                " tensors for it",
                AGAIN,
            )

    def _require_fit(self, factor: AdapterTensor, architecture: Architecture) -> None:
        """Refuse a tensor of another size than the base's axes, and trained tokens that do not fit."""
        shape = self.checkpoint.tensors[factor.key].shape
        shape = (len(factor.stack), *shape) if factor.stack else shape
        wanted = tuple(
            extent if item == Name(ANONYMOUS) else size_of(item, architecture.sizes)
            for item, extent in zip(factor.layout.items, shape, strict=False)
        )
        if shape != wanted:
            raise self.error(
                f"{factor.key} has shape {shape}, and on this base '{factor.layout}' is {wanted}",
                "the adapter belongs to a base of another size; give that one as `base`",
            )
        if factor.part is not TOKENS:
            return
        tokens = self.settings(factor.module).tokens
        vocabulary = size_of(architecture.tensors[factor.tensor].items[0], architecture.sizes)
        if shape[0] != len(tokens):
            raise self.error(
                f"{factor.key} has {shape[0]} rows, and the configuration names {len(tokens)} tokens", _BOTH
            )
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise self.error(
                f"the configuration names token {max(tokens)}, and the base has {vocabulary} tokens",
                "the adapter belongs to a base with another vocabulary; give that base as `base`",
            )

    def _require_exchangeable(self, tensor: str, size: int, members: Mapping[int, AdapterTensor]) -> None:
        """Refuse an adapter that does not change all experts of a stack alike: π permutes the experts."""
        if absent := sorted(set(range(size)) - members.keys()):
            raise self.error(
                f"the adapter changes some of the experts in {tensor}, and not number {listing(absent)}; in B"
                " they have other numbers",
                MERGE,
            )
        shapes = {self.checkpoint.tensors[factor.key].shape for factor in members.values()}
        if len(shapes) > 1:
            raise self.error(
                f"the experts in {tensor} have tensors of several shapes ({listing(sorted(shapes))}), and"
                " cannot be permuted",
                MERGE,
            )
        if len({self.settings(factor.module).alpha for factor in members.values()}) > 1:
            raise self.error(
                f"alpha_pattern gives experts such as {members[0].module} different scales, and π permutes"
                " experts",
                MERGE,
            )


def _axes(layout: Layout, dims: range) -> set[str]:
    return set(layout.part(dims).names())

"""PEFT adapters read from their own files, without PEFT: LoRA in, LoRA out.

A low-rank change of a weight with layout ``O <- I`` is stored as lora_B, ``O rank``, and lora_A,
``rank I``. Moving the two factors moves their product, so the rank stays what it was.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from transfusion.architecture import Architecture
from transfusion.binding import bind
from transfusion.checkpoint import Checkpoint, headers, read_json, tensor_digest
from transfusion.errors import AdapterError, CheckpointError, listing
from transfusion.layouts import ANONYMOUS, Layout, Name, size_of
from transfusion.model import Model
from transfusion.naming import Naming, without_part
from transfusion.references import resolve

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<factor>lora_A|lora_B|lora_embedding_A|lora_embedding_B)"
    r"(\.default)?(\.(?P<leaf>weight|bias))?"
)

# Settings that say nothing about where the numbers belong: they may have any value.
_IRRELEVANT = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    ]
)


_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways of starting a LoRA that leave the base as it is."""

_TASKS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "CAUSAL_LM": "ForCausalLM",
}


@dataclass(frozen=True)
class Factor:
    """One stored tensor of an adapter, and where it belongs."""

    key: str
    """Its name in the adapter's file."""
    tensor: str
    """The canonical name of the weight that it changes or replaces."""
    layout: Layout
    scaled: bool = False
    """Whether α belongs on this factor: on one of each pair."""
    whole: bool = False
    """Whether this is a copy of the whole tensor, trained or not, and not a factor of a change."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter on disk: its files, and its configuration."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]

    @property
    def label(self) -> str:
        return self.checkpoint.label

    @classmethod
    def open(cls, reference: str | Path) -> Adapter:
        """Read the headers of an adapter; refuse the kinds that cannot be moved, by name."""
        root = resolve(reference)
        config = read_json(root / CONFIG)
        _refuse_other_kinds(str(reference), config)
        file = next((root / name for name in WEIGHTS if (root / name).exists()), None)
        if file is None:
            raise CheckpointError(
                f"{root}: {CONFIG} without {listing(WEIGHTS)}", hint="fetch the adapter's weights too"
            )
        return cls(Checkpoint(str(reference), root, headers(file), (file,)), config)

    def factors(self, base: Model) -> list[Factor]:
        """Every stored tensor with its layout on a base."""
        naming = Naming(base.family, live=True)
        architecture = self._architecture_on(base, naming)
        found = [self._factor(key, naming, architecture) for key in self.checkpoint.tensors]
        self._require_pairs(found)
        for factor in found:
            self._require_fit(factor, architecture)
        return found

    def _architecture_on(self, base: Model, naming: Naming) -> Architecture:
        """The base's architecture, with the heads that only the adapter has."""
        shapes = {name: base.info(name).shape for name in base.names}
        for key, info in self.checkpoint.tensors.items():
            if not _FACTOR.fullmatch(key):
                shapes[naming.canonical(_plain(key))] = info.shape
        config = {**base.config, "architectures": [self._class_name(base)]}
        table = base.family.table(config, frozenset(shapes))
        return bind(table, shapes, base.family.name).under(base.architecture.policy)

    def _class_name(self, base: Model) -> str:
        """The class of model that the adapter was trained in, as far as it says so."""
        mapping = self.config.get("auto_mapping") or {}
        task = _TASKS.get(self.config.get("task_type") or "", "")
        own = (base.config.get("architectures") or [""])[0]
        return str(mapping.get("base_model_class") or task or own)

    def _factor(self, key: str, naming: Naming, architecture: Architecture) -> Factor:
        match = _FACTOR.fullmatch(key)
        if match is None:
            tensor = naming.canonical(_plain(key))
            return Factor(key, tensor, self._layout_of(tensor, key, architecture), whole=True)
        if "#" in (piece := naming.canonical(match["module"] + ".weight")):
            raise AdapterError(
                f"{self.label}: {key} changes one of the stacked matrices {piece.partition('#')[0]}",
                hint="adapters on single experts cannot be moved; merge the adapter into its base and move"
                " the merged model",
            )
        tensor, part = without_part(naming.canonical(match["module"]) + ".weight")
        weight = self._layout_of(tensor, key, architecture)
        if part is not None:
            weight = weight.piece(part)
        if weight.arrow is None:
            raise AdapterError(
                f"{self.label}: {key} changes {tensor}, which is not a linear map ('{weight}')",
                hint="this adapter was made for another architecture",
            )
        if match["leaf"] == "bias":
            return Factor(key, tensor, weight.part(weight.outputs), scaled=True)
        ndim = len(self.checkpoint.tensors[key].shape)
        if match["factor"].endswith("A"):
            return Factor(key, tensor, Layout((Name(ANONYMOUS), *weight.part(weight.inputs).items)))
        outputs = weight.part(weight.outputs).items
        filler = (Name(ANONYMOUS),) * (ndim - len(outputs))
        return Factor(key, tensor, Layout((*outputs, *filler)), scaled=True)

    def _layout_of(self, tensor: str, key: str, architecture: Architecture) -> Layout:
        if tensor not in architecture.tensors:
            raise AdapterError(
                f"{self.label}: {key} belongs to {tensor}, which the base does not have",
                hint="give the base that the adapter was trained on as --base",
            )
        return architecture.tensors[tensor]

    def _require_pairs(self, found: list[Factor]) -> None:
        ranks: dict[str, dict[str, int]] = {}
        for factor in found:
            match = _FACTOR.fullmatch(factor.key)
            if match and match["leaf"] != "bias":
                side = match["factor"][-1]
                shape = self.checkpoint.tensors[factor.key].shape
                ranks.setdefault(match["module"], {})[side] = shape[0] if side == "A" else shape[1]
        for module, sides in ranks.items():
            if len(sides) < 2:
                raise AdapterError(
                    f"{self.label}: {module} has lora_{next(iter(sides))} and not its partner",
                    hint="the adapter's file is incomplete; fetch or save it again",
                )
            if sides["A"] != sides["B"]:
                raise AdapterError(
                    f"{self.label}: {module} has rank {sides['A']} in lora_A and {sides['B']} in lora_B",
                    hint="the adapter's file is damaged; fetch or save it again",
                )

    def _require_fit(self, factor: Factor, architecture: Architecture) -> None:
        shape = self.checkpoint.tensors[factor.key].shape
        wanted = tuple(
            extent if item == Name(ANONYMOUS) else size_of(item, architecture.sizes)
            for item, extent in zip(factor.layout.items, shape, strict=False)
        )
        if shape != wanted:
            raise AdapterError(
                f"{self.label}: {factor.key} has shape {shape}, and on this base"
                f" '{factor.layout}' is {wanted}",
                hint="the adapter belongs to a base of another size; give that one as --base",
            )

    @property
    def digest(self) -> str:
        """A hash of its settings and the content of its tensors."""
        total = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())
        for key in sorted(self.checkpoint.tensors):
            total.update(key.encode() + tensor_digest(self.checkpoint.read(key)))
        return total.hexdigest()

    def read(self, key: str) -> Tensor:
        """One stored tensor; values that are not numbers are refused."""
        return self.checkpoint.read_finite(key)


def _plain(key: str) -> str:
    """The key of a tensor that is stored as a whole, without PEFT's marks."""
    for mark in (".modules_to_save.default.", ".modules_to_save.", ".base_layer."):
        key = key.replace(mark, ".")
    return key


def is_adapter(reference: str | Path) -> bool:
    """Whether a reference is the folder of an adapter, here or on the hub."""
    return (resolve(reference) / CONFIG).exists()


def _refuse_other_kinds(label: str, config: Mapping[str, Any]) -> None:
    kind = str(config.get("peft_type", "unknown")).upper()
    if kind != "LORA":
        raise AdapterError(
            f"{label}: adapters of kind {kind} cannot be moved",
            hint="LoRA adapters can; or merge the adapter into its base and move the merged model",
        )
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise AdapterError(
            f"{label}: the adapter was started by {start!r}, which changes the base's weights when it is"
            " loaded",
            hint="convert it to a plain LoRA (PEFT: path_initial_model_for_weight_conversion), or merge it",
        )
    odd = [
        f"{key}={value!r}"
        for key, value in config.items()
        if key not in _IRRELEVANT and value not in (None, False, {}, [], "")
    ]
    if odd:
        raise AdapterError(
            f"{label}: a LoRA adapter with settings that are not understood: {listing(odd)}",
            hint="merge the adapter into its base and move the merged model",
        )

"""Folders of sentence-transformers: an encoder, and the modules behind it that ``modules.json`` lists.

The encoder's files are at the root, or in ``0_Transformer``. What pools has no weights; a dense layer has,
and its tensors are named ``2_Dense/linear.weight``: no library has a slash in the name of a tensor. Only
JSON files and tensors are read; the classes that ``modules.json`` names are never imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict

from transfusion.errors import CheckpointError
from transfusion.files.tensor_files import TensorInfo, headers
from transfusion.runtime.untrusted_files import parse_json, path_inside, read_json, read_text, validate

MODULES = "modules.json"
_ABOUT = "config_sentence_transformers.json"
BESIDE_ENCODER = ("sentence_bert_config.json",)
"""Settings of the module that runs the encoder, beside its weights."""
SETTINGS = (MODULES, *BESIDE_ENCODER, _ABOUT, "config_setfit.json")
"""The files that make a model's folder one of sentence-transformers."""
HEADS = ("model_head.pkl", "model_head.pt", "model_head.skops")
"""The classifiers of SetFit: programs, which are never loaded."""
_ENCODERS = ("Transformer", "MLMTransformer")
_CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_MODES = "pooling_mode"
_AGAIN = "fetch the folder again"


class _Listed(TypedDict):
    """An entry of ``modules.json``."""

    path: Annotated[str, Field(max_length=200)]
    type: Annotated[str, Field(max_length=200)]


_Modes: TypeAlias = Annotated[list[Annotated[str, Field(max_length=100)]], Field(min_length=1, max_length=16)]


@dataclass(frozen=True)
class SentenceModule:
    """One of the modules behind the encoder."""

    folder: Path
    kind: str
    """The name of its class, without the names of Python's modules."""

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        return read_json(path_inside(self.folder, path)) if path.is_file() else {}

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Its tensors, by the names that they have in its own file."""
        file = next((self.folder / name for name in _WEIGHTS if (self.folder / name).is_file()), None)
        return {} if file is None else headers(path_inside(self.folder, file))

    @property
    def is_plain_dense(self) -> bool:
        """Whether it is one linear map and what follows from its outputs alone."""
        known = self.tensors.keys() <= {"linear.weight", "linear.bias"}
        return self.kind == "Dense" and known and not self.config.get("use_residual")

    @property
    def modes(self) -> list[str]:
        """The ways in which it pools, the results of which are concatenated."""
        if (named := self.config.get(_MODES)) is None:
            old = (
                key for key, value in self.config.items() if key.startswith(f"{_MODES}_") and value is True
            )
            return [key.removeprefix(f"{_MODES}_").removesuffix("_tokens") for key in old] or ["mean"]
        given = named if isinstance(named, list) else [named]
        return validate(given, _Modes, f"{self.folder}: {_MODES}", hint=_AGAIN)


@dataclass(frozen=True)
class SentenceModules:
    """What a folder of sentence-transformers has beside its encoder."""

    root: Path
    encoder: Path
    """The folder of the encoder: the root, or one in it."""
    listed: tuple[Mapping[str, Any], ...]
    """The entries of ``modules.json``."""
    modules: tuple[SentenceModule, ...]
    """Those behind the encoder, in order."""

    @classmethod
    def of(cls, root: Path) -> SentenceModules | None:
        """Read the folder of a model; None if it is none of sentence-transformers."""
        path = root / MODULES
        if not path.is_file():
            return None
        found = parse_json(read_text(path_inside(root, path)), path)
        if not isinstance(found, list):
            return None  # a file of another program
        listed = validate(found, list[_Listed], path, hint=_AGAIN)
        if not listed or listed[0]["type"].rpartition(".")[2] not in _ENCODERS:
            return None
        folders = [path_inside(root, root / one["path"]) for one in listed]
        if odd := [one for one in folders[1:] if one.parent != root]:
            raise CheckpointError(f"{path}: {odd[0]} is no folder beside it", hint=_AGAIN)
        kinds = [one["type"].rpartition(".")[2] for one in listed]
        modules = tuple(map(SentenceModule, folders[1:], kinds[1:]))
        return cls(root, folders[0], tuple(dict(one) for one in listed), modules)

    @classmethod
    def around(cls, encoder: Path) -> SentenceModules | None:
        """Return the modules behind the encoder in a folder: they are beside it, or around it."""
        if not encoder.is_dir():
            return None
        places = (encoder, encoder.parent) if encoder.name.startswith("0_") else (encoder,)
        found = (cls.of(place) for place in places)
        return next((one for one in found if one is not None and one.encoder == encoder), None)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the dense layers, by their names in a model."""
        return {
            f"{one.name}/{name}": info
            for one in self.modules
            if one.is_plain_dense
            for name, info in one.tensors.items()
        }

    @property
    def pooling(self) -> list[SentenceModule]:
        """The modules that pool."""
        return [one for one in self.modules if one.kind == "Pooling"]

    @property
    def odd(self) -> list[SentenceModule]:
        """The modules whose weights nothing here understands."""
        return [one for one in self.modules if one.tensors and not one.is_plain_dense]

    @property
    def loaded_by(self) -> str:
        """The class of sentence-transformers that loads the folder; older releases do not name it."""
        path = self.root / _ABOUT
        named = read_json(path_inside(self.root, path)).get("model_type") if path.is_file() else None
        return named if named in _CLASSES else _CLASSES[0]

    @property
    def heads(self) -> list[str]:
        """The classifiers of SetFit in the folder."""
        return [name for name in HEADS if (self.root / name).exists()]

    def layouts(self, stream: str) -> dict[str, str]:
        """Return rows for the tensors: the first dense layer reads the encoder's stream, which pooling in
        several ways repeats, and the others read what the layer before them made.
        """
        reads, rows = stream, dict[str, str]()
        for one in self.modules:
            if one.is_plain_dense:
                rows[f"{one.name}/linear.*"] = f"_ <- {reads}"
                reads = "_"
            elif one.kind == "Pooling" and len(one.modes) > 1 and reads == stream:
                reads = f"[{'|'.join([stream] * len(one.modes))}]"
        return rows

    def files(self) -> dict[str, str]:
        """Return the text files of a folder with the same modules, with the encoder at its root."""
        listed = [{**one, "path": "" if n == 0 else one["path"]} for n, one in enumerate(self.listed)]
        found = {MODULES: json.dumps(listed, indent=2) + "\n"}
        for name in SETTINGS[1:]:
            places = (self.encoder / name, self.root / name)
            path = next((place for place in places if place.is_file()), None)
            found |= {} if path is None else {name: read_text(path_inside(self.root, path))}
        for one in self.modules:
            if one.config:
                found[f"{one.name}/config.json"] = json.dumps(one.config, indent=2) + "\n"
        return found


def split_name(name: str) -> tuple[str, str]:
    """Return the folder of a module behind the encoder, and the name in its file; no folder otherwise."""
    folder, _, own = name.rpartition("/")
    return folder, own

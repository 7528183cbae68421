"""The files of an adapter: PEFT's folder, or a LoRA file as programs for images and videos read it."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from transfusion.errors import OutputError
from transfusion.files.publishing import write_json, write_text
from transfusion.files.shard_writer import LazyTensor, write_shard
from transfusion.files.staging import StagingFolder
from transfusion.runtime.shareable_paths import shareable_path, shareable_text
from transfusion.transport.adapters.adapter_config import CONFIG, WEIGHTS
from transfusion.transport.output import Output
from transfusion.transport.output_record import HEADER

SINGLE = ".safetensors"
HASHES = ("sshs_model_hash", "sshs_legacy_hash")
"""Hashes of the file that kohya's programs keep in its header."""
_STALE = "modelspec.hash_sha256"
"""An entry of a header that is false for other tensors."""


class AdapterFiles(ABC):
    """How an adapter is stored."""

    @abstractmethod
    def require_path(self, path: Path) -> None:
        """Refuse a path that cannot hold these files."""

    @abstractmethod
    def write(self, staging: StagingFolder, tensors: Mapping[str, Tensor], output: Output) -> None:
        """Write all files into a staging folder."""


class PeftFiles(AdapterFiles):
    """A folder with adapter_config.json and the weights."""

    def require_path(self, path: Path) -> None:
        if path.suffix == SINGLE:
            raise OutputError(
                f"{path}: an adapter is a folder with a configuration and weights",
                hint="give a name without .safetensors",
            )

    def write(self, staging: StagingFolder, tensors: Mapping[str, Tensor], output: Output) -> None:
        write_shard(staging.output / WEIGHTS[0], _lazy(tensors))
        write_json(staging.output / CONFIG, output.config or {})
        _write_texts(staging, output, output.metadata())


@dataclass(frozen=True)
class LoraFiles(AdapterFiles):
    """One file whose header says how it was made; or a folder with that file."""

    name: str
    """The name of the file in a folder."""
    header: Mapping[str, str] = field(default_factory=dict)
    """The header of the LoRA before it was moved."""

    def require_path(self, path: Path) -> None:
        pass

    def write(self, staging: StagingFolder, tensors: Mapping[str, Tensor], output: Output) -> None:
        single = staging.path.suffix == SINGLE
        ordered = {name: tensors[name] for name in sorted(tensors)}
        metadata = output.metadata()
        header = {**self._kept(ordered), HEADER: json.dumps(_shareable(metadata), ensure_ascii=False)}
        name = staging.path.name if single else self.name
        write_shard(staging.output / name, _lazy(ordered), metadata=header)
        if not single:
            _write_texts(staging, output, metadata)

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


def _write_texts(staging: StagingFolder, output: Output, metadata: Mapping[str, Any]) -> None:
    for name, text in output.texts(metadata).items():
        write_text(staging.output / name, text)

"""Checkpoints: read the headers first, and tensors when they are needed.

A safetensors file, a ``.pt``/``.bin`` file, or a folder in the style of transformers, open_clip or timm.
Opening one reads the headers only; `Checkpoint.read` brings in a single tensor. Pickles go through
torch's restricted unpickler and nothing else. `Checkpoint.of` is one in memory, without any file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.checkpoint.references import PICKLES, resolve
from transfusion.checkpoint.tensor_content import BLOCK, all_finite, content, row_blocks, tensor_digest
from transfusion.checkpoint.tensor_files import (
    FLOATS,
    SAFETENSORS_DTYPES,
    Rows,
    Stamp,
    TensorInfo,
    headers,
    read_tensor,
    stamp,
    unpickle,
)
from transfusion.checkpoint.weight_files import WEIGHTS, weights_in
from transfusion.errors import CheckpointError, listing
from transfusion.runtime.untrusted_files import path_inside, read_json

__all__ = [
    "BLOCK",
    "CONFIGS",
    "FLOATS",
    "MEMORY",
    "SAFETENSORS_DTYPES",
    "WEIGHTS",
    "Checkpoint",
    "Rows",
    "TensorInfo",
    "all_finite",
    "content",
    "headers",
    "row_blocks",
    "tensor_digest",
]

CONFIGS = ("config.json", "open_clip_config.json")
MEMORY = Path("<memory>")
"""The root of a checkpoint in memory."""


@dataclass
class Checkpoint:
    """A model on disk, or in memory: its tensors by name, its configuration, and its other files."""

    label: str
    """As the user wrote it."""
    root: Path
    """The folder, or the file itself."""
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]
    """The files with weights, in order."""
    config: dict[str, Any] | None = None
    config_name: str | None = None
    module: nn.Module | None = field(default=None, repr=False)
    """The module whose tensors these are, if it was given in memory."""
    auxiliary_folder: Path | None = None
    """The folder with the tokenizer and the image settings of a model in memory, if there is one."""
    _pickles: dict[Path, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    """The pickles that are in memory, or mapped."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the paths only: another process opens the files itself."""
        if self.in_memory:
            raise CheckpointError(
                f"{self.label}: a model in memory cannot be read by other processes",
                hint="save it to a folder that all of them see, and give the folder",
            )
        where = {file: file.absolute() for file in self.files}
        return {
            **self.__dict__,
            "root": self.root.absolute(),
            "files": tuple(where.values()),
            "tensors": {name: replace(info, file=where[info.file]) for name, info in self.tensors.items()},
            "module": None,
            "_pickles": {},
        }

    def require_unchanged(self) -> None:
        """Refuse files that have changed since they were opened, here or in another process."""
        opened = {info.file: info.stamp for info in self.tensors.values() if info.stamp}
        now = {file: _stamp(file) for file in opened}
        if unseen := [file for file in opened if now[file] is None]:
            raise CheckpointError(
                f"{self.label}: {listing(unseen, 2)} cannot be seen",
                hint="it was moved meanwhile, or the storage that holds it is not mounted at this path",
            )
        changed = [file.name for file in opened if now[file] != opened[file]]
        if changed:
            raise CheckpointError(
                f"{self.label}: {listing(changed)} changed while it was being read",
                hint="run again when no other program is writing to it",
            )

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read one tensor, or some of its rows, as stored; refuse a file that has changed."""
        info = self.tensors[name]
        try:
            if info.file.suffix not in PICKLES:
                return read_tensor(info, rows)
            tensor = self._unpickled(info.file)[name]
        except (OSError, KeyError) as error:
            raise CheckpointError(
                f"{info.file}: {name} cannot be read ({error})",
                hint="run again when no other program is writing to it, or fetch the file again",
            ) from error
        if rows is None:
            return tensor
        return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)

    def _unpickled(self, file: Path) -> dict[str, Tensor]:
        if file not in self._pickles:
            self._pickles[file] = unpickle(file)
        return self._pickles[file]

    def read_finite(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read one tensor, or some of its rows; refuse NaN and infinite values."""
        tensor = self.read(name, rows)
        if tensor.is_floating_point() and not all_finite(tensor):
            raise CheckpointError(
                f"{self.label if self.in_memory else self.tensors[name].file}: {name} contains NaN or"
                " infinite values",
                hint="the model is broken, or was saved in a type too small for it",
            )
        return tensor

    @property
    def in_memory(self) -> bool:
        return self.root == MEMORY

    @property
    def config_label(self) -> str | None:
        """The name of the configuration in messages."""
        return "its configuration" if self.in_memory else self.config_name

    @property
    def parameters(self) -> int:
        return sum(torch.Size(info.shape).numel() for info in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def auxiliary_files(self) -> list[Path]:
        """The folder's other files that belong to a model: tokenizer, processor, generation."""
        if not self.root.is_dir():
            return []
        skipped = {*CONFIGS, "transfusion.json", "README.md", ".gitattributes"}
        return [
            path
            for path in sorted(self.root.iterdir())
            if path.is_file()
            and path.suffix not in PICKLES | {".safetensors", ".h5", ".msgpack", ".onnx", ".ot"}
            and path.name not in skipped
            and not path.name.endswith(".index.json")
        ]

    @classmethod
    def open(
        cls, reference: str | Path, *, config: str | Path | Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """Find a model and read its headers; ``config`` is used instead of one that is found beside it."""
        root = resolve(reference)
        tensors = weights_in(root)
        if not tensors:
            raise CheckpointError(
                f"{reference}: there is not a single tensor in it", hint="is this the right file?"
            )
        files = tuple(dict.fromkeys(info.file for info in tensors.values()))
        checkpoint = cls(str(reference), root, tensors, files)
        folder = root if root.is_dir() else root.parent
        beside = next((folder / name for name in CONFIGS if (folder / name).exists()), None)
        if config is not None:
            checkpoint.configure(config)
        elif beside is not None:
            checkpoint.config, checkpoint.config_name = read_json(path_inside(folder, beside)), beside.name
        return checkpoint

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        config: str | Path | Mapping[str, Any] | None = None,
        label: str = "a state dict in memory",
        module: nn.Module | None = None,
    ) -> Checkpoint:
        """Return tensors in memory as a checkpoint; they are shared, not copied."""
        _refuse_what_holds_no_values(tensors, label)
        checkpoint = cls(label, MEMORY, {}, (), module=module)
        if config is not None:
            checkpoint.configure(config)
        # Named as a pickle that is open already: `read` need not know that there is no file.
        file = MEMORY / WEIGHTS[3 if checkpoint.config_name == CONFIGS[1] else 2]
        here = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        checkpoint.tensors = {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, file) for name, tensor in here.items()
        }
        checkpoint.files, checkpoint._pickles = (file,), {file: here}
        return checkpoint

    def configure(self, config: str | Path | Mapping[str, Any]) -> None:
        """Use this configuration: a file of JSON, or its content."""
        self.config = dict(config) if isinstance(config, Mapping) else read_json(Path(config))
        self.config_name = CONFIGS["model_cfg" in self.config]


def _refuse_what_holds_no_values(tensors: Mapping[str, Tensor], label: str) -> None:
    odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if odd or not tensors:
        raise CheckpointError(
            f"{label}: a mapping of names to tensors was expected"
            + (f", and {listing(odd)} are something else" if odd else ", and it is empty"),
            hint="give a module, or its state_dict() alone",
        )
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{label}: {len(empty)} tensor(s) have no values yet (device meta): {listing(empty)}",
            hint="load the weights into memory first, without offloading",
        )


def _stamp(file: Path) -> Stamp | None:
    try:
        return stamp(file)
    except OSError:
        return None

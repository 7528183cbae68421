"""Checkpoints: read the headers first, and tensors when they are needed.

A checkpoint is a safetensors file, a ``.pt`` or ``.bin`` file, or a folder as transformers, diffusers,
open_clip or timm write it. Opening a checkpoint reads the headers only; `Checkpoint.read` reads a single
tensor. Pickles are loaded by torch's restricted unpickler only. `Checkpoint.of` makes a checkpoint of tensors
in memory.

`CheckpointView` shows tensors under other names, or with other rows, than those that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import TypedDict

from transfusion.errors import CheckpointError, listing
from transfusion.files.references import WEIGHTS, resolve, weights_in
from transfusion.files.sentence_modules import HEADS, SETTINGS, SentenceModules
from transfusion.files.tensor_files import (
    PICKLES,
    Rows,
    TensorInfo,
    all_finite,
    content,
    read_into,
    read_tensor,
    row_blocks,
    stamp,
    unpickle,
)
from transfusion.runtime.untrusted_files import path_inside, read_json, validate

CONFIGS = ("config.json", "open_clip_config.json")
PartT = TypeVar("PartT")
MEMORY = Path("<memory>")
"""The root of a checkpoint in memory."""
SPANS, SPAN_BYTES = 8, 512
"""How many spans of a tensor are sampled for a fingerprint, and the bytes of each. Files of π and records
hold fingerprints: with other numbers, their formats need new numbers, too."""


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
    companions: Checkpoint | None = field(default=None, repr=False)
    """The tensors of other models in the same files, such as a VAE: outputs have them as they are."""
    sentence: SentenceModules | None = field(default=None, repr=False)
    """What follows the encoder in a folder of sentence-transformers."""
    _pickles: dict[Path, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    """The tensors of the pickles that are loaded, or mapped."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the paths only: another process opens the files itself."""
        if self.in_memory:
            raise CheckpointError(
                f"{self.label}: a model in memory cannot be read by other processes",
                hint="save it to a folder that all processes see, and give the folder",
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
        if unseen := [file for file in opened if not file.exists()]:
            raise CheckpointError(
                f"{self.label}: {listing(unseen, 2)} cannot be seen",
                hint="the file was moved, or the storage that holds it is not mounted at this path",
            )
        if changed := [file.name for file in opened if stamp(file) != opened[file]]:
            raise CheckpointError(
                f"{self.label}: {listing(changed)} changed while it was being read",
                hint="run again when no other program writes to the file",
            )

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read one tensor, or some of its rows, as stored; refuse a file that has changed."""
        info = self.tensors[name]
        try:
            if info.file.suffix not in PICKLES:
                return read_tensor(info, rows)
            if info.file not in self._pickles:
                self._pickles[info.file] = unpickle(info.file)
            tensor = self._pickles[info.file][info.name]
        except (OSError, KeyError) as error:
            raise self._unreadable(name, error) from error
        return tensor if rows is None else tensor[rows]

    def sample(self, pieces: Sequence[str]) -> bytes:
        """Return a fixed sample of the bytes of a tensor, which is stored in these pieces of equal size.

        The sample is the same however the tensor is stored: spans from its first byte to its last, or all
        bytes if they are few.
        """
        size = self.tensors[pieces[0]].nbytes
        total = size * len(pieces)
        if total <= SPANS * SPAN_BYTES:
            return b"".join(self._bytes(name, 0, size) for name in pieces)
        found = bytearray()
        for number in range(SPANS):
            start = number * (total - SPAN_BYTES) // (SPANS - 1)
            while (left := SPAN_BYTES * (number + 1) - len(found)) > 0:  # a span may go on in the next piece
                piece, inside = divmod(start, size)
                found += self._bytes(pieces[piece], inside, min(left, size - inside))
                start = (piece + 1) * size
        return bytes(found)

    def _bytes(self, name: str, start: int, count: int) -> bytes:
        """Read some bytes of a tensor."""
        info = self.tensors[name]
        if info.file.suffix in PICKLES:
            return bytes(content(self.read(name))[start : start + count])
        found = bytearray(count)
        try:
            read_into(info, [(start, memoryview(found))])
        except OSError as error:
            raise self._unreadable(name, error) from error
        return bytes(found)

    def read_finite(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read one tensor, or some of its rows; refuse NaN and infinite values."""
        tensor = self.read(name, rows)
        if tensor.is_floating_point() and not all_finite(tensor):
            raise CheckpointError(
                f"{self.label if self.in_memory else self.tensors[name].file}: {name} contains NaN or"
                " infinite values",
                hint="the model is damaged, or was saved in a type that is too narrow for its values",
            )
        return tensor

    def _unreadable(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.tensors[name].file}: {name} cannot be read ({error})",
            hint="run again when no other program writes to the file, or fetch the file again",
        )

    def in_stored_names(
        self, tensors: Mapping[str, PartT], join: Callable[[Sequence[PartT]], PartT]
    ) -> dict[str, PartT]:
        """Return the tensors of an output by the names in files; ``join`` concatenates rows."""
        return dict(tensors)

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
        """Return the other files of the folder that belong to a model: tokenizer, processor, generation.

        A configuration in the authors' words, which is not read, is one of them.
        """
        if not self.root.is_dir():
            return []
        read = () if self.config is None else CONFIGS
        skipped = {*read, "transfusion.json", "README.md", ".gitattributes", *SETTINGS, *HEADS}
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
        """Find a model and read its headers; ``config`` replaces the configuration beside the weights."""
        root = resolve(reference)
        tensors = weights_in(root)
        if not tensors:
            raise CheckpointError(f"{reference}: no tensors in it", hint="is this the right file?")
        files = tuple(dict.fromkeys(info.file for info in tensors.values()))
        sentence = SentenceModules.around(root)
        tensors = tensors if sentence is None else {**tensors, **sentence.tensors}
        checkpoint = cls(str(reference), root, tensors, files, sentence=sentence)
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
        _require_values(tensors, label)
        checkpoint = cls(label, MEMORY, {}, (), module=module)
        if config is not None:
            checkpoint.configure(config)
        # Registered as a loaded pickle, so that `read` needs no special case for tensors in memory.
        file = MEMORY / WEIGHTS[3 if checkpoint.config_name == CONFIGS[1] else 2]
        here = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        checkpoint.tensors = {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, file) for name, tensor in here.items()
        }
        checkpoint.files, checkpoint._pickles = (file,), {file: here}
        return checkpoint

    def configure(self, config: str | Path | Mapping[str, Any]) -> None:
        """Set the configuration from a JSON file, or from its content."""
        self.config = dict(config) if isinstance(config, Mapping) else read_json(Path(config))
        self.config_name = CONFIGS["model_cfg" in self.config]


def _require_values(tensors: Mapping[str, Tensor], label: str) -> None:
    odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if odd or not tensors:
        raise CheckpointError(
            f"{label}: a mapping of names to tensors was expected"
            + (f", but {listing(odd)} are no tensors" if odd else ", but it is empty"),
            hint="give a module, or its state_dict() alone",
        )
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{label}: {len(empty)} tensor(s) have no values (device meta): {listing(empty)}",
            hint="load the weights into memory first, without offloading",
        )


# ── views ─────────────────────────────────────────────────────────────────────────────────

NOWHERE = -1
"""The number of a row that is not stored."""
_AT_ONCE = 2**22
"""The numbers of a stored tensor that are read at once."""


@dataclass(frozen=True, eq=False)
class RowSelection:
    """The rows of a view of one tensor: a range, or the number of each stored row, or `NOWHERE`."""

    rows: Rows | None = None
    """None for all rows."""
    dim: int = 0
    """The dimension that is selected from; 0 for a range."""
    fill: float = 0.0
    """The values of a row that is not stored."""
    stored: str = ""
    """The name of the stored tensor, if it is another than that of the view."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if self.rows is None:
            return stored
        count = len(self.rows) if isinstance(self.rows, Tensor) else self.rows.stop - self.rows.start
        return (*stored[: self.dim], count, *stored[self.dim + 1 :])

    @property
    def first(self) -> int:
        """The first row of a range."""
        return self.rows.start if isinstance(self.rows, slice) else 0

    def read(self, checkpoint: Checkpoint, name: str, rows: Rows | None) -> Tensor:
        """Read the view of a tensor, or some of its rows."""
        if isinstance(self.rows, Tensor):
            return self._picked(checkpoint, name, self.rows, rows)
        if self.rows is None:
            return checkpoint.read(name, rows)
        if isinstance(rows, Tensor):
            return checkpoint.read(name, rows + self.first)
        start, stop, _ = (rows or slice(None)).indices(self.rows.stop - self.first)
        return checkpoint.read(name, slice(self.first + start, self.first + stop))

    def _picked(self, checkpoint: Checkpoint, name: str, wanted: Tensor, rows: Rows | None) -> Tensor:
        if self.dim:
            stored, there = checkpoint.read(name, rows), wanted != NOWHERE
            found = torch.full(self.shape(tuple(stored.shape)), self.fill, dtype=stored.dtype)
            picked = stored.index_select(self.dim, wanted[there])
            return found.index_copy_(self.dim, there.nonzero().flatten(), picked)
        info, wanted = checkpoint.tensors[name], wanted if rows is None else wanted[rows]
        found = torch.full((len(wanted), *info.shape[1:]), self.fill, dtype=info.dtype)
        for block in row_blocks(found.shape, _AT_ONCE):  # the stored tensor is never held whole
            there = wanted[block] != NOWHERE
            found[block][there] = checkpoint.read(name, wanted[block][there])
        return found


@dataclass
class CheckpointView(Checkpoint):
    """A checkpoint, some of whose tensors are read under other names, or with other rows."""

    stored: Checkpoint | None = None
    selections: Mapping[str, RowSelection] = field(default_factory=dict)
    """By the name of the tensor in the view."""

    @classmethod
    def over(
        cls,
        stored: Checkpoint,
        selections: Mapping[str, RowSelection],
        names: Iterable[str] | None = None,
        **changed: Any,
    ) -> CheckpointView:
        """Return a view of all tensors, or of those of these names, with ``changed`` fields."""
        own = {one.name: getattr(stored, one.name) for one in fields(Checkpoint)}
        view = cls(**{**own, **changed}, stored=stored, selections=selections)
        view.tensors = {name: view._info(name) for name in (stored.tensors if names is None else names)}
        return view

    def _info(self, name: str) -> TensorInfo:
        checkpoint, place, selection = self._place(name)
        info = checkpoint.tensors[place]
        return replace(info, name=name, shape=selection.shape(info.shape))

    def _place(self, name: str) -> tuple[Checkpoint, str, RowSelection]:
        """Return where a tensor is stored."""
        assert self.stored is not None
        selection = self.selections.get(name, RowSelection())
        return self.stored, selection.stored or name, selection

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        checkpoint, stored, selection = self._place(name)
        return selection.read(checkpoint, stored, rows)

    def _bytes(self, name: str, start: int, count: int) -> bytes:
        checkpoint, stored, selection = self._place(name)
        return checkpoint._bytes(stored, selection.first * self.tensors[name].row_bytes + start, count)

    def in_stored_names(
        self, tensors: Mapping[str, PartT], join: Callable[[Sequence[PartT]], PartT]
    ) -> dict[str, PartT]:
        """Return the tensors of an output by the names of the file that it mirrors."""
        parts: dict[str, dict[int, PartT]] = {}
        for name, tensor in tensors.items():
            _, stored, selection = self._place(name)
            parts.setdefault(stored, {})[selection.first] = tensor
        whole = {name: [found[row] for row in sorted(found)] for name, found in parts.items()}
        return {name: found[0] if len(found) == 1 else join(found) for name, found in whole.items()}


_Size = Annotated[int, Field(ge=0, le=2**40)]


class _Described(TypedDict):
    """What `description` returns; of each tensor, the type and the shape."""

    label: str
    config: dict[str, Any] | None
    config_name: str | None
    tensors: dict[str, Annotated[list[str | list[_Size]], Field(min_length=2, max_length=2)]]


@dataclass
class HeadersOnly(Checkpoint):
    """A checkpoint whose weights are elsewhere: names, shapes, types and the configuration are known."""

    fingerprint: str = ""
    """That of the weights."""

    @classmethod
    def described(cls, about: Mapping[str, Any], fingerprint: str) -> HeadersOnly:
        """Return the checkpoint that `description` was made of."""
        validate(about, _Described, about.get("label"), hint="make the file again")
        file, tensors = MEMORY / WEIGHTS[0], {}
        for name, (dtype, shape) in about["tensors"].items():
            if not isinstance(kind := getattr(torch, dtype, None), torch.dtype):
                raise CheckpointError(f"{dtype} of {name} is no type of tensors", hint="make the file again")
            tensors[name] = TensorInfo(name, tuple(shape), kind, file)
        return cls(
            about["label"],
            MEMORY,
            tensors,
            (file,),
            about["config"],
            about["config_name"],
            fingerprint=fingerprint,
        )

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Refuse: the weights are not here."""
        raise CheckpointError(
            f"{self.label} is known by its shapes alone, and {name} is needed",
            hint="give `base`; a π by `via` and a LoRA need no weights of it",
        )


def description(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the shapes and the configuration of a checkpoint as plain data."""
    tensors = {
        name: [str(info.dtype).removeprefix("torch."), list(info.shape)]
        for name, info in checkpoint.tensors.items()
    }
    about = {"label": checkpoint.label, "config": checkpoint.config, "config_name": checkpoint.config_name}
    return {**about, "tensors": tensors}

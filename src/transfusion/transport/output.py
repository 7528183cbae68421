"""An output: lazy tensors by name, a configuration, files to copy and a record.

A moved model, a moved adapter, a merge, a refined result and π(A) are all outputs, built by functions. An
output computes its tensors when it is asked for them, some rows at a time, and is published whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment
from transfusion.errors import AdapterError, MismatchError, OutputError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.publishing import StagingFolder, open_staging
from transfusion.files.sentence_modules import SentenceModules, split_name
from transfusion.files.tensor_files import BLOCK, all_finite, row_blocks
from transfusion.files.writing import (
    Block,
    Files,
    LazyTensor,
    complete_model,
    output_shard_name,
    write_behind,
    write_shards,
)
from transfusion.model.model import Model
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.running.building import build, model_of
from transfusion.runtime.engines import Threads
from transfusion.runtime.resources import LOCAL, Resources, format_bytes
from transfusion.runtime.scratch import keep_blocks_only
from transfusion.runtime.shown import Shown
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.record import PI_FILE, RecordedFinetune

if TYPE_CHECKING:
    from rich.console import RenderableType

    from transfusion.transport.adapters.moved_adapter import MovedAdapter
    from transfusion.transport.adapters.outputs import AdapterFiles

COPIES, COPIES_OF_EACH = 20, 16
"""The largest number of blocks that a thread holds, for the result and for each change. About half are freed
blocks that the allocator keeps: measured by benchmarks/transporting.py."""


class Action(StrEnum):
    """How one tensor of an output is computed."""

    MOVED = "moved"
    """B + α·π(τ)."""
    CARRIED = "carried"
    """π(A_ft): B has no tensor to add a change to."""
    KEPT = "kept"
    """B's own tensor: the fine-tune does not have it."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of an output, computed when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """The type to store."""
    compute: Callable[[slice], Tensor]
    """Compute some rows, in any type. Without ``by_rows`` the only slice is the whole tensor."""
    stored: TensorPieces | None = None
    """The names in files, if they are others than the name in the output."""
    action: Action = Action.MOVED
    added: int = 0
    """The number of rows at the end that are carried over, for tokens that B does not have."""
    by_rows: bool = True

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def blocks(self) -> Iterator[slice]:
        """Yield the blocks of rows to compute."""
        return row_blocks(self.shape, BLOCK if self.by_rows and self.shape else None)

    def in_dtype(self, dtype: torch.dtype | None) -> OutputTensor:
        """Return the tensor stored in another floating type."""
        return replace(self, dtype=dtype) if dtype and self.dtype.is_floating_point else self


def recipe_of(
    finetuned: Sequence[RecordedFinetune],
    base: Model,
    onto: Model,
    alignment: Alignment,
    merging: MergeRule | None = None,
) -> dict[str, Any]:
    """Return everything that decides the values of an output."""
    vocabulary = alignment.provenance.vocabulary
    return {
        "finetuned": [one.fingerprint for one in finetuned],
        "alpha": [one.alpha.as_json() for one in finetuned],
        "base": base.fingerprint,
        "onto": onto.fingerprint,
        "alignment": alignment.digest,
        "merging": merging and merging.as_json(),
        **({"vocabulary": vocabulary["source"]} if vocabulary.get("moved") else {}),
    }


def nothing(*_: object) -> None:
    """Do nothing: the default of hooks."""


@dataclass(repr=False, eq=False)
class Output(Shown):
    """A model or an adapter for B whose tensors are computed on demand."""

    label: str
    """What it is, for messages."""
    onto: Model
    """B: the model whose files the output mirrors, or that its adapter is for."""
    tensors: Mapping[str, OutputTensor]
    """By canonical name; those of an adapter by their keys."""
    config: dict[str, Any] | None
    metadata: Callable[[], dict[str, Any]]
    """Return the record of the run; complete when everything has been computed."""
    texts: Callable[[Mapping[str, Any]], dict[str, str]]
    """Return the text files beside the weights, from the record."""
    recipe: Callable[[], dict[str, Any]] = dict
    """Return everything that decides the values; finished shards of an equal recipe are reused."""
    inputs: Sequence[Checkpoint] = ()
    """What it is computed from."""
    adapter_files: AdapterFiles | None = None
    """How an adapter is stored; None for a model, which is stored like B."""
    moved_adapter: MovedAdapter | None = None
    """The adapter that it was made of, if it is one moved adapter."""
    copied: Sequence[Path] = ()
    """Files that are copied as they are."""
    sentence: SentenceModules | None = None
    """What follows its encoder, if it is a folder of sentence-transformers."""
    pi: Alignment | None = None
    """The π to keep with the output, if no other file holds it."""
    notes: Sequence[str] = ()
    """Warnings for the user that are no reason to refuse the run."""
    dropped: Sequence[str] = ()
    """The tensors of B that the output does not have."""
    decisive: Sequence[str] = ()
    """Settings and ties that differ from B's and decide what the output computes."""
    like: nn.Module | None = None
    """A module of the output's class, if the user gave one."""
    no_change_error: str = ""
    """The error if no tensor differs from B's: that the fine-tune equals its base."""
    prepare: Callable[[Threads | None], None] = nothing
    """Compute what is needed before the first tensor."""
    expected: Mapping[str, int] = field(default_factory=dict)
    """What its refinement is expected to take, in a dry run."""
    changed: set[str] = field(default_factory=set)
    """The tensors computed so far that differ from B's."""
    uploaded: str | None = None
    """The address that it was uploaded to."""

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from transfusion.runtime.tables import facts

        plan = self.plan()
        counts = (f"{plan[what]} {what}" for what in (*map(str, Action), "dropped") if plan[what])
        rows = {
            "tensors": f"{plan['tensors']}: {', '.join(counts)}",
            "reads": format_bytes(plan["bytes_to_read"]),
            "writes": format_bytes(plan["bytes_to_write"]),
            "notes": "\n".join(self.notes),
            "uploaded": self.uploaded or "",
        }
        return Group(Text(self.label, style="bold"), facts(rows))

    def names(self, action: Action) -> list[str]:
        """Return the tensors that are moved, carried over or kept."""
        return [name for name, one in self.tensors.items() if one.action is action]

    def in_dtype(self, dtype: torch.dtype) -> Output:
        """Return the same output, stored in another floating type."""
        tensors = {name: one.in_dtype(dtype) for name, one in self.tensors.items()}
        return replace(self, tensors=tensors)

    def plan(self) -> dict[str, int]:
        """Return the numbers of tensors and the bytes to read and write, from headers alone."""
        return {
            "tensors": len(self.tensors),
            **{str(action): len(self.names(action)) for action in Action},
            "dropped": len(self.dropped),
            "bytes_to_read": sum(checkpoint.nbytes for checkpoint in self.inputs),
            "bytes_to_write": sum(one.nbytes for one in self.tensors.values()),
            **self.expected,
        }

    # ── in memory ────────────────────────────────────────────────────────────────────────────

    def rows(self, name: str, rows: slice) -> Tensor:
        """Compute some rows of a tensor in its stored type; refuse values that this type cannot hold."""
        tensor = self.tensors[name]
        made = tensor.compute(rows)
        if made.is_floating_point() and not all_finite(made, tensor.dtype):
            self._refuse_inputs(name)
            raise OutputError(
                f"{name} has values that {str(tensor.dtype).removeprefix('torch.')} cannot hold",
                hint="choose a wider `dtype`, or a smaller `alpha`",
            )
        return made.to(tensor.dtype)

    def _refuse_inputs(self, name: str) -> None:
        """Refuse NaN and infinite values of the inputs; look at tensors of this name first."""
        for checkpoint in self.inputs:
            for stored in sorted(checkpoint.tensors, key=lambda stored: not stored.endswith(name)):
                checkpoint.read_finite(stored)

    def tensor(self, name: str) -> Tensor:
        """Compute one tensor."""
        blocks = [self.rows(name, rows) for rows in self.tensors[name].blocks()]
        return torch.cat(blocks) if self.tensors[name].shape else blocks[0].clone()

    def state_dict(self) -> dict[str, Tensor]:
        """Compute the whole output in memory, under the names that its library loads."""
        self.prepare(None)
        if self.adapter_files is not None:
            return {key: self.tensor(key) for key in self.tensors}
        state: dict[str, Tensor] = {}
        for name in self.tensors:
            state |= self._pieces(name).split(self.tensor(name))
        self.check()
        stored = self.onto.checkpoint.in_stored_names(state, lambda parts: torch.cat(list(parts)))
        others = self.onto.checkpoint.companions
        return stored | ({} if others is None else {name: others.read(name) for name in others.tensors})

    def module(self) -> nn.Module:
        """Return the output as a new module of its library, in memory."""
        return build(self.model(), None)

    def shaped(self) -> Model:
        """Return a model with the output's tensors, for their names and shapes: B, if it has them."""
        shapes = {name: self.onto.info(name).shape for name in self.onto.architecture.tensors}
        own = {name: one.shape for name, one in self.tensors.items()}
        return self.model() if self.dropped or self.decisive or own != shapes else self.onto

    def model(self) -> Model:
        """Return the output as a model in memory."""
        if self.adapter_files is not None:
            raise AdapterError(
                "an adapter is not a module",
                hint="full=True returns a model; or save the adapter, and load it on B with PEFT",
            )
        state = {name: one for name, one in self.state_dict().items() if not split_name(name)[0]}
        return model_of(state, self.config, like=self.like, label=self.label)

    def check(self) -> None:
        """Refuse inputs that changed during the run, and a fine-tune that equals its base."""
        for checkpoint in self.inputs:
            checkpoint.require_unchanged()
        if self.no_change_error and not self.changed:
            raise MismatchError(
                self.no_change_error, hint="check that FINETUNED is the fine-tune, and not its base"
            )

    # ── in files ─────────────────────────────────────────────────────────────────────────────

    def save(
        self,
        path: str | Path,
        *,
        force: bool = False,
        resources: Resources = LOCAL,
        on_tensor: Callable[[str], None] = nothing,
    ) -> Path:
        """Write the output: all of it or nothing.

        ``path`` is a folder; a model whose path ends in ``.safetensors`` becomes that single file. Files that
        an interrupted run with the same inputs and settings had finished are kept.
        ``force`` replaces an existing output.
        ``resources`` are threads and memory; they do not change what is written.
        ``on_tensor`` is called with the name of every tensor.
        """
        with open_staging(Path(path), force=force) as staging:
            self.write(staging, on_tensor, resources)
            self.keep_pi(staging)
        return Path(path)

    def keep_pi(self, staging: StagingFolder) -> None:
        """Keep π in the output's folder; a single file has none."""
        if self.pi is not None and staging.path.suffix != ".safetensors":
            self.pi.save(staging.output / PI_FILE, force=True)

    def write(
        self,
        staging: StagingFolder,
        on_tensor: Callable[[str], None] = nothing,
        resources: Resources = LOCAL,
    ) -> None:
        """Write the output into a staging folder."""
        if self.adapter_files is not None:
            self._write_adapter(self.adapter_files, staging, on_tensor)
            return
        files = self._files(staging.path, on_tensor)
        with ExitStack() as stack:
            jobs = self.within_memory(replace(resources, engine="local", address=None)).jobs
            threads = stack.enter_context(Threads.opened(jobs))
            staging.begin({**self.recipe(), "files": _contents(files)})
            staging.planned = {
                name: (one.shape, one.dtype) for parts in files.values() for name, one in parts.items()
            }
            self.prepare(threads)
            keep_blocks_only()
            write_shards(staging, files, changed_tensors=self.changed, workers=threads)
            write_behind(staging, self._behind_encoder(staging.path, on_tensor))
            self.check()
            complete_model(
                staging,
                files,
                like=self.onto.checkpoint,
                config=self.config,
                auxiliary_files=self.copied,
                texts=self.texts(self.metadata()) | (self.sentence.files() if self.sentence else {}),
            )

    def _write_adapter(
        self, files: AdapterFiles, staging: StagingFolder, on_tensor: Callable[[str], None]
    ) -> None:
        files.require_path(staging.path)
        staging.begin()
        self.prepare(None)
        made: dict[str, Tensor] = {}
        for key in self.tensors:
            on_tensor(key)
            made[key] = self.tensor(key).contiguous()
        staging.planned = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in made.items()}
        files.write(staging, made, self)

    def within_memory(self, resources: Resources) -> Resources:
        """Return the resources with as many threads as fit into the memory; refuse too little of it."""
        sizes = {name: _block_bytes(one) for name, one in self.tensors.items()}
        largest = max(sizes, key=sizes.__getitem__)
        changes = max(1, len(self.inputs) - 2)  # beside A and B
        each = (COPIES + COPIES_OF_EACH * changes) * sizes[largest]
        return resources.within_memory(each, f"one thread (most of it for {largest})")

    def _files(self, path: Path, on_tensor: Callable[[str], None]) -> Files:
        """Return the weight files of an output at this path: B's, with the tensors of each.

        Tensors that B lacks go into the last file. Refuse a tensor that would be written twice.
        """
        like = self.onto
        shards: dict[Path, dict[str, LazyTensor]] = {file: {} for file in like.checkpoint.files}
        counts: Counter[str] = Counter()
        for name in self.tensors:
            if split_name(name)[0]:
                continue
            mine = name in like.names
            file = like.info(name).file if mine else like.checkpoint.files[-1]
            pieces = self._lazy_tensors(name, on_tensor)
            counts.update(pieces.keys())
            for piece, lazy_tensor in pieces.items():
                own = like.checkpoint.tensors.get(piece) if mine else None
                shards[own.file if own else file][piece] = lazy_tensor
        if twice := [name for name, count in counts.items() if count > 1]:
            raise OutputError(
                f"{listing(twice)} would be written more than once",
                hint="this is a bug; please report it with the names of B's tensors",
            )
        join, others = like.checkpoint.in_stored_names, self._companions()
        whole = {file: join(tensors, LazyTensor.joined) | others[file] for file, tensors in shards.items()}
        there = {file: tensors for file, tensors in whole.items() if tensors}
        return output_shard_name(there, path, like.family.library)

    def _behind_encoder(self, path: Path, on_tensor: Callable[[str], None]) -> Files:
        """Return the tensors of the modules behind the encoder, by their folders."""
        found: Files = {}
        for name in self.tensors:
            folder, own = split_name(name)
            if folder:
                found.setdefault(folder, {})[own] = self._lazy_tensors(name, on_tensor)[name]
        if found and path.suffix == ".safetensors":
            raise OutputError(
                f"{path.name} would not hold {listing(found)}, which have files of their own",
                hint="give a folder as the output",
            )
        return found

    def _companions(self) -> dict[Path, dict[str, LazyTensor]]:
        """Return the tensors of other models in B's files, which stay as they are."""
        checkpoint = self.onto.checkpoint
        found: dict[Path, dict[str, LazyTensor]] = {file: {} for file in checkpoint.files}
        if (others := checkpoint.companions) is not None:
            for name, info in others.tensors.items():
                found[info.file][name] = LazyTensor(info.shape, info.dtype, partial(_as_stored, others, name))
        return found

    def _pieces(self, name: str) -> TensorPieces:
        return self.tensors[name].stored or TensorPieces(((name,),))

    def _lazy_tensors(self, name: str, on_tensor: Callable[[str], None]) -> dict[str, LazyTensor]:
        """Return the stored pieces of a tensor, each computed when it is written."""
        tensor, stored = self.tensors[name], self._pieces(name)

        def whole() -> Iterator[Block]:
            on_tensor(name)
            yield from (partial(self.rows, name, rows) for rows in tensor.blocks())

        def piece(one: str) -> Iterator[Block]:
            if one == stored.names[0]:
                on_tensor(name)
            yield partial(self._piece, name, *stored.place(one))

        if len(stored.names) == 1 and not stored.stacked:
            return {stored.names[0]: LazyTensor(tensor.shape, tensor.dtype, whole)}
        extents = (stored.height, *tensor.shape[2 if stored.stacked else 1 :])
        return {one: LazyTensor(extents, tensor.dtype, partial(piece, one)) for one in stored.names}

    def _piece(self, name: str, rows: slice, inside: slice) -> Tensor:
        made = self.rows(name, rows) if self.tensors[name].by_rows else self.tensor(name)[rows]
        return made[0, inside] if self._pieces(name).stacked else made


def _as_stored(checkpoint: Checkpoint, name: str) -> Iterator[Block]:
    shape = checkpoint.tensors[name].shape
    rows = row_blocks(shape, BLOCK) if shape else iter([None])
    return (partial(checkpoint.read, name, some) for some in rows)


def _block_bytes(tensor: OutputTensor) -> int:
    """Return the bytes of the largest block of a tensor, in the type that it is computed in."""
    rows = next(tensor.blocks(), slice(0, 0))
    numbers = (rows.stop - rows.start) * torch.Size(tensor.shape[1:]).numel()
    return numbers * (8 if tensor.dtype.itemsize > 2 else 4)


def _contents(files: Files) -> dict[str, dict[str, list[Any]]]:
    return {
        file: {name: [str(lazy_tensor.dtype), *lazy_tensor.shape] for name, lazy_tensor in parts.items()}
        for file, parts in files.items()
    }

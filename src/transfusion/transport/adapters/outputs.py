"""Adapters as outputs: one that was moved, or a LoRA made of changed weights; and how they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transfusion.errors import OutputError, listing
from transfusion.files.publishing import StagingFolder, write_json, write_text
from transfusion.files.writing import LazyTensor, write_shard
from transfusion.model.model import Model
from transfusion.model.pair import are_kin
from transfusion.model.recognition import claims
from transfusion.runtime.run_record import shareable
from transfusion.transport.adapters.settings import CONFIG, WEIGHTS
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.model_card import pipeline_tag
from transfusion.transport.output import Action, Output, OutputTensor, recipe_of
from transfusion.transport.record import HEADER, OutputRecord

if TYPE_CHECKING:
    from transfusion.transport.adapters.moved_adapter import MovedAdapter

SINGLE = ".safetensors"
_STALE = (HEADER, "modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
"""Entries of a LoRA file's header that are false for other tensors."""


def adapter_output(
    moved: MovedAdapter, *, dtype: torch.dtype | None = None, record: OutputRecord | None = None
) -> Output:
    """Return a moved adapter as an output: of the same kind and rank, for B."""
    adapter, carried, tensors = moved.adapter, moved.carried, dict[str, OutputTensor]()
    stored = adapter.checkpoint.tensors
    for factor in moved.factors:
        action, info = Action.CARRIED if factor.tensor in carried else Action.MOVED, stored[factor.key]
        made = computed_whole(info.shape, dtype or info.dtype, partial(moved.on_b, factor), action)
        tensors[factor.key] = made
    for key in adapter.kept(moved.base):  # those of another model, as they are
        read = partial(adapter.checkpoint.read_finite, key)
        tensors[key] = computed_whole(stored[key].shape, stored[key].dtype, read, Action.KEPT)

    def about() -> dict[str, Any]:
        return {
            "peft_type": adapter.kind.name,
            **adapter.about,
            "moved": len(moved.factors) - len(carried),
            "carried": carried,
            **({"left_out": left_out} if (left_out := moved.left_out) else {}),
            "fits_as_it_is": moved.fits_as_it_is(dtype),
        }

    output = output_for_b((moved,), tensors, adapter.config, about, record or OutputRecord(), dtype)
    return replace(output, notes=adapter.notes(moved.base), moved_adapter=moved)


def output_for_b(
    moved: Sequence[MovedAdapter],
    tensors: Mapping[str, OutputTensor],
    settings: Mapping[str, Any],
    about: Callable[[], dict[str, Any]],
    record: OutputRecord,
    dtype: torch.dtype | None,
    merging: MergeRule | None = None,
) -> Output:
    """Return tensors that were made of moved adapters as an adapter for B, stored like the first of them."""
    first, files = moved[0], moved[0].adapter.files
    if are_kin(first.base, first.onto):  # what the header says about the base is false for B
        false = claims(files.header)
        files = replace(files, header={key: one for key, one in files.header.items() if key not in false})
    inputs = moved, first.base, first.onto, first.alignment, merging

    def metadata() -> dict[str, Any]:
        stored = dtype and str(dtype).removeprefix("torch.")
        purpose = pipeline_tag("peft", settings)
        head = next((one for one in moved if one.has_heads), None)
        return {
            **record.of(*inputs),
            **({} if head is None else {"class": head.class_of_b, "labels": head.labels}),
            "kind": "adapter",
            "dtype": stored,
            "pipeline_tag": purpose,
            **about(),
        }

    return Output(
        f"{listing(one.label for one in moved)}, moved onto {first.onto.label}",
        first.onto,
        tensors,
        config_for(first.onto, settings),
        metadata,
        record.texts,
        recipe=partial(recipe_of, *inputs),
        inputs=[*(one.checkpoint for one in moved), first.base.checkpoint, first.onto.checkpoint],
        adapter_files=files,
        pi=first.alignment if record.keeps_pi else None,
    )


def lora_output(
    label: str,
    dense: Output,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    metadata: Callable[[], dict[str, Any]],
    dtype: torch.dtype | None = None,
) -> Output:
    """Return a LoRA in place of a model's changed weights, by the keys of its file."""
    made = {
        key: computed_whole(tuple(one.shape), dtype or torch.float32, partial(tensors.__getitem__, key))
        for key, one in tensors.items()
    }
    return Output(
        label,
        dense.onto,
        made,
        config_for(dense.onto, settings),
        metadata,
        dense.texts,
        inputs=dense.inputs,
        adapter_files=AdapterFiles(),
        pi=dense.pi,
    )


def computed_whole(
    shape: tuple[int, ...], dtype: torch.dtype, compute: Callable[[], Tensor], action: Action = Action.MOVED
) -> OutputTensor:
    """Return a tensor of an output that is computed as a whole."""
    return OutputTensor(shape, dtype, lambda _: compute(), action=action, by_rows=False)


def config_for(onto: Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's configuration with B as its base: as the user named it, as PEFT does."""
    reference, _, revision = onto.label.partition("@")
    local = Path(onto.label).expanduser()
    return {
        **settings,
        "base_model_name_or_path": str(local) if local.exists() else reference,
        "revision": None if local.exists() else revision or None,
    }


# ── files ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AdapterFiles:
    """How an adapter is stored: PEFT's folder, or a LoRA file whose header says how it was made."""

    lora: str | None = None  # the name of the LoRA file in a folder; None for PEFT's files
    header: Mapping[str, str] = field(default_factory=dict)  # the header of the LoRA before it was moved

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
        lazy = {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}
        if self.lora is None:
            write_shard(staging.output / WEIGHTS[0], lazy)
            write_json(staging.output / CONFIG, output.config or {})
        else:
            header = {key: text for key, text in self.header.items() if key not in _STALE} or {"format": "pt"}
            header[HEADER] = json.dumps(shareable(metadata), ensure_ascii=False)
            name = staging.path.name if single else self.lora
            write_shard(staging.output / name, dict(sorted(lazy.items())), metadata=header)
        if not single:
            for name, text in output.texts(metadata).items():
                write_text(staging.output / name, text)

"""Adapters for B as outputs: a moved adapter, or a LoRA whose tensors are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.model.model import Model
from transfusion.transport.adapters.adapter_files import PeftFiles
from transfusion.transport.adapters.adapter_transport import MovedAdapter
from transfusion.transport.output import Action, Output, OutputTensor, recipe_of
from transfusion.transport.output_record import OutputRecord


def adapter_output(
    moved: MovedAdapter, *, dtype: torch.dtype | None = None, record: OutputRecord | None = None
) -> Output:
    """Return a moved adapter as an output: of the same kind and rank, for B."""
    adapter, record = moved.adapter, record or OutputRecord()
    stored, carried = adapter.checkpoint.tensors, moved.carried
    tensors = {
        factor.key: OutputTensor(
            stored[factor.key].shape,
            dtype or stored[factor.key].dtype,
            partial(_whole, partial(moved.moved, factor)),
            action=Action.CARRIED if factor.tensor in carried else Action.MOVED,
            by_rows=False,
        )
        for factor in moved.factors
    }
    for key in adapter.kept(moved.base):  # those of another model, as they are
        read = partial(_whole, partial(adapter.checkpoint.read_finite, key))
        tensors[key] = OutputTensor(
            stored[key].shape, stored[key].dtype, read, action=Action.KEPT, by_rows=False
        )

    def metadata() -> dict[str, Any]:
        return {
            **record.of((moved,), moved.base, moved.onto, moved.alignment),
            "kind": "adapter",
            "peft_type": adapter.kind.name,
            **adapter.stated_format,
            **adapter.converted,
            "dtype": dtype and str(dtype).removeprefix("torch."),
            "moved": len(moved.factors) - len(carried),
            "carried": carried,
            "fits_as_it_is": moved.fits_as_it_is(dtype),
        }

    return Output(
        f"{adapter.label}, moved onto {moved.onto.label}",
        moved.onto,
        tensors,
        config_for(moved.onto, adapter.config),
        metadata,
        record.texts,
        recipe=partial(recipe_of, (moved,), moved.base, moved.onto, moved.alignment),
        inputs=[adapter.checkpoint, moved.base.checkpoint, moved.onto.checkpoint],
        adapter=adapter.files,
        pi=moved.alignment if record.keeps_pi else None,
        notes=adapter.notes(moved.base),
        moved=moved,
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
        key: OutputTensor(
            tuple(one.shape),
            dtype or torch.float32,
            partial(_whole, partial(tensors.__getitem__, key)),
            by_rows=False,
        )
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
        adapter=PeftFiles(),
        pi=dense.pi,
    )


def config_for(onto: Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's configuration with B as its base: as the user named it, as PEFT does."""
    reference, _, revision = onto.label.partition("@")
    local = Path(onto.label).expanduser()
    return {
        **settings,
        "base_model_name_or_path": str(local) if local.exists() else reference,
        "revision": None if local.exists() else revision or None,
    }


def _whole(compute: Callable[[], Tensor], _: slice) -> Tensor:
    return compute()

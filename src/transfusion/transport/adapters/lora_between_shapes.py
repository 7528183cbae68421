"""LoRA in, LoRA out between models of different shapes, at the same rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.provenance import PLANNED
from transfusion.architecture.naming import Naming
from transfusion.model.model import Model
from transfusion.transport.adapters.move import lora_output
from transfusion.transport.output import Action, Output
from transfusion.transport.record import OutputRecord, RecordedFinetune
from transfusion.transport.refinement.refine import adapter_tensors, lora_config, with_lora


def lora_between_shapes(
    dense: Output,
    unmoved: Output,
    source: RecordedFinetune,
    base: Model,
    alignment: Alignment,
    lora: tuple[int, Collection[str], Collection[str]],
    dtype: torch.dtype | None,
    record: OutputRecord,
) -> Output:
    """Return an adapter for B whose products are the nearest of their rank to the moved changes.

    ``dense`` is B with all of the moved change, ``unmoved`` the same with α = 0. ``lora`` is the rank, and
    the tensors of B that the adapter changes and replaces.
    """
    onto, (rank, targets, wholes) = dense.onto, lora
    if alignment.provenance.method == PLANNED:  # for a dry run: shapes alone
        made: dict[str, torch.Tensor] = {}
        for name in targets:
            if len(shape := onto.info(name).shape) == 2:
                sizes = {"lora_A": (rank, shape[1]), "lora_B": (shape[0], rank)}
                made |= {f"{name}.{one}": torch.empty(size, device="meta") for one, size in sizes.items()}
        made |= {name: torch.empty(dense.tensors[name].shape, device="meta") for name in wholes}
        settings: dict[str, Any] = {}
        share = 1.0
    else:
        moved, kept = (one.in_dtype(torch.float32).module() for one in (dense, unmoved))
        naming = Naming(onto.family, live=True)
        student, shares = with_lora(moved, rank, kept, sorted(wholes), naming=naming, targets=targets)
        made, settings, share = adapter_tensors(student), lora_config(student), min(shares.values())

    def metadata() -> dict[str, Any]:
        return {
            **record.of((source,), base, onto, alignment),
            "kind": "adapter",
            "peft_type": "LORA",
            "dtype": dtype and str(dtype).removeprefix("torch."),
            "moved": len(made),
            "carried": dense.names(Action.CARRIED),
            "rank": rank,
            "kept": share,
        }

    label = f"{source.label}, moved onto {onto.label} as an adapter"
    return lora_output(label, dense, made, settings, metadata, dtype)

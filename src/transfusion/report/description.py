"""Descriptions: a model, an adapter or a π as plain data, for `inspect`, logs and reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from transfusion.alignment.alignment import Alignment, fixed_points
from transfusion.alignment.pi_file import is_alignment
from transfusion.architecture.architecture import Space
from transfusion.errors import SettingError
from transfusion.files.references import resolve
from transfusion.model.bases import compare_vocabularies
from transfusion.model.model import Model, Reference
from transfusion.model.vocabulary_map import describe_vocabulary, differing_digits
from transfusion.report.lora_description import describe_adapter, describe_lora
from transfusion.transport.adapters.adapter_opening import is_adapter, lora_file_in


def inspect(
    reference: Reference,
    *,
    beside: Reference | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe a model, an adapter or a file of π: the data behind ``transfusion inspect``.

    ``reference`` is a model's folder, file or hub id, a PEFT adapter, a LoRA file, or a file of π. ``beside``
    is another base: a model's vocabulary is compared with its own, an adapter is tried on it by names and
    shapes. ``config`` replaces the config.json.

    >>> about = transfusion.inspect("models/a")
    >>> about["family"], [axis["axis"] for axis in about["axes"] if axis["group"] == "permutation"][:3]
    ('vit', ['layer.*.x', 'layer.*.head', 'layer.*.qk'])
    >>> transfusion.inspect("pi.safetensors")["method"]
    'guarded'
    """
    if isinstance(reference, str | Path) and is_alignment(reference):
        if beside is not None:
            raise SettingError("`beside`: a file of π has no vocabulary of its own", hint="give a model")
        found = Alignment.load(reference)
        if found.other_shape:
            return describe_rectangular(found)
        return describe_alignment(found)
    if isinstance(reference, str | Path) and is_adapter(reference):
        if (file := lora_file_in(resolve(reference))) is None:
            return describe_adapter(str(reference), beside)
        if beside is not None:
            raise SettingError("`beside`: a LoRA file has no vocabulary of its own", hint="give a model")
        return describe_lora(str(reference), file)
    model = Model.open(reference, config=config)
    if beside is None:
        return describe_model(model)
    return {**describe_model(model), "vocabulary": _vocabularies(model, Model.open(beside, config=config))}


def _vocabularies(a: Model, b: Model) -> dict[str, Any]:
    """Compare two vocabularies token by token, or say why they cannot be compared."""
    found, reason = compare_vocabularies(a, b)
    if found is None:
        text = reason or "one of the two models has no vocabulary, or both are of different families"
        return {"with": b.label, "text": f"not compared: {text}"}
    digits = "" if found.is_identity else differing_digits(a.tokenizer_folder, b.tokenizer_folder)
    about = replace(found, digits=digits).about()
    return {"with": b.label, "text": describe_vocabulary(about), **about}


def describe_model(model: Model) -> dict[str, Any]:
    """Describe a model and its axes; the same axis of all blocks is one entry."""
    architecture = model.architecture
    kinds: dict[tuple[Any, ...], list[Space]] = defaultdict(list)
    for space in architecture.spaces.values():
        kinds[(_pattern(space.id), space.size, space.group, _pattern(space.parent))].append(space)
    axes = []
    for (pattern, size, group, parent), spaces in kinds.items():
        tensors = {
            _numberless(tensor): str(architecture.tensors[tensor].rename(_short))
            for space in spaces
            for tensor in architecture.occurrences[space.id]
        }
        axes.append(
            {
                "axis": pattern,
                "size": size,
                "count": len(spaces),
                "group": str(group),
                "within": parent,
                "stream": spaces[0].stream,
                "why": spaces[0].why or None,
                "tensors": tensors,
            }
        )
    checkpoint = model.checkpoint
    return {
        "model": model.label,
        "family": model.family.name,
        "library": model.family.library,
        "recognised_by": model.why,
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.nbytes,
        "dtypes": sorted({str(i.dtype).removeprefix("torch.") for i in checkpoint.tensors.values()}),
        "files": [] if checkpoint.in_memory else [file.name for file in checkpoint.files],
        "tensors": len(checkpoint.tensors),
        "heads": sorted(architecture.heads),
        "axes": axes,
    }


def describe_alignment(alignment: Alignment) -> dict[str, Any]:
    """Describe a π: the share of units in place per axis, the heads, the objective."""
    metadata = alignment.provenance
    axes: dict[str, dict[str, Any]] = {}
    for id in alignment.sizes:
        if (map_ := alignment.maps.get(id)) is None:
            continue
        stays = list(fixed_points(map_))
        axes[id] = {
            "kind": map_.kind,
            "size": map_.size,
            "maps": map_.blocks,
            "within": alignment.parents.get(id),
            "stays": sum(stays) / len(stays) if stays else None,
        }
        if map_.rotates:
            axes[id]["writes_apart"] = map_.writing is not None
    parents = set(alignment.parents.values())
    heads = {
        id: map_.index[0].tolist()
        for id in alignment.sizes
        if id in parents and (map_ := alignment.maps.get(id)) and map_.permutes
    }
    return {
        "family": metadata.family,
        "method": metadata.method,
        "residual": metadata.policy.residual,
        "inner": metadata.policy.inner,
        "heads_policy": metadata.policy.heads,
        "seed": metadata.seed,
        "options": dict(metadata.options),
        "source": {"name": metadata.source, "fingerprint": metadata.source_fingerprint},
        "target": {"name": metadata.target, "fingerprint": metadata.target_fingerprint},
        "version": metadata.version,
        "blake3": alignment.digest,
        "objective": list(metadata.objective),
        "advice": dict(metadata.advice) or None,
        "vocabulary": dict(metadata.vocabulary) or None,
        "axes": axes,
        "heads": heads,
    }


def describe_rectangular(alignment: Alignment) -> dict[str, Any]:
    """Describe a π between models of different shapes: the blocks that correspond, and every map."""
    made = alignment.provenance
    kept = [min(1.0, one.size / one.source_size) for one in alignment.maps.values()]
    return {
        "family": made.family,
        "method": made.method,
        "seed": made.seed,
        "options": dict(made.options),
        "source": {"name": made.source, "fingerprint": made.source_fingerprint},
        "target": {"name": made.target, "fingerprint": made.target_fingerprint},
        "version": made.version,
        "blake3": alignment.digest,
        "advice": dict(made.advice) or None,
        "vocabulary": dict(made.vocabulary) or None,
        "paths": {stack: [[i, j] for i, j, _ in path] for stack, path in alignment.paths.items()},
        "kept_share": fmean(kept),
        "maps": {name: [one.size, one.source_size] for name, one in alignment.maps.items()},
    }


def _pattern(id: str | None) -> str | None:
    """Return the name of an axis in any block: ``layer.*.head``."""
    return None if id is None else ".".join("*" if part.isdigit() else part for part in id.split("."))


def _short(id: str) -> str:
    """Return the name of the axis alone."""
    return id.rsplit(".", 1)[-1]


def _numberless(tensor: str) -> str:
    return ".".join("{}" if part.isdigit() else part for part in tensor.split("."))

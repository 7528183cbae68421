"""Descriptions of a model, an adapter or a π as plain data: what `inspect` returns."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.description import describe_alignment
from transfusion.alignment.pi_file import is_alignment
from transfusion.architecture.architecture import Space
from transfusion.errors import CheckpointError, SettingError, TransfusionError
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.lora_keys import DENOISER, format_of, read_key
from transfusion.files.references import resolve
from transfusion.files.tensor_files import header_metadata, headers
from transfusion.model.model import Model, Reference
from transfusion.model.pair import compare_vocabularies
from transfusion.model.recognition import claims, fitting_models
from transfusion.model.vocabulary_map import describe_vocabulary
from transfusion.runtime.shown import Shown
from transfusion.runtime.untrusted_files import parse_json
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.lora_file import is_adapter, lora_file_in
from transfusion.transport.record import HEADER, recorded_base

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUMBER = re.compile(r"(?<=[._])\d+(?=[._])")
_LEADING_NUMBERS = re.compile(r"^(?:\d+[._])+")
_TAGS = 8
"""The number of tags that are shown."""
_LONGEST = 120
"""The largest number of characters of an entry that are shown."""
_TRAINING = {
    "title": "modelspec.title",
    "author": "modelspec.author",
    "trigger": "modelspec.trigger_phrase",
    "steps": "ss_steps",
    "images": "ss_num_train_images",
    "trained by": "software",
}


class Description(Shown, dict[str, Any]):
    """What a model, an adapter or a π is: plain data that shows itself as the command line prints it."""

    def __rich__(self) -> RenderableType:
        from transfusion.report.views import described

        return described(self)


def inspect(
    reference: Reference,
    *,
    beside: Reference | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
) -> Description:
    """Describe a model, an adapter or a file of π: the data behind ``transfusion inspect``.

    ``reference`` is a model's folder, file or hub id, a PEFT adapter, a LoRA file, or a file of π. ``beside``
    is another base: a model's vocabulary is compared with its own, an adapter is tried on it by names and
    shapes. ``config`` replaces the config.json.

    >>> about = transfusion.inspect("models/a")
    >>> about["family"], [axis["axis"] for axis in about["axes"] if axis["group"] == "permutation"][:3]
    ('vit', ['layer.*.x', 'layer.*.head', 'layer.*.qk'])
    >>> transfusion.inspect("pi.safetensors")["method"]
    'auto'
    """
    place = reference if isinstance(reference, str | Path) else None
    if place is not None and is_alignment(place):
        if beside is not None:
            raise SettingError("`beside`: a file of π has no vocabulary of its own", hint="give a model")
        return Description(describe_alignment(Alignment.load(place)))
    if place is not None and is_adapter(place):
        if (file := lora_file_in(resolve(place))) is None:
            return Description(describe_adapter(str(place), beside))
        if beside is not None:
            raise SettingError("`beside`: a LoRA file has no vocabulary of its own", hint="give a model")
        return Description(describe_lora(str(place), file))
    model = Model.open(reference, config=config)
    about = Description(describe_model(model))
    if beside is not None:
        about["vocabulary"] = _vocabularies(model, Model.open(beside, config=config))
    return about


def _vocabularies(a: Model, b: Model) -> dict[str, Any]:
    """Compare two vocabularies token by token, or say why they cannot be compared."""
    found, reason = compare_vocabularies(a, b)
    if found is None:
        text = reason or "one of the two models has no vocabulary, or both are of different families"
        return {"with": b.label, "text": f"not compared: {text}"}
    about = found.about()
    return {"with": b.label, "text": describe_vocabulary(about), **about}


def describe_model(model: Model) -> dict[str, Any]:
    """Describe a model and its axes; the same axis of all blocks is one entry."""
    architecture = model.architecture
    kinds: dict[tuple[Any, ...], list[Space]] = defaultdict(list)
    for space in architecture.spaces.values():
        within = _pattern(space.parent) if space.parent else None
        kinds[(_pattern(space.id), space.size, space.group, within)].append(space)
    axes = []
    for (pattern, size, group, parent), spaces in kinds.items():
        tensors = {
            _pattern(tensor, "{}"): str(architecture.tensors[tensor].rename(_axis))
            for space in spaces
            for tensor in architecture.occurrences[space.id]
        }
        about = {"axis": pattern, "size": size, "count": len(spaces), "group": str(group), "within": parent}
        first = {"stream": spaces[0].stream, "why": spaces[0].why or None}
        axes.append({**about, **first, "tensors": tensors})
    checkpoint = model.checkpoint
    return {
        "model": model.label,
        "family": model.family.name,
        "library": model.family.library,
        "recognised_by": model.why,
        "unread_settings": model.unread_settings,
        **_stored(checkpoint),
        "files": [] if checkpoint.in_memory else [file.name for file in checkpoint.files],
        "heads": sorted(architecture.task_heads),
        "axes": axes,
    }


def _pattern(id: str, number: str = "*") -> str:
    """Return the name of an axis or a tensor in any block: ``layer.*.head``."""
    return ".".join(number if part.isdigit() else part for part in id.split("."))


def _axis(id: str) -> str:
    return id.rsplit(".", 1)[-1]


def _stored(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "tensors": len(checkpoint.tensors),
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.nbytes,
        "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in checkpoint.tensors.values()}),
    }


# ── adapters and LoRA files ──────────────────────────────────────────────────────────────────


def describe_lora(label: str, file: Path) -> dict[str, Any]:
    """Describe a LoRA file from its header; only the alphas are read."""
    tensors, header = headers(file), header_metadata(file)
    read = {name: read_key(name) for name in tensors}
    keys = {name: one for name, one in read.items() if one is not None}
    shapes = {name: info.shape for name, info in tensors.items()}
    checkpoint = Checkpoint(label, file, tensors, (file,))
    own = [one for one in keys.values() if one.component == DENOISER] or list(keys.values())
    modules = {one.module for one in own}
    refused = (f"{one.kind}: {one.refused}" for one in keys.values() if one.refused)
    down = [shapes[name] for name, one in keys.items() if one.part in ("lora_A", "hada_w1_b")]
    alphas = [checkpoint.read(name) for name, one in keys.items() if one.part == "alpha"]
    return {
        "lora": label,
        "format": format_of(keys),
        "kinds": sorted({one.kind for one in keys.values()} - {""}),
        "refused": next(refused, None),
        "unknown": [_shown(name) for name, one in read.items() if one is None],
        "fits": fitting_models(keys.values(), shapes, header),
        "trained_on": {key: _shown(text) for key, text in claims(header).items()},
        "moved_onto": recorded_base(file) if HEADER in header else None,
        "training": {name: _shown(header[key]) for name, key in _TRAINING.items() if header.get(key)},
        "tags": _tags(header),
        "ranks": _counted(shape[0] for shape in down if shape),
        "alphas": _counted(round(float(alpha), 6) for alpha in alphas if alpha.numel() == 1),
        "components": dict(Counter(one for _, one in {(k.owner, k.component) for k in keys.values()})),
        "blocks": _blocks(modules),
        "modules": dict(sorted(Counter(_NUMBER.sub("*", one, count=1) for one in modules).items())),
        "kinds_of_modules": _kinds(modules),
        **_stored(checkpoint),
    }


def describe_adapter(label: str, beside: Reference | None = None) -> dict[str, Any]:
    """Describe a PEFT adapter from its configuration and header, and say whether it fits a base.

    The base is ``beside``, or the one that the adapter names, if that is a folder here.
    """
    adapter = Adapter.open(label)
    config, checkpoint = adapter.config, adapter.checkpoint
    named, revision = (_shown(config.get(key) or "") for key in ("base_model_name_or_path", "revision"))
    base = beside if beside is not None else named if named and Path(named).is_dir() else None
    return {
        "adapter": label,
        "kind": adapter.kind.name,
        "task": config.get("task_type"),
        "base": f"{named}@{revision}" if revision else named or None,
        "class": _shown((config.get("auto_mapping") or {}).get("base_model_class") or "") or None,
        "moved_onto": recorded_base(checkpoint.root),
        "fits": None if base is None else _fit(adapter, base),
        "ranks": _counted(adapter.settings(one).rank for one in adapter.modules if adapter.kind.has_rank),
        "alpha": config.get("lora_alpha", config.get("alpha")),
        "virtual_tokens": config.get("num_virtual_tokens"),
        "whole": [_shown(name) for name in config.get("modules_to_save") or ()],
        "blocks": _blocks(adapter.modules),
        "modules": adapter.modules,
        "kinds_of_modules": _kinds(adapter.modules),
        **_stored(checkpoint),
    }


def _fit(adapter: Adapter, base: Reference) -> dict[str, Any]:
    """Say whether every tensor of an adapter has its place in a base, by names and shapes."""
    name = str(base) if isinstance(base, str | Path) else "the given model"
    try:
        model = Model.open(base)
        adapter.on_base(model).factors(model)
    except TransfusionError as error:
        return {"base": name, "fits": False, "reason": error.message}
    return {"base": name, "fits": True, "reason": None}


def _shown(text: str) -> str:
    """Return a text of an untrusted header on one line, without characters that steer a terminal."""
    return "".join(one for one in " ".join(text.split()) if one.isprintable())[:_LONGEST]


def _counted(values: Iterable[float]) -> dict[str, int]:
    """Return how often each value occurs, the smallest first."""
    return {f"{value:g}": count for value, count in sorted(Counter(values).items())}


def _kinds(modules: Collection[str]) -> dict[str, int]:
    """Return how many modules there are of each kind: of one name inside a block, such as ``attn1.to_q``.

    The first number in a name is a block's, and so is every later one that differs between modules.
    """
    alike: dict[str, list[str]] = {}
    for module in sorted(modules):
        alike.setdefault(_NUMBER.sub("*", module), []).append(module)
    counts = Counter[str]()
    for group in alike.values():
        numbers = [_NUMBER.findall(module) for module in group]
        varying = (place for place, one in enumerate(zip(*numbers, strict=True)) if len(set(one)) > 1)
        last = max(varying, default=0)
        for module in group:
            ends = [found.end() for found in _NUMBER.finditer(module)]
            inside = module[ends[last] + 1 :] if ends else module
            counts[_shown(_LEADING_NUMBERS.sub("", inside))] += 1
    return dict(counts.most_common())


def _blocks(modules: Iterable[str]) -> dict[str, list[int]]:
    """Return the numbers of the blocks that are changed, by kind of block."""
    found: dict[str, set[int]] = {}
    for module in set(modules):
        if (number := _NUMBER.search(module)) and len(number[0]) < 9:
            found.setdefault(module[: number.start()].rstrip("._"), set()).add(int(number[0]))
    return {_shown(name): sorted(numbers) for name, numbers in sorted(found.items())}


def _tags(header: Mapping[str, str]) -> list[str]:
    """Return the most frequent tags of the training images; kohya counts them for every folder."""
    try:
        folders = parse_json(header.get("ss_tag_frequency") or "{}", "ss_tag_frequency")
    except CheckpointError:
        return []
    counts = Counter[str]()
    for tags in folders.values() if isinstance(folders, Mapping) else ():
        for tag, count in tags.items() if isinstance(tags, Mapping) else ():
            counts[_shown(str(tag))] += count if isinstance(count, int) else 0
    return [tag for tag, _ in counts.most_common(_TAGS)]

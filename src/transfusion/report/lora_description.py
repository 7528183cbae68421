"""LoRA files and PEFT adapters as plain data, for `inspect`: what they change, and for which base."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from transfusion.errors import CheckpointError, TransfusionError
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.lora_keys import DENOISER, LoraKey, format_of, read_key
from transfusion.files.tensor_files import header_metadata, headers
from transfusion.model.lora_recognition import claims, fitting_models
from transfusion.model.model import Model, Reference
from transfusion.runtime.untrusted_files import parse_json
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.output_record import HEADER, recorded_base

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


def describe_lora(label: str, file: Path) -> dict[str, Any]:
    """Describe a LoRA file from its header; only the alphas are read."""
    tensors, header = headers(file), header_metadata(file)
    read = {name: read_key(name) for name in tensors}
    keys = {name: one for name, one in read.items() if one is not None}
    shapes = {name: info.shape for name, info in tensors.items()}
    checkpoint = Checkpoint(label, file, tensors, (file,))
    own = [one for one in keys.values() if one.component == DENOISER] or list(keys.values())
    return {
        "lora": label,
        "format": format_of(keys),
        "kinds": sorted({one.ending.kind for one in keys.values()} - {""}),
        "refused": _refused(keys.values()),
        "unknown": [_shown(name) for name, one in read.items() if one is None],
        "fits": fitting_models(keys.values(), shapes),
        "trained_on": {key: _shown(text) for key, text in claims(header).items()},
        "moved_onto": recorded_base(file) if HEADER in header else None,
        "training": {name: _shown(header[key]) for name, key in _TRAINING.items() if header.get(key)},
        "tags": _tags(header),
        "ranks": _counted(_ranks(keys, shapes)),
        "alphas": _counted(_alphas(keys, checkpoint)),
        "components": dict(Counter(one for _, one in {(k.owner, k.component) for k in keys.values()})),
        "blocks": _blocks(one.module for one in own),
        "modules": dict(sorted(Counter(_numberless(one) for one in {k.module for k in own}).items())),
        "kinds_of_modules": _kinds({one.module for one in own}),
        "tensors": len(tensors),
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.nbytes,
        "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in tensors.values()}),
    }


def describe_adapter(label: str, beside: Reference | None = None) -> dict[str, Any]:
    """Describe a PEFT adapter from its configuration and header, and say whether it fits a base.

    The base is ``beside``, or the one that the adapter names, if that is a folder here.
    """
    adapter = Adapter.open(label)
    config, checkpoint = adapter.config, adapter.checkpoint
    named, revision = (_shown(config.get(key) or "") for key in ("base_model_name_or_path", "revision"))
    base = beside if beside is not None else named if named and Path(named).is_dir() else None
    rank = adapter.kind.rank
    return {
        "adapter": label,
        "kind": adapter.kind.name,
        "task": config.get("task_type"),
        "base": f"{named}@{revision}" if revision else named or None,
        "class": _shown((config.get("auto_mapping") or {}).get("base_model_class") or "") or None,
        "moved_onto": recorded_base(checkpoint.root),
        "fits": None if base is None else _fit(adapter, base),
        "ranks": _counted(rank(adapter.settings(one)) for one in adapter.modules) if rank else {},
        "alpha": config.get("lora_alpha", config.get("alpha")),
        "virtual_tokens": config.get("num_virtual_tokens"),
        "whole": [_shown(name) for name in config.get("modules_to_save") or ()],
        "blocks": _blocks(adapter.modules),
        "modules": adapter.modules,
        "kinds_of_modules": _kinds(adapter.modules),
        "tensors": len(checkpoint.tensors),
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.nbytes,
        "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in checkpoint.tensors.values()}),
    }


def _fit(adapter: Adapter, base: Reference) -> dict[str, Any]:
    """Say whether every tensor of an adapter has its place in a base, by names and shapes."""
    name = str(base) if isinstance(base, str | Path) else "the given model"
    try:
        adapter.factors(Model.open(base))
    except TransfusionError as error:
        return {"base": name, "fits": False, "reason": error.message}
    return {"base": name, "fits": True, "reason": None}


def _shown(text: str) -> str:
    """Return a text of an untrusted header on one line, without characters that steer a terminal."""
    return "".join(one for one in " ".join(text.split()) if one.isprintable())[:_LONGEST]


def _refused(keys: Iterable[LoraKey]) -> str | None:
    """Return why it cannot be moved; None if it can."""
    return next((f"{one.ending.kind}: {one.ending.refused}" for one in keys if one.ending.refused), None)


def _ranks(keys: Mapping[str, LoraKey], shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    down = (name for name, one in keys.items() if one.part in ("lora_A", "hada_w1_b"))
    return [shapes[name][0] for name in down if shapes[name]]


def _alphas(keys: Mapping[str, LoraKey], checkpoint: Checkpoint) -> list[float]:
    found = (checkpoint.read(name) for name, one in keys.items() if one.part == "alpha")
    return [round(float(alpha), 6) for alpha in found if alpha.numel() == 1]


def _counted(values: Iterable[float]) -> dict[str, int]:
    """Return how often each value occurs, the smallest first."""
    return {f"{value:g}": count for value, count in sorted(Counter(values).items())}


def _numberless(module: str) -> str:
    return _NUMBER.sub("*", module, count=1)


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

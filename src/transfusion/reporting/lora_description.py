"""A LoRA file as plain data, for `inspect`: what it is, what it changes, and what it was trained on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transfusion.checkpoint.checkpoint import Checkpoint
from transfusion.checkpoint.lora_keys import DENOISER, LoraKey, format_of, read_key
from transfusion.checkpoint.tensor_files import header_metadata, headers
from transfusion.errors import CheckpointError
from transfusion.model.lora_recognition import claims, fitting_models
from transfusion.runtime.untrusted_files import parse_json
from transfusion.transportation.output_record import HEADER, recorded_base

_FIRST_NUMBER = re.compile(r"(?<=[._])\d+(?=[._])")
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
        "blocks": _blocks(own),
        "modules": dict(sorted(Counter(_numberless(one) for one in {k.module for k in own}).items())),
        "tensors": len(tensors),
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.nbytes,
        "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in tensors.values()}),
    }


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
    return _FIRST_NUMBER.sub("*", module, count=1)


def _blocks(keys: Iterable[LoraKey]) -> dict[str, list[int]]:
    """Return the numbers of the blocks that are changed, by kind of block."""
    found: dict[str, set[int]] = {}
    for module in {one.module for one in keys}:
        if (number := _FIRST_NUMBER.search(module)) and len(number[0]) < 9:
            found.setdefault(module[: number.start()].rstrip("._"), set()).add(int(number[0]))
    return {name: sorted(numbers) for name, numbers in sorted(found.items())}


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

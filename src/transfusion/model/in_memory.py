"""Models in memory: a module, or its state dict, becomes a checkpoint without any file.

No library is imported here: the attributes of a module show which library it is from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from transfusion.errors import CheckpointError
from transfusion.files.checkpoint import Checkpoint

InMemory: TypeAlias = nn.Module | Mapping[str, Tensor]


def hold_in_memory(model: InMemory, config: str | Path | Mapping[str, Any] | None = None) -> Checkpoint:
    """Return a module or a state dict as a checkpoint; ``config`` replaces the module's own configuration."""
    if isinstance(model, nn.Module):
        whole = _unwrapped(model)
        label = f"{type(whole).__name__} in memory"
        if getattr(whole, "peft_config", None):
            raise CheckpointError(
                f"{label}: the module has an adapter in it",
                hint="call merge_and_unload() to get a plain model; or save the adapter and give its folder",
            )
        found = configuration(whole) if config is None else config
        held = Checkpoint.of(held_tensors(whole), found, label, whole)
        if held.config is None:  # enough to recognise the family, too little to write a config.json
            held.config = _sizes_of_open_clip(whole)
        return held
    if isinstance(model, Mapping):
        return Checkpoint.of(model, config)
    raise CheckpointError(
        f"an object of type {type(model).__name__} is not a model",
        hint="give a path, a hub id, a module, or a state dict",
    )


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a saved file would hold: tied tensors once, and no computed buffers."""
    second = getattr(module, "all_tied_weights_keys", None) or ()  # names of transformers
    computed = getattr(module, "_keys_to_ignore_on_save", None) or ()
    tensors = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: name in second):
        first.setdefault(id(tensors[name]), name)
    kept = set(first.values()).difference(computed)
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def configuration(module: nn.Module) -> dict[str, Any] | None:
    """Return a module's configuration as its config.json would hold it; None if the module has none."""
    own: Any = getattr(module, "config", None)
    if hasattr(own, "to_json_string"):  # transformers
        info: dict[str, Any] = json.loads(own.to_json_string(use_diff=True))
        dtype = getattr(module, "dtype", None)
        kind = {"dtype": str(dtype).removeprefix("torch.")} if dtype else {}
        return {**info, "architectures": [type(module).__name__], **kind}
    if isinstance(own, Mapping) and hasattr(module, "register_to_config"):  # diffusers
        settings = {key: value for key, value in own.items() if not key.startswith("_")}
        return {"_class_name": type(module).__name__, **json.loads(json.dumps(settings))}  # as in a file
    about = getattr(module, "pretrained_cfg", None)
    if not isinstance(about, Mapping) or "architecture" not in about:
        return None
    # timm does not keep the number of heads
    heads = next((part.num_heads for part in module.modules() if hasattr(part, "num_heads")), None)
    return {
        "architecture": about["architecture"],
        "num_classes": getattr(module, "num_classes", None),
        "model_args": {} if heads is None else {"num_heads": heads},
        "pretrained_cfg": {key: value for key, value in about.items() if key != "architecture"},
    }


def _sizes_of_open_clip(module: nn.Module) -> dict[str, Any] | None:
    """Return the number of heads in both towers of a CLIP, which does not follow from the shapes."""
    towers: dict[str, dict[str, int]] = {}
    for name, tower in (
        ("vision", getattr(module, "visual", None)),
        ("text", getattr(module, "text", module)),
    ):
        blocks: Any = getattr(getattr(tower, "transformer", None), "resblocks", ())
        attention = getattr(blocks[0], "attn", None) if len(blocks) else None
        if not isinstance(attention, nn.MultiheadAttention):
            return None
        heads, width = attention.num_heads, attention.embed_dim
        sizes = {"layers": len(blocks), "width": width, "heads": heads, "head_width": width // heads}
        towers[f"{name}_cfg"] = sizes
    return {"model_cfg": towers}


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module without the wrappers of compilation and distributed training."""
    while isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        module = module.module
    inner = getattr(module, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else module

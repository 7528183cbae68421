"""Build the module of a model in its own library, from its folder or from memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.architecture.table import Config, Family
from transfusion.errors import ArchitectureError, listing
from transfusion.files.checkpoint import CONFIGS
from transfusion.model.model import Model
from transfusion.running.meta_models import buffers_as_parameters, refusing, require_modest_size
from transfusion.running.model_classes import (
    class_of_transformers,
    made_by_diffusers,
    quiet_transformers,
    require_plain_folder,
)
from transfusion.runtime.optional_libraries import require_library


def build(model: Model, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build the model in its own library, ready to run."""
    whole = (model.checkpoint.in_memory or model.original is not None) and model.family.library != "diffusers"
    made = in_type((_from_memory if whole else _from_folder)(model), dtype).eval()
    buffers_as_parameters(made, model)
    naming = Naming(model.family, live=True)
    for name, parameter in made.named_parameters(remove_duplicate=False):
        if (ours := naming.canonical(name)) in model.names:
            parameter.data = model.read(ours).to(dtype)  # as stored: libraries round on the way
    return made


def in_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module. Complex buffers stay, of which `Module.to` would drop the imaginary part."""
    made: nn.Module = module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )
    return made


def _from_memory(model: Model) -> nn.Module:
    held = model.checkpoint
    state = {name: held.read(name) for name in held.tensors}
    return module_of(model.family, held.config, state, like=held.module, label=held.label)


def _from_folder(model: Model) -> nn.Module:
    root = model.checkpoint.root
    read_by_library = model.family.library != "diffusers"  # there, names and shapes may tell everything
    if read_by_library and (root.is_file() or not any((root / name).exists() for name in CONFIGS)):
        raise ArchitectureError(
            f"{model.label}: a model can only be run from a folder with its config.json",
            hint="put the weights and the config.json into one folder and give that",
        )
    with refusing(model.family, model.label):
        require_modest_size(model)
        return _BUILDERS[model.family.library](model, root)


def _build_transformers(model: Model, root: Path) -> nn.Module:
    made_by = class_of_transformers(model.config, model.label)
    require_plain_folder(root)
    with quiet_transformers():
        module: nn.Module = made_by.from_pretrained(root, dtype=torch.float32, trust_remote_code=False)
    return module


def _build_open_clip(model: Model, root: Path) -> nn.Module:
    open_clip = require_library("open_clip")
    module: nn.Module = open_clip.create_model(f"local-dir:{root}")
    return module


def _build_timm(model: Model, root: Path) -> nn.Module:
    timm = require_library("timm")
    classes = model.config.get("num_classes")
    module: nn.Module = timm.create_model(f"local-dir:{root}", pretrained=False, num_classes=classes)
    return module  # the weights come from the model


def _build_diffusers(model: Model, root: Path) -> nn.Module:
    held = model.checkpoint.module  # the weights come from the model
    return made_by_diffusers(model.config, model.label) if held is None else deepcopy(held)


_BUILDERS: dict[str, Callable[[Model, Path], nn.Module]] = {
    "transformers": _build_transformers,
    "open_clip": _build_open_clip,
    "timm": _build_timm,
    "diffusers": _build_diffusers,
}


# ── from memory ──────────────────────────────────────────────────────────────────────────────


def module_of(
    family: Family,
    config: Config | None,
    state: Mapping[str, Tensor],
    *,
    like: nn.Module | None = None,
    label: str = "the model",
) -> nn.Module:
    """Build a module of the family's library with a copy of these tensors, in their type; no file is read.

    Tensors and parameters must match one to one. The class comes from the configuration, or from the module
    ``like`` where there is no configuration or the class is the user's own.
    """
    if config is None and like is None:
        raise ArchitectureError(
            f"{label}: which {family.library} module to build is unknown without a configuration",
            hint="open B or the fine-tune with its configuration, as in Model.open(weights, config={...})",
        )
    with refusing(family, label):
        return _ASSEMBLERS[family.library](config or {}, state, like, label).eval()


def _assemble_transformers(
    config: Config, state: Mapping[str, Tensor], like: nn.Module | None, label: str
) -> nn.Module:
    """As from a folder: the library translates the names that files have, and ties what is tied."""
    made_by: Any = type(like) if like else class_of_transformers(config, label)
    module: nn.Module
    with quiet_transformers():
        module, info = made_by.from_pretrained(
            None,
            config=made_by.config_class.from_dict(dict(config)),
            state_dict={name: tensor.clone() for name, tensor in state.items()},
            dtype=_common_type(state),
            output_loading_info=True,
        )
    odd = {
        f"{what.removesuffix('_keys')} {listing(sorted(names), 4)}" for what, names in info.items() if names
    }
    if odd:
        raise ValueError("; ".join(sorted(odd)))
    return module


def _assemble_open_clip(
    config: Config, state: Mapping[str, Tensor], like: nn.Module | None, label: str
) -> nn.Module:
    if like is not None:
        return _filled(deepcopy(like), state)
    open_clip = require_library("open_clip")
    settings = dict(config["model_cfg"])
    made_by = open_clip.CustomTextCLIP if settings.pop("custom_text", False) else open_clip.CLIP
    return _filled(made_by(**settings), state)


def _assemble_timm(
    config: Config, state: Mapping[str, Tensor], like: nn.Module | None, label: str
) -> nn.Module:
    if like is not None:
        return _filled(deepcopy(like), state)
    arguments = {"num_classes": config.get("num_classes"), **(config.get("model_args") or {})}
    about = {**(config.get("pretrained_cfg") or {}), "architecture": config["architecture"]}
    made = require_library("timm").create_model(
        config["architecture"], pretrained=False, pretrained_cfg=about, **arguments
    )
    return _filled(made, state)


def _assemble_diffusers(
    config: Config, state: Mapping[str, Tensor], like: nn.Module | None, label: str
) -> nn.Module:
    return _filled(made_by_diffusers(config, label) if like is None else deepcopy(like), state)


def _filled(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    nn.Module.to(module, _common_type(state)).load_state_dict(state)  # diffusers' own `to` warns
    return module


def _common_type(state: Mapping[str, Tensor]) -> torch.dtype:
    """The type that holds every number of a state dict."""
    found = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    return reduce(torch.promote_types, found)


_ASSEMBLERS: dict[str, Callable[[Config, Mapping[str, Tensor], nn.Module | None, str], nn.Module]] = {
    "transformers": _assemble_transformers,
    "open_clip": _assemble_open_clip,
    "timm": _assemble_timm,
    "diffusers": _assemble_diffusers,
}

"""Modules on the device meta: the tensors that a configuration describes, without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from transfusion.architecture.config_schema import WRONG_FILE
from transfusion.architecture.naming import Naming
from transfusion.architecture.table import Config, Family
from transfusion.errors import ArchitectureError, TransfusionError
from transfusion.model.in_memory import held_tensors
from transfusion.model.model import Model
from transfusion.running.model_classes import class_of_transformers, made_by_diffusers
from transfusion.runtime.optional_libraries import require_library

SPARE = 2**27
"""The numbers that a module may have beyond twice those in its files, for missing heads and masks."""


def meta_tensors(family: Family, config: Config, label: str) -> dict[str, Tensor]:
    """Return the tensors of a module by the names in its file, on the device meta.

    No values are initialised and no memory is used, whatever the size.
    """
    return held_tensors(_outlined(family, config, label))


def require_modest_size(model: Model) -> None:
    """Refuse a configuration whose module would take far more memory than the tensors of its checkpoint."""
    module = _outlined(model.family, _settings(model), model.label)
    size = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    held = model.checkpoint.parameters
    if size > 2 * held + SPARE:
        raise ArchitectureError(
            f"{model.label}: by its configuration the model has {size} numbers, and its files hold {held}",
            hint=WRONG_FILE,
        )


def skeleton(model: Model) -> nn.Module:
    """Return the module of a model with its parameters on the device meta; buffers have their values."""
    with refusing(model.family, model.label), _parameters_on_meta():
        module = _MAKERS[model.family.library](_settings(model), model.label).eval()
        return buffers_as_parameters(module, model)


def buffers_as_parameters(module: nn.Module, model: Model) -> nn.Module:
    """Make parameters of the buffers that files hold and the table moves, such as SD3's positions."""
    naming = Naming(model.family, live=True)
    for name, buffer in list(module.named_buffers()):
        if naming.canonical(name) in model.architecture.tensors:
            above, _, leaf = name.rpartition(".")
            owner = module.get_submodule(above)
            delattr(owner, leaf)
            owner.register_parameter(leaf, nn.Parameter(buffer, requires_grad=False))
    return module


def _settings(model: Model) -> Config:
    """The configuration as its library reads it; of a file without one, what its shapes tell."""
    return model.checkpoint.config or model.config


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the block, every parameter that a module registers loses its values at once."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that is tied stays the same object
            param = nn.Parameter(param.data.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _outlined(family: Family, config: Config, label: str) -> nn.Module:
    with refusing(family, label), torch.device("meta"):
        return _MAKERS[family.library](config, label)


@contextmanager
def refusing(family: Family, label: str) -> Iterator[None]:
    """Within the block, turn any error of a library into an `ArchitectureError`."""
    try:
        yield
    except TransfusionError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise ArchitectureError(
            f"{label}: {family.library} cannot build the module ({reason})",
            hint="the configuration must be the one that belongs to these tensors",
        ) from error


def _of_transformers(config: Config, label: str) -> nn.Module:
    made_by = class_of_transformers(config, label)
    module: nn.Module = made_by(made_by.config_class.from_dict(dict(config)))
    return module


def _of_open_clip(config: Config, label: str) -> nn.Module:
    open_clip = require_library("open_clip")
    settings = dict(config["model_cfg"])
    made_by = open_clip.CustomTextCLIP if settings.pop("custom_text", False) else open_clip.CLIP
    module: nn.Module = made_by(**settings)
    return module


def _of_timm(config: Config, label: str) -> nn.Module:
    arguments = {"num_classes": config.get("num_classes"), **(config.get("model_args") or {})}
    module: nn.Module = require_library("timm").create_model(
        config["architecture"], pretrained=False, **arguments
    )
    return module


_MAKERS: dict[str, Callable[[Config, str], nn.Module]] = {
    "transformers": _of_transformers,
    "open_clip": _of_open_clip,
    "timm": _of_timm,
    "diffusers": made_by_diffusers,
}

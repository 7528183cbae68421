"""Outlining: the tensors that a library's module has by its configuration, without any values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from transfusion.errors import ArchitectureError, TransfusionError
from transfusion.libraries import library
from transfusion.live.classes import class_of_transformers
from transfusion.memory import held_tensors
from transfusion.tables import Config, Family


def outline(family: Family, config: Config, label: str) -> dict[str, Tensor]:
    """The tensors of a module, by the names that a file of it would have, on the device meta.

    No number is drawn and no memory taken, so that it takes seconds whatever the size.
    """
    try:
        with torch.device("meta"):
            return held_tensors(_MAKERS[family.library](config, label))
    except TransfusionError:
        raise
    except Exception as error:  # libraries have errors of their own for what they do not like
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArchitectureError(
            f"{label}: {family.library} cannot make a module of this configuration ({reason})",
            hint="fetch the config.json of the model that is meant",
        ) from error


def _of_transformers(config: Config, label: str) -> nn.Module:
    made_by = class_of_transformers(config, label)
    module: nn.Module = made_by(made_by.config_class.from_dict(dict(config)))
    return module


def _of_open_clip(config: Config, label: str) -> nn.Module:
    open_clip = library("open_clip")
    settings = dict(config["model_cfg"])
    made_by = open_clip.CustomTextCLIP if settings.pop("custom_text", False) else open_clip.CLIP
    module: nn.Module = made_by(**settings)
    return module


def _of_timm(config: Config, label: str) -> nn.Module:
    arguments = {"num_classes": config.get("num_classes"), **config.get("model_args", {})}
    module: nn.Module = library("timm").create_model(config["architecture"], pretrained=False, **arguments)
    return module


_MAKERS: dict[str, Callable[[Config, str], nn.Module]] = {
    "transformers": _of_transformers,
    "open_clip": _of_open_clip,
    "timm": _of_timm,
}

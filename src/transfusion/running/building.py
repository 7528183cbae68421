"""The class of transformers or diffusers that a configuration names; only the library's own code is ever run.

A configuration is not trusted. It may name a class of the library and nothing else of it, its ``auto_map``
is not followed, and it cannot ask for kernels that the library would fetch from the hub and run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import reduce
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.config_schema import WRONG_FILE
from transfusion.architecture.naming import Naming
from transfusion.architecture.table import Config, Family
from transfusion.errors import ArchitectureError, TransfusionError, listing
from transfusion.families import all_families
from transfusion.files.checkpoint import CONFIGS
from transfusion.model.in_memory import held_tensors
from transfusion.model.model import Model
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.untrusted_files import read_json

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_IN_THE_LIBRARY = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
"""Ways to compute that need no code from elsewhere."""


def class_of_transformers(config: Config, label: str) -> Any:
    """The class that a configuration names; without a name, the base model of its model_type."""
    transformers = require_library("transformers")
    transformers.utils.logging.disable_progress_bar()
    _refuse_foreign_code(config, label)
    name = class_named_in(config, label)
    made_by = _of_type(transformers, config, label) if name is None else getattr(transformers, name, None)
    if made_by is None:
        raise ArchitectureError(
            f"{label}: config.json names a class {name} that transformers"
            f" {transformers.__version__} does not have",
            hint="correct 'architectures' in config.json, or install the version that wrote it",
        )
    if not _makes_models(transformers, made_by):
        raise ArchitectureError(
            f"{label}: config.json names {name}, which is no class of models",
            hint="correct 'architectures' in config.json: it is a list with one name, such as BertModel",
        )
    return made_by


def with_defaults(config: Config) -> Config:
    """Return a configuration of transformers with the settings that its file leaves out, under the names of
    the installed release; as it is, where the library is not installed or does not know it.
    """
    kind = config.get("model_type")
    try:
        transformers = require_library("transformers")
        if kind not in transformers.CONFIG_MAPPING:
            return config
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: dict[str, Any] = transformers.CONFIG_MAPPING[kind].from_dict(dict(config)).to_dict()
    except Exception:  # the library has its own errors for settings that it does not accept
        return config
    return found


def class_of_diffusers(config: Config, label: str) -> Any:
    """The class that a configuration names, if a table knows it; the folder itself is never given to the
    library.
    """
    name = config.get("_class_name")
    today = {
        kind: f.model_types[0] for f in all_families() if f.library == "diffusers" for kind in f.model_types
    }
    made_by = getattr(require_library("diffusers"), today[name], None) if name in today else None
    if made_by is None:
        raise ArchitectureError(
            f"{label}: config.json names a class {name!r:.80} that no table knows, or that the installed"
            " diffusers does not have",
            hint="correct '_class_name' in config.json, or install the version that wrote it",
        )
    return made_by


def made_by_diffusers(config: Config, label: str) -> nn.Module:
    """Return a module of diffusers with random weights."""
    made_by = class_of_diffusers(config, label)
    known = signature(made_by.__init__).parameters
    settings = {key: value for key, value in config.items() if key in known}
    module: nn.Module = made_by(**settings)
    return module


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block, transformers logs errors alone: its load reports speak of tensors that a table knows
    to be missing, and would appear among the messages of a verb.
    """
    logging: Any = require_library("transformers").utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def require_plain_folder(root: Path) -> None:
    """Refuse a folder from which the library would load more than the model, such as an adapter."""
    if (root / "adapter_config.json").exists():
        raise ArchitectureError(
            f"{root}: adapter_config.json lies beside a model, and the library would load what it names",
            hint="keep the adapter in a folder of its own",
        )
    if (file := root / "config.json").exists():
        _refuse_foreign_code(read_json(file), str(root))


def class_named_in(config: Config, label: str) -> str | None:
    """The name of the class that a configuration is for, if it says so."""
    names = config.get("architectures")
    if names is None or names == []:
        return None
    if not isinstance(names, list) or not isinstance(names[0], str) or not _is_name(names[0]):
        raise ArchitectureError(
            f"{label}: config.json says architectures = {names!r:.80}, which names no class",
            hint="correct 'architectures' in config.json: it is a list with one name, such as BertModel",
        )
    return names[0]


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not text.startswith("_")


def _makes_models(transformers: Any, found: object) -> bool:
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return is_model and getattr(found, "config_class", None) is not None


def _of_type(transformers: Any, config: Config, label: str) -> Any:
    kind = config.get("model_type")
    made_by = None
    if isinstance(kind, str) and kind in transformers.CONFIG_MAPPING:
        made_by = transformers.MODEL_MAPPING.get(transformers.CONFIG_MAPPING[kind], None)
    if made_by is None:
        raise ArchitectureError(
            f"{label}: config.json names no class, and transformers knows none for model_type {kind!r:.80}",
            hint="give 'architectures' in config.json, such as [\"BertModel\"]",
        )
    return made_by[0] if isinstance(made_by, tuple) else made_by


def _refuse_foreign_code(config: Config, label: str) -> None:
    """The library fetches and runs a kernel whose name has a slash; others it may replace by such kernels."""
    odd = [f"{key} = {value!r:.60}" for key, value in _implementations(config)]
    if odd:
        raise ArchitectureError(
            f"{label}: config.json asks for code that is not in the library ({listing(odd)})",
            hint="remove the setting from config.json: the library then chooses among its own",
        )


def _implementations(settings: object) -> Iterator[tuple[str, object]]:
    """Return every setting, at any depth, that asks for an implementation from outside the library."""
    waiting = [settings]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, Mapping):
            waiting.extend(one.values())
            for key, value in one.items():
                if str(key).lstrip("_").startswith(_IMPLEMENTATIONS):
                    chosen = value.values() if isinstance(value, Mapping) else [value]
                    yield from ((key, way) for way in chosen if not _known(way))


def _known(way: object) -> bool:
    return isinstance(way, bool) or way in _IN_THE_LIBRARY


# ── Modules on the device meta: the tensors that a configuration describes, witho… ──────────────────


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


# ── Build the module of a model in its own library, from its folder or from memory ──────────────────


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

"""Build a model in its own library: a new module of the class that its configuration names, then its values.

Only the libraries' own code is ever run, and only this package reads files. A configuration is not trusted.
It may name a class of the library and nothing else of it, its ``auto_map`` is not followed, and it cannot ask
for kernels that the library would fetch from the hub and run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming, tensors_in_memory, without_part
from transfusion.architecture.table import WRONG_FILE, Config, Family
from transfusion.errors import ArchitectureError, TransfusionError, listing
from transfusion.families import all_families
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.sentence_modules import split_name
from transfusion.model.in_memory import hold_in_memory
from transfusion.model.model import Model
from transfusion.runtime.optional_libraries import require_library

SPARE = 2**27
"""The numbers that a module may have beyond twice those in its files, for missing heads and masks."""
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_IN_THE_LIBRARY = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
"""Ways to compute that need no code from elsewhere."""


def class_of_transformers(config: Config, label: str) -> Any:
    """The class that a configuration names; without a name, the base model of its model_type."""
    transformers = require_library("transformers")
    transformers.utils.logging.disable_progress_bar()
    if foreign := [*_foreign_code(config)]:
        raise ArchitectureError(
            f"{label}: config.json asks for code that is not in the library ({listing(foreign)})",
            hint="remove the setting from config.json: the library then chooses among its own",
        )
    name = class_named_in(config, label)
    if name is None:
        return _class_of_type(transformers, config, label)
    made_by = getattr(transformers, name, None)
    if made_by is None:
        raise ArchitectureError(
            f"{label}: config.json names a class {name} that transformers"
            f" {transformers.__version__} does not have",
            hint="correct 'architectures' in config.json, or install the version that wrote it",
        )
    is_model = isinstance(made_by, type) and issubclass(made_by, transformers.PreTrainedModel)
    if not is_model or getattr(made_by, "config_class", None) is None:
        raise ArchitectureError(
            f"{label}: config.json names {name}, which is no class of models",
            hint="correct 'architectures' in config.json: it is a list with one name, such as BertModel",
        )
    return made_by


def class_named_in(config: Config, label: str) -> str | None:
    """The name of the class that a configuration is for, if it says so."""
    names = config.get("architectures")
    if names is None or names == []:
        return None
    name = names[0] if isinstance(names, list) else None
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier() or name.startswith("_"):
        raise ArchitectureError(
            f"{label}: config.json says architectures = {names!r:.80}, which names no class",
            hint="correct 'architectures' in config.json: it is a list with one name, such as BertModel",
        )
    return name


def _class_of_type(transformers: Any, config: Config, label: str) -> Any:
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


def _foreign_code(settings: object) -> Iterator[str]:
    """Yield every setting, at any depth, that asks for an implementation from outside the library.

    The library fetches and runs a kernel whose name has a slash; others it may replace by such kernels.
    """
    if isinstance(settings, list):
        for one in settings:
            yield from _foreign_code(one)
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _foreign_code(value)
            if str(key).lstrip("_").startswith(_IMPLEMENTATIONS):
                ways = value.values() if isinstance(value, Mapping) else [value]
                known = (way in _IN_THE_LIBRARY or isinstance(way, bool) for way in ways)
                yield from (f"{key} = {way!r:.60}" for way, ok in zip(ways, known, strict=True) if not ok)


def with_defaults(config: Config) -> Config:
    """Return a configuration of transformers with the settings that its file leaves out, under the names of
    the installed release; as it is, where the library is not installed or does not know it.
    """
    try:
        transformers = require_library("transformers")
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made_by = transformers.CONFIG_MAPPING[config["model_type"]]
            found: dict[str, Any] = made_by.from_dict(_with_infinity(dict(config))).to_dict()
    except Exception:  # the library has its own errors for settings that it does not accept
        return config
    return found


def _with_infinity(value: Any) -> Any:
    """Return settings with the numbers that JSON has none for, which transformers writes by name."""
    if isinstance(value, list):
        return [_with_infinity(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity"):
        return float(value["__float__"])
    return {key: _with_infinity(one) for key, one in value.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block, transformers says nothing about settings, which are checked before."""
    logging = require_library("transformers").utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


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


# ── modules without values ───────────────────────────────────────────────────────────────────


def new_module(family: Family, config: Config | None, label: str, like: nn.Module | None = None) -> nn.Module:
    """Return a module of the family's library, with the values that the library gives to a new one.

    The class comes from the configuration, or from the module ``like`` if that is given.
    """
    if config is None and like is None:
        raise ArchitectureError(
            f"{label}: which {family.library} module to build is unknown without a configuration",
            hint="open B or the fine-tune with its configuration, as in Model.open(weights, config={...})",
        )
    settings = dict(config or {})
    module: nn.Module
    with _refusing(family, label):
        if family.build is not None:
            module = family.build(settings)
        elif family.library == "transformers":
            made_by: Any = class_of_transformers(settings, label) if like is None else type(like)
            with _quiet():
                module = made_by(made_by.config_class.from_dict(_with_infinity(settings)))
        elif like is not None:
            module = deepcopy(like)
        elif family.library == "diffusers":
            made_by = class_of_diffusers(settings, label)
            known = signature(made_by.__init__).parameters
            module = made_by(**{key: value for key, value in settings.items() if key in known})
        elif family.library == "open_clip":
            open_clip, settings = require_library("open_clip"), dict(settings["model_cfg"])
            made_by = open_clip.CustomTextCLIP if settings.pop("custom_text", False) else open_clip.CLIP
            module = made_by(**settings)
        elif family.library != "timm":
            raise ArchitectureError(
                f"{label}: a {family.name} is of no library, and its file does not say how it is built",
                hint="give `architecture` a file of Python: read_families(TABLE, __file__, build=…), see"
                " docs/your-own.md",
            )
        else:
            arguments = {"num_classes": settings.get("num_classes"), **(settings.get("model_args") or {})}
            about = {**(settings.get("pretrained_cfg") or {}), "architecture": settings["architecture"]}
            module = require_library("timm").create_model(
                settings["architecture"], pretrained=False, pretrained_cfg=about, **arguments
            )
        return module.eval()


@contextmanager
def _refusing(family: Family, label: str) -> Iterator[None]:
    """Within the block, turn any error of a library into an `ArchitectureError`."""
    try:
        yield
    except TransfusionError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise _cannot_build(family, label, reason) from error


def _cannot_build(family: Family, label: str, reason: str) -> ArchitectureError:
    by = "the `build` of its file" if family.build is not None else family.library
    return ArchitectureError(
        f"{label}: {by} cannot build the module ({reason})",
        hint="the configuration must be the one that belongs to these tensors",
    )


def _module_for(model: Model) -> nn.Module:
    """Return a new module for a model; of a file without a configuration, by what its shapes tell."""
    held = model.checkpoint
    if held.in_memory:
        return new_module(model.family, held.config, model.label, held.module)
    if held.config is None and model.family.library != "diffusers":
        raise ArchitectureError(
            f"{model.label}: a model can only be run from a folder with its config.json",
            hint="put the weights and the config.json into one folder and give that",
        )
    return new_module(model.family, held.config or model.config, model.label)


def require_modest_size(model: Model) -> None:
    """Refuse a configuration whose module would take far more memory than the tensors of its checkpoint."""
    with torch.device("meta"):
        module = _module_for(model)
    size = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    held = model.checkpoint.parameters
    if size > 2 * held + SPARE:
        raise ArchitectureError(
            f"{model.label}: by its configuration the model has {size} numbers, and its files hold {held}",
            hint=WRONG_FILE,
        )


def skeleton(model: Model) -> nn.Module:
    """Return the module of a model with its parameters on the device meta; buffers have their values."""
    with _parameters_on_meta():
        return buffers_as_parameters(_module_for(model), model.family, model.architecture.tensors.keys())


def buffers_as_parameters(module: nn.Module, family: Family, moved: Set[str]) -> nn.Module:
    """Make parameters of the buffers that files hold and the table moves, such as SD3's positions."""
    naming = Naming(family, live=True)
    for name, buffer in list(module.named_buffers()):
        if naming.canonical(name) in moved:
            above, _, leaf = name.rpartition(".")
            owner = module.get_submodule(above)
            delattr(owner, leaf)
            owner.register_parameter(leaf, nn.Parameter(buffer, requires_grad=False))
    return module


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


# ── values ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Place:
    """Where a parameter is in its module, and which values of the model belong there."""

    name: str
    """Its name in the module."""
    owner: nn.Module
    parameter: nn.Parameter
    """The parameter of the new module; tied ones are one object."""
    ours: tuple[str, ...]
    """Its canonical name, with a number if it is a part of a tensor; of several tensors, all names."""
    rows: slice | None = None
    """The rows of the tensor that the part has."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The canonical names of the tensors, which are joined along their first dimension."""
        return tuple(without_part(name)[0] for name in self.ours)

    def read(
        self,
        read: Callable[[str], Tensor],
        change: Callable[[str, Tensor], Tensor] = lambda name, value: value,
    ) -> Tensor:
        """Read the values; ``change`` gets the canonical name, and returns others."""
        values = [read(name) for name in self.tensors]
        values = values if self.rows is None else [value[self.rows] for value in values]
        changed = [change(name, value) for name, value in zip(self.ours, values, strict=True)]
        return changed[0] if len(changed) == 1 else torch.cat(changed)

    def put(self, parameter: nn.Parameter) -> None:
        self.owner._parameters[self.name.rpartition(".")[2]] = parameter


def places_of(model: Model, module: nn.Module) -> tuple[list[Place], list[str]]:
    """Return the places of the parameters that a model has values for, and the names of the others."""
    naming = Naming(model.family, live=True)
    named = dict(module.named_parameters(remove_duplicate=False))
    own = {name: naming.canonical(name) for name in named}
    own = {name: ours for name, ours in own.items() if without_part(ours)[0] in model.names}
    held = tensors_in_memory(model.family, {name: tuple(one.shape) for name, one in named.items()})
    """What parameters hold under the names of files."""
    shared = {named[name]: ours for name, ours in reversed(own.items())}
    """What tied parameters share: the tensor of the first that has one."""
    parts: dict[str, dict[int, int]] = {}
    """For every tensor that the module has in parts, their sizes by number."""
    for name, ours in own.items():
        whole, part = without_part(ours)
        if part is not None:
            parts.setdefault(whole, {})[part] = len(named[name])
    places, missing = [], []
    for name, parameter in named.items():
        several = tuple(ours for ours, _ in held.get(name, ()) if ours in model.names)
        known = several or tuple(one for one in (own.get(name) or shared.get(parameter),) if one)
        if not known:
            missing.append(name)
            continue
        (whole, part), rows = without_part(known[0]), None
        first, *others = (tuple(model.info(without_part(one)[0]).shape) for one in known)
        wanted = (sum((one[0] for one in others), first[0]), *first[1:]) if others else first
        if part is not None:
            start = sum(size for number, size in parts[whole].items() if number < part)
            rows, wanted = slice(start, start + len(parameter)), (len(parameter), *wanted[1:])
        if tuple(parameter.shape) != wanted:
            shapes = f"has the shape {tuple(parameter.shape)}, and the file {wanted}"
            raise _cannot_build(model.family, model.label, f"{name} of {type(module).__name__} {shapes}")
        owner = module.get_submodule(name.rpartition(".")[0])
        places.append(Place(name, owner, parameter, known, rows))
    return places, missing


def fill(places: Iterable[Place], value_of: Callable[[Place], Tensor]) -> None:
    """Give parameters their values; what is tied stays tied, unless the model has a tensor for each."""
    made: dict[tuple[nn.Parameter, tuple[str, ...]], nn.Parameter] = {}
    with torch._C.DisableTorchFunction():  # reading is no part of what is computed in float64 throughout
        for place in places:
            if (key := (place.parameter, place.ours)) not in made:
                made[key] = nn.Parameter(value_of(place))
            place.put(made[key])


def fill_buffers(model: Model, module: nn.Module, dtype: torch.dtype, device: str = "cpu") -> None:
    """Give the buffers the values that the file has, and the type and place of the weights."""
    naming = Naming(model.family, live=True)
    for name, buffer in list(module.named_buffers()):
        above, _, leaf = name.rpartition(".")
        value = model.read(ours) if (ours := naming.canonical(name)) in model.names else buffer
        floats = value.is_floating_point()
        module.get_submodule(above)._buffers[leaf] = value.to(device, dtype if floats else value.dtype)


def build(
    model: Model, dtype: torch.dtype | None = torch.float64, read: Callable[[str], Tensor] | None = None
) -> nn.Module:
    """Build the model in its own library, ready to run; without a ``dtype``, in that of its tensors.

    ``read`` returns other values than the model's own by canonical name. Parameters that files lack, such as
    a task head, have the values of a new module. Tensors in memory must match the parameters one to one.
    """
    if not model.checkpoint.in_memory:
        require_modest_size(model)
    module = skeleton(model)
    places, missing = places_of(model, module)
    if model.checkpoint.in_memory:
        _require_all(model, module, places, missing)
    if missing:
        module = buffers_as_parameters(_module_for(model), model.family, model.architecture.tensors.keys())
        places, _ = places_of(model, module)
    kind = dtype or reduce(torch.promote_types, (model.info(place.tensors[0]).dtype for place in places))
    in_type(module, kind)
    fill(places, lambda place: place.read(read or model.read).to(kind, copy=True))
    fill_buffers(model, module, kind)
    return module


def _require_all(model: Model, module: nn.Module, places: list[Place], missing: list[str]) -> None:
    """Refuse tensors without a parameter, and parameters without a tensor that no library computes."""
    naming = Naming(model.family, live=True)
    taken = {tensor for place in places for tensor in place.tensors}
    taken |= {naming.canonical(name) for name, _ in module.named_buffers()}
    own = (name for name in model.architecture.tensors if not split_name(name)[0])
    odd = [f"unexpected {name}" for name in own if name not in taken]
    odd += [f"missing {name}" for name in missing if naming.canonical(name) not in model.family.computed]
    if odd:
        raise _cannot_build(model.family, model.label, listing(odd, 4))


def model_of(
    state: Mapping[str, Tensor],
    config: Config | None,
    *,
    like: nn.Module | None = None,
    label: str = "the model",
) -> Model:
    """Return tensors in memory as a model; ``like`` is a module of its class, if that is the user's own."""
    held = Checkpoint.of(state, config, label, like)
    if config is None and like is not None:
        held.config = hold_in_memory(like).config
    return Model.of(held)


def in_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module. Complex buffers stay, of which `Module.to` would drop the imaginary part."""
    made: nn.Module = module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )
    return made

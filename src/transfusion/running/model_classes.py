"""The class of transformers or diffusers that a configuration names; only the library's own code is ever run.

A configuration is not trusted. It may name a class of the library and nothing else of it, its ``auto_map``
is not followed, and it cannot ask for kernels that the library would fetch from the hub and run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from transfusion.architecture.table import Config
from transfusion.errors import ArchitectureError, listing
from transfusion.families import all_families
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

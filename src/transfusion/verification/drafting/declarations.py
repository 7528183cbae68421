"""The declaration of a drafted family, with every name and value checked.

Tensor names and configuration values come from untrusted files, and a draft becomes Python source that users
run. All of them are checked here first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from transfusion.errors import ArchitectureError
from transfusion.families import known_keys
from transfusion.verification.drafting.axis_labels import Count
from transfusion.verification.drafting.draft import Draft

PROBES = {"pixel_values": "image", "input_ids": "tokens", "token_type_ids": "tokens"}
"""Inputs that `random_inputs` can make, with their kinds."""

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"([A-Za-z0-9_-]+|\{\}|\*)(\.([A-Za-z0-9_-]+|\{\}|\*))*")
_LAYOUT = re.compile(r"[A-Za-z0-9_@()\[\]|<> -]*")
_PLAIN = (str, int, float, bool, type(None))
_DEEPEST = 50


@dataclass(frozen=True)
class Probe:
    """A random input: its shape, and for ids their upper bound; None for floats."""

    shape: tuple[int, ...]
    below: int | None = None


@dataclass(frozen=True)
class Declaration:
    """The family of a draft, and the configurations that it is valid for."""

    name: str
    class_name: str
    library: str
    model_types: tuple[str, ...]
    kinds: tuple[str, ...] | None
    """The kinds of inputs, as a family names them; None if ``probes`` has them."""
    probes: Mapping[str, Probe]
    prefixes: tuple[str, ...]
    keys: tuple[str, ...]
    """The settings that the table knows, apart from the library's harmless ones."""
    required: Mapping[str, tuple[Any, ...]]

    @property
    def of_library(self) -> bool:
        return self.library == "transformers"

    @property
    def known_keys(self) -> frozenset[str]:
        return (known_keys("harmless") if self.of_library else frozenset()) | set(self.keys)


def declare(
    draft: Draft,
    name: str,
    class_name: str,
    library: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
) -> Declaration:
    """Return the declaration of a draft; refuse names and values that must not go into Python source."""
    _refuse_odd_names(draft, class_name, inputs)
    require_word(name)
    of_library = library == "transformers"
    known = of_library and set(inputs) <= set(PROBES)
    own = sorted(set(config) - (known_keys("harmless") if of_library else frozenset()) - {"model_type"})
    required = {key: (config[key],) for key in own if _must_stay(key, config[key], draft)}
    if draft.ties and "tie_word_embeddings" in config:
        required["tie_word_embeddings"] = (config["tie_word_embeddings"],)
    for key, value in required.items():
        _require_plain(key, value)
    return Declaration(
        name=name,
        class_name=class_name,
        library=library,
        model_types=tuple(dict.fromkeys(map(require_word, (config.get("model_type") or name, name)))),
        kinds=tuple(sorted({PROBES[key] for key in inputs})) if known else None,
        probes={} if known else {key: _probe(value) for key, value in inputs.items()},
        prefixes=(draft.prefix,) if draft.prefix else (),
        keys=tuple(own if of_library else sorted({*config, "model_type"})),
        required=required,
    )


def require_word(name: object) -> str:
    """Return the name of a family; refuse anything but a plain word."""
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise ArchitectureError(
            f"the model_type {_shown(name)} is not a valid name of a family",
            hint="a name has letters, digits, '_', '-' and '.' only; correct model_type in config.json",
        )
    return name


def _refuse_odd_names(draft: Draft, class_name: str, inputs: Iterable[str]) -> None:
    rows = (*draft.rows, *draft.heads)
    axes = (*draft.axes, *draft.outer_axes)
    ways = [way for _, way, _ in draft.shortcuts]
    _require("a class", _IDENTIFIER, class_name, *inputs)
    _require("an axis", _IDENTIFIER, *(axis.name for axis in axes), *draft.sizes)
    _require("a layout", _LAYOUT, *(layout for _, layout in rows), *ways, *draft.outputs.values())
    _require("a layout", _LAYOUT, *(point for pair in draft.unified for point in pair))
    _require("a tensor", _PATH, *(name for name, _ in rows), *draft.ties, *draft.ties.values())
    _require("a tensor", _PATH, *draft.buffers, *draft.idle, *draft.outputs)
    _require("a module", _PATH, *(name for entry, _, branch in draft.shortcuts for name in (entry, branch)))
    _require("a module", _PATH, *(draft.prefix.removesuffix("."),) if draft.prefix else ())


def _require(what: str, pattern: re.Pattern[str], *names: str) -> None:
    for name in names:
        if not pattern.fullmatch(name):
            raise ArchitectureError(
                f"the name {_shown(name)} of {what} is not allowed in a table",
                hint="names have letters, digits and '_' between dots; correct config.json",
            )


def _require_plain(key: str, value: object, depth: int = 0) -> None:
    """Refuse a setting that has no literal: a library's object, NaN, or infinity."""
    inside: Iterable[object] = ()
    if isinstance(value, Mapping):
        inside = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        inside = value
    elif not isinstance(value, _PLAIN) or (isinstance(value, float) and not math.isfinite(value)):
        raise ArchitectureError(
            f"the setting {_shown(key)} is {_shown(value)}, which is not allowed in a table",
            hint="settings are numbers, texts, and lists of them; correct config.json",
        )
    if depth > _DEEPEST:
        raise ArchitectureError(
            f"the setting {_shown(key)} is nested more than {_DEEPEST} deep",
            hint="download the config.json that belongs to the model",
        )
    for one in inside:
        _require_plain(key, one, depth + 1)


def _must_stay(key: str, value: object, draft: Draft) -> bool:
    """Whether a setting may affect the computation, and not only the sizes."""
    if isinstance(value, list):
        return False
    if isinstance(value, int) and not isinstance(value, bool):
        return value not in draft.extents or "rot" in key or Count(value) == draft.sizes.get("rot")
    return True


def _probe(value: Tensor) -> Probe:
    return Probe(tuple(value.shape), None if value.is_floating_point() else int(value.max()) + 1)


def _shown(value: object, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"

"""Declaring: what a draft says beside its rows, checked word by word.

The names of a model's tensors and the values of its configuration come from files that nobody vouches for,
and a draft is written into a file of Python that people will run. Whatever goes into it passes here first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from transfusion.architecture.families._shared import HARMLESS
from transfusion.errors import ArchitectureError
from transfusion.verification.drafting.draft import Draft
from transfusion.verification.drafting.symbolic_counts import Count

PROBES = {"pixel_values": "image", "input_ids": "tokens", "token_type_ids": "tokens"}
"""Inputs that `live.probes` knows how to make, and the kinds that it knows them by."""

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"([A-Za-z0-9_-]+|\{\}|\*)(\.([A-Za-z0-9_-]+|\{\}|\*))*")
_LAYOUT = re.compile(r"[A-Za-z0-9_@()\[\]|<> -]*")
_PLAIN = (str, int, float, bool, type(None))
_DEEPEST = 50


@dataclass(frozen=True)
class Probe:
    """A random input: its shape, and the number that ids stay below; None for an input of numbers."""

    shape: tuple[int, ...]
    below: int | None = None


@dataclass(frozen=True)
class Declaration:
    """Whose table a draft is, and for which configurations it holds."""

    name: str
    class_name: str
    library: str
    model_types: tuple[str, ...]
    kinds: tuple[str, ...] | None
    """What a live model is fed, in a family's words; None where ``probes`` says it."""
    probes: Mapping[str, Probe]
    prefixes: tuple[str, ...]
    keys: tuple[str, ...]
    """The settings that the table knows, beside those that are harmless in any model of the library."""
    required: Mapping[str, tuple[Any, ...]]

    @property
    def of_library(self) -> bool:
        return self.library == "transformers"

    @property
    def known_keys(self) -> frozenset[str]:
        return (HARMLESS if self.of_library else frozenset()) | set(self.keys)


def declare(
    draft: Draft,
    name: str,
    class_name: str,
    library: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
) -> Declaration:
    """The declaration of a draft; names and values that no file of Python should hold are refused."""
    _refuse_odd_names(draft, class_name, inputs)
    require_word(name)
    of_library = library == "transformers"
    known = of_library and set(inputs) <= set(PROBES)
    own = sorted(set(config) - (HARMLESS if of_library else frozenset()) - {"model_type"})
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
    """The name of a family, if it is a plain word."""
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise ArchitectureError(
            f"the model_type {_shown(name)} is no name for a family",
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
                f"{what} is called {_shown(name)}, and a table cannot say that",
                hint="names have letters, digits and '_' between dots; a configuration chose this one",
            )


def _require_plain(key: str, value: object, depth: int = 0) -> None:
    """Refuse a setting that cannot be written as it is: an object of a library, or no number."""
    inside: Iterable[object] = ()
    if isinstance(value, Mapping):
        inside = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        inside = value
    elif not isinstance(value, _PLAIN) or (isinstance(value, float) and not math.isfinite(value)):
        raise ArchitectureError(
            f"the setting {_shown(key)} is {_shown(value)}, and a table cannot say that",
            hint="a table holds for numbers, texts, and lists of them; correct config.json",
        )
    if depth > _DEEPEST:
        raise ArchitectureError(
            f"the setting {_shown(key)} is nested more than {_DEEPEST} deep",
            hint="fetch the config.json that belongs to the model",
        )
    for one in inside:
        _require_plain(key, one, depth + 1)


def _must_stay(key: str, value: object, draft: Draft) -> bool:
    """Whether a setting may decide what a model computes, rather than how large it is."""
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

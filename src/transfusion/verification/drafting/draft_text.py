"""The text of a draft, for ``--architecture``: a family's table, as people write it.

Names and values come from untrusted files. The text is read and never run, so that all of them are data; what
a text cannot hold is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from transfusion.architecture.table import Axis, Config, Symmetry
from transfusion.errors import ArchitectureError
from transfusion.families import known_keys
from transfusion.verification.drafting.draft import Draft

KINDS = {"pixel_values": "image", "input_ids": "tokens", "token_type_ids": "tokens"}
"""Inputs that `random_inputs` can make, with their kinds."""
STACK = "layer"
"""The name of a draft's stack of blocks."""

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_KEY = re.compile(r"[A-Za-z0-9_.-]+")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"([A-Za-z0-9_-]+|\{\}|\*)(\.([A-Za-z0-9_-]+|\{\}|\*))*")


def write(
    draft: Draft, name: str, class_name: str, library: str, config: Config, inputs: Mapping[str, Tensor]
) -> str:
    """Return the text of a draft for the class and the configuration that it was made with."""
    _refuse_odd_names(draft, inputs)
    lines = [*_about(draft, name, class_name, library), *_settings(draft, name, library, config)]
    lines += [*_inputs(library, inputs), *map(_axis, draft.axes), *_table(draft)]
    return "\n".join(lines) + "\n"


def require_word(name: object) -> str:
    """Return the name of a family; refuse anything but a plain word."""
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise ArchitectureError(
            f"the model_type {name!r:.60} is not a valid name of a family",
            hint="a name has letters, digits, '_', '-' and '.' only; correct model_type in config.json",
        )
    return name


def _about(draft: Draft, name: str, class_name: str, library: str) -> Iterator[str]:
    yield f"# {name}, as in {class_name}: a draft, made by trials on a live model."
    yield "#"
    yield "# The names are those of the module's parameters in memory; add aliases for those of a checkpoint."
    yield "# The table is valid for the configuration that it was made with."
    if draft.idle:
        yield f"# These have no effect on the outputs, and stay as they are: {' '.join(draft.idle)}"
    yield ""
    yield f"family {name}"
    yield f"library {library}"


def _settings(draft: Draft, name: str, library: str, config: Config) -> Iterator[str]:
    """The models, their names, and the settings that the table ignores or requires."""
    harmless = known_keys("harmless") if library == "transformers" else frozenset()
    own = sorted(set(config) - harmless - {"model_type"})
    if odd := [key for key in own if not _KEY.fullmatch(key)]:
        raise ArchitectureError(
            f"the setting {odd[0]!r:.60} has a name that is not allowed in a table",
            hint="names of settings have letters, digits, '_', '-' and '.' only; correct config.json",
        )
    required = {key: config[key] for key in own if _must_stay(key, config[key], draft)}
    if draft.ties and "tie_word_embeddings" in config:
        required["tie_word_embeddings"] = config["tie_word_embeddings"]
    ignored = ["@harmless"] if harmless else ["model_type"]
    yield f"models {' '.join(dict.fromkeys(map(require_word, (config.get('model_type') or name, name))))}"
    if draft.prefix:
        yield f"prefixes {draft.prefix}"
    yield f"ignores {' '.join([*ignored, *(key for key in own if key not in required)])}"
    yield from _columns("requires ", ((key, _json(key, value)) for key, value in required.items()))


def _must_stay(key: str, value: object, draft: Draft) -> bool:
    """Whether a setting may affect the computation, and not only the sizes."""
    if isinstance(value, list):
        return False
    if isinstance(value, int) and not isinstance(value, bool):
        return value not in draft.extents or "rot" in key or str(value) == draft.sizes.get("rot")
    return True


def _json(key: str, value: object) -> str:
    """Return a value as a text without the signs that mean something in a table."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArchitectureError(
            f"the setting {key} is {value!r:.60}, which is not allowed in a table",
            hint="settings are numbers, texts, and lists of them; correct config.json",
        ) from error
    return text.replace("#", r"\u0023").replace("|", r"\u007c")


def _inputs(library: str, inputs: Mapping[str, Tensor]) -> Iterator[str]:
    if library == "transformers" and set(inputs) <= set(KINDS):
        yield f"inputs {' '.join(sorted({KINDS[key] for key in inputs}))}"
        return
    for name, value in inputs.items():
        shape = f"({''.join(f'{size}, ' for size in value.shape[1:])})"
        below = "" if value.is_floating_point() else f", low=0, high={int(value.max()) + 1}, whole=True"
        yield f"draw {name} = Draw({shape}{below})"


def _axis(axis: Axis) -> str:
    usual = "model" if axis.group is Symmetry.FIXED else "layer"
    words = ["fixed" if axis.group is Symmetry.FIXED else "axis", axis.name]
    words += [f"in {axis.within}"] if axis.within else []
    words += [f"with {axis.tied_with}"] if axis.tied_with else []
    words += [f"per {axis.scope}"] if axis.scope != usual else []
    return " ".join(words) + (f": {axis.why}" if axis.group is Symmetry.FIXED else "")


def _table(draft: Draft) -> Iterator[str]:
    yield f"stack {STACK} {draft.depth}"
    if draft.sizes:
        yield f"sizes {', '.join(f'{axis} = {size}' for axis, size in draft.sizes.items())}"
    yield from _columns("", draft.rows)
    yield from _columns("skip ", draft.shortcuts)
    if draft.heads:
        yield "heads"
        yield from _columns("    ", draft.heads)
    if draft.buffers:
        yield f"buffers {' '.join(draft.buffers)}"
    yield from (f"same {one} {other}" for one, other in draft.unified)
    yield from (f"tie {second} = {first}" for second, first in draft.ties.items())
    yield from (f"output {name} = {point}" for name, point in draft.outputs.items())


def _columns(word: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield lines of cells, in columns."""
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield (word + "   ".join(cells)).rstrip()


def _refuse_odd_names(draft: Draft, inputs: Iterable[str]) -> None:
    _require("an input", _IDENTIFIER, inputs)
    _require("a tensor", _PATH, (name for name, _ in (*draft.rows, *draft.heads)))
    _require("a tensor", _PATH, (*draft.ties, *draft.ties.values(), *draft.buffers, *draft.outputs))
    _require("a module", _PATH, (name for entry, _, branch in draft.shortcuts for name in (entry, branch)))


def _require(what: str, pattern: re.Pattern[str], names: Iterable[Any]) -> None:
    for name in names:
        if not pattern.fullmatch(name):
            raise ArchitectureError(
                f"the name {name!r:.60} of {what} is not allowed in a table",
                hint="names have letters, digits and '_' between dots; correct config.json",
            )

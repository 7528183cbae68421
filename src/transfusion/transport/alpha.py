"""α: the factor on a task vector, one number or one per layer."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os.path import exists
from pathlib import Path
from typing import TypeAlias

import torch

from transfusion.architecture.naming import block_of
from transfusion.errors import SettingError, listing
from transfusion.files.tensor_files import row_blocks
from transfusion.model.model import Model
from transfusion.model.pair import common_parts
from transfusion.runtime.untrusted_files import parse_json, read_text

_DEFAULT = "default"
LARGEST = 2**24
"""The largest size of an α file, in bytes."""
MOST, LONGEST = 10_000, 1_000
"""The largest number of patterns, and the largest number of characters in each."""


@dataclass(frozen=True)
class Alpha:
    """α for every tensor: the value of the first pattern that matches its canonical name, or the default.

    >>> half_at_first = Alpha(1.0, {"encoder.layer.0.*": 0.5})
    >>> half_at_first.at("encoder.layer.0.output.dense.weight"), half_at_first.at("layernorm.weight")
    (0.5, 1.0)
    """

    default: float = 1.0
    patterns: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.patterns) > MOST:
            raise SettingError(
                f"alpha has {len(self.patterns)} patterns; at most {MOST} are allowed", hint=_FORM
            )
        for name, value in {_DEFAULT: self.default, **self.patterns}.items():
            if len(name) > LONGEST:
                raise SettingError(f"alpha has a pattern of {len(name)} characters: {name[:40]}…", hint=_FORM)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SettingError(f"alpha of {name} is {value!r}, which is not a number", hint=_FORM)
            if not 0 <= value <= sys.float_info.max:  # also refuses NaN
                raise SettingError(
                    f"alpha = {value}{f' for {name}' if self.patterns else ''}: it must be a number of at"
                    " least 0",
                    hint="1 adds all of τ, 0 adds nothing",
                )

    @classmethod
    def of(cls, value: Alpha | float | str | Path | Mapping[str, float]) -> Alpha:
        """Return α from a number, a mapping of patterns to numbers, or a JSON file of such a mapping.

        >>> Alpha.of({"default": 1.0, "encoder.layer.0.*": 0.5}).at("encoder.layer.0.output.dense.weight")
        0.5
        """
        match value:
            case Alpha():
                return value
            case Mapping():
                patterns = {name: one for name, one in value.items() if name != _DEFAULT}
                return cls(value.get(_DEFAULT, 1.0), patterns)
            case str() | Path():
                return _from_text(value)
        return cls(value)

    def at(self, name: str) -> float:
        """Return α for the tensor with this canonical name."""
        found = (value for pattern, value in self.patterns.items() if fnmatchcase(name, pattern))
        return float(next(found, self.default))

    def require_used(self, names: Iterable[str]) -> None:
        """Refuse patterns that match none of these tensors."""
        known = list(names)
        idle = [one for one in self.patterns if not any(fnmatchcase(name, one) for name in known)]
        if idle:
            raise SettingError(
                f"alpha: no tensor matches {listing(idle)}",
                hint="patterns are matched against the names that 'inspect' shows, without prefixes such as"
                f" 'model.': {listing(known, 2)}",
            )

    def as_json(self) -> float | dict[str, float]:
        """Return a number, or the mapping that an α file holds."""
        return {_DEFAULT: self.default, **self.patterns} if self.patterns else self.default

    def __str__(self) -> str:
        if not self.patterns:
            return f"{self.default:g}"
        values = (self.default, *self.patterns.values())
        return f"{min(values):.4g} to {max(values):.4g}, by layer"


AlphaArgument: TypeAlias = Alpha | float | str | Path | Mapping[str, float]
"""α as users give it: a number, a file, a mapping, or "auto"."""
_FORM = 'an α file is JSON such as {"default": 1.0, "encoder.layer.0.*": 0.5}'


def _from_text(text: str | Path) -> Alpha:
    """Return α from the text of a number, or from a file at that path."""
    try:
        return Alpha(float(str(text)))
    except ValueError:
        pass
    if not exists(text):
        raise SettingError(
            f"alpha = {str(text)[:200]}: neither a number nor a file that exists",
            hint=f"give a number, auto, or a file; {_FORM}",
        )
    try:
        value = parse_json(read_text(Path(text), SettingError, LARGEST), text, SettingError)
    except SettingError as error:
        raise SettingError(error.message, hint=_FORM) from error
    if not isinstance(value, dict):
        raise SettingError(f"{text}: a JSON object was expected", hint=_FORM)
    return Alpha.of(value)


AUTO = "auto"


def balanced_alpha(a: Model, b: Model) -> Alpha:
    """Return one α per layer: the norm of B's weights divided by the norm of A's.

    A change of 1 % of A's weights then is a change of 1 % of B's. If B is a permutation of A, every α is 1.
    """
    sizes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in common_parts(a, b):
        for which, model in enumerate((a, b)):
            sizes[block_of(name)][which] += _squares(model, name)
    ratios = {layer: _ratio(*both) for layer, both in sizes.items()}
    return Alpha(ratios.pop("", 1.0), {f"{layer}.*": ratio for layer, ratio in ratios.items()})


def _squares(model: Model, name: str) -> float:
    shape = model.info(name).shape
    blocks = (model.read(name, rows if shape else None).float() for rows in row_blocks(shape))
    return sum(float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2 for block in blocks)


def _ratio(a: float, b: float) -> float:
    return round((b / a) ** 0.5, 6) if a else 1.0

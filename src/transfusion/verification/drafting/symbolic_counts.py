"""Counts: numbers of heads and of blocks as a draft has them, to be computed and to be written down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from transfusion.architecture.table import Config

Term: TypeAlias = str | int
"""A setting, by its key in the configuration, or a number."""


@dataclass(frozen=True)
class Count:
    """A setting or a number, or how often another one is contained in it."""

    of: Term
    per: Term | None = None

    def under(self, config: Config) -> int:
        """The count in a model of this configuration."""
        value = _value(self.of, config)
        return value if self.per is None else value // _value(self.per, config)


def _value(term: Term, config: Config) -> int:
    value: int = config[term] if isinstance(term, str) else term
    return value

"""What an adapter's configuration says about one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from transfusion.errors import AdapterError
from transfusion.transportation.adapters.module_patterns import patterns

WRAPPED = ".base_layer."
"""In the name of a module, between one that PEFT wraps as a whole and a module within it."""


def matching_pattern(module: str) -> str:
    """The name that a configuration has for a module: within a wrapped one, the name of that."""
    return module.partition(WRAPPED)[0]


def words(text: str) -> frozenset[str]:
    """The words of a text: how lists of settings are written here."""
    return frozenset(text.split())


@dataclass(frozen=True)
class ModuleSettings:
    """A configuration, as it is meant for one module."""

    config: Mapping[str, Any]
    module: str
    """The module's name in the live model."""

    def value(self, key: str, default: Any = None) -> Any:
        """A setting that is the same for all modules; null is the default."""
        found = self.config.get(key)
        return default if found is None else found

    def patterned(self, table: str, key: str, default: float) -> float:
        """A setting that a table of patterns may change: the first whose pattern ends the module's name."""
        found: Mapping[str, Any] = self.value(table, {})
        met = patterns(tuple(found)).first(matching_pattern(self.module))
        value = self.value(key, default) if met is None else found[met]
        if isinstance(value, list):
            raise AdapterError(
                f"the adapter's configuration has marks of directions in {table}, as AdaLoRA has them",
                hint="fetch the adapter_config.json that belongs to these weights",
            )
        return float(value)

    @property
    def rank(self) -> int:
        return int(self.patterned("rank_pattern", "r", 8))

    @property
    def lora_scale(self) -> float:
        """What the product of LoRA's factors is multiplied by."""
        alpha = self.patterned("alpha_pattern", "lora_alpha", 8)
        return alpha / (sqrt(self.rank) if self.value("use_rslora", False) else self.rank)

    @property
    def loha_scale(self) -> float:
        return self.patterned("alpha_pattern", "alpha", 8) / self.rank

    @property
    def adalora_rank(self) -> int:
        """The rank that is left in this module: its pattern has a mark for each direction that was kept."""
        kept = self.value("rank_pattern", {}).get(f"{self.module}.lora_E")
        return (
            sum(kept) if isinstance(kept, list) else int(self.value("init_r", 12) if kept is None else kept)
        )

    @property
    def adalora_scale(self) -> float:
        """By the rank at the start, with the small number that keeps AdaLoRA from dividing by zero."""
        start = float(self.value("init_r", 12))
        alpha = float(self.value("lora_alpha", 8))
        return (alpha if alpha > 0 else start) / (start + 1e-5)

    @property
    def tokens(self) -> list[int]:
        """The tokens whose rows are trained, in the order in which they are stored."""
        chosen = self.value("token_indices") or self.value("trainable_token_indices", [])
        if isinstance(chosen, Mapping):
            ends = (rows for name, rows in chosen.items() if f".{self.module}".endswith(f".{name}"))
            chosen = next(ends, next(iter(chosen.values()), []))
        return [int(token) for token in chosen]

    def targeted_by(self, name: str) -> bool:
        """Whether an entry of a list of target modules means this module."""
        return self.module == name or self.module.endswith(f".{name}")

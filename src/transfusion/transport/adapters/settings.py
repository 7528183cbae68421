"""The configuration of an adapter: its schema, its settings for one module, and patterns of modules.

The patterns are regular expressions from untrusted files, so they are tried within limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from time import process_time
from typing import Annotated, Any, TypeAlias

import regex
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from transfusion.errors import AdapterError
from transfusion.runtime.untrusted_files import require_finite, validate

WRAPPED = ".base_layer."
"""In the name of a module: the mark between a module that PEFT wraps as a whole and a module within it."""
LONGEST = 1_000
"""The largest number of characters in a pattern."""
MOST = 10_000
"""The largest number of patterns in a table."""
SECONDS = 2.0
"""The time limit for all patterns of a table together. An ordinary pattern takes microseconds."""

_HINT = "write the name of the module, or the end of its name, in adapter_config.json"


def words(text: str) -> frozenset[str]:
    """Return the words of a text, as a set."""
    return frozenset(text.split())


def config_name(module: str) -> str:
    """Return the name of a module in a configuration; within a wrapped module, the name of that module."""
    return module.partition(WRAPPED)[0]


@dataclass(frozen=True)
class ModuleSettings:
    """A configuration, read for one module."""

    config: Mapping[str, Any]
    module: str
    """The module's name in the live model."""

    def value(self, key: str, default: Any = None) -> Any:
        """Return a setting that all modules share; null means the default."""
        found = self.config.get(key)
        return default if found is None else found

    def patterned(self, table: str, key: str, default: float) -> float:
        """Return a setting that a table of patterns may override: the first match decides."""
        found: Mapping[str, Any] = self.value(table, {})
        match = patterns(tuple(found)).first(config_name(self.module))
        value = self.value(key, default) if match is None else found[match]
        if isinstance(value, list):
            raise AdapterError(
                f"the adapter's configuration has lists of directions in {table}, as AdaLoRA has",
                hint="download the adapter_config.json that belongs to these weights",
            )
        return float(value)

    @property
    def rank(self) -> int:
        return int(self.patterned("rank_pattern", "r", 8))

    @property
    def lora_scale(self) -> float:
        """The factor on the product of LoRA's factors."""
        alpha = self.patterned("alpha_pattern", "lora_alpha", 8)
        return alpha / (sqrt(self.rank) if self.value("use_rslora", False) else self.rank)

    @property
    def loha_scale(self) -> float:
        return self.patterned("alpha_pattern", "alpha", 8) / self.rank

    @property
    def adalora_rank(self) -> int:
        """The rank that is left in this module: its pattern has a flag per direction, true if it was kept."""
        kept = self.value("rank_pattern", {}).get(f"{self.module}.lora_E")
        if isinstance(kept, list):
            return sum(kept)
        return int(self.value("init_r", 12) if kept is None else kept)

    @property
    def adalora_scale(self) -> float:
        """The scale by the initial rank, with AdaLoRA's constant against division by zero."""
        start = float(self.value("init_r", 12))
        alpha = float(self.value("lora_alpha", 8))
        return (alpha if alpha > 0 else start) / (start + 1e-5)

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens whose rows are trained, in stored order."""
        chosen = self.value("token_indices") or self.value("trainable_token_indices", [])
        if isinstance(chosen, Mapping):
            ends = (rows for name, rows in chosen.items() if f".{self.module}".endswith(f".{name}"))
            chosen = next(ends, next(iter(chosen.values()), []))
        return [int(token) for token in chosen]


# ── patterns ─────────────────────────────────────────────────────────────────────────────────


class ModulePatterns:
    """The patterns of a table, in order. A pattern matches names that end with it."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        if len(texts) > MOST:
            raise AdapterError(f"{len(texts)} patterns, and at most {MOST} are allowed", hint=_HINT)
        self._compiled = {text: _compiled(text) for text in texts}
        self._left = SECONDS

    def first(self, name: str) -> str | None:
        """Return the first pattern that matches a name."""
        return next((text for text, one in self._compiled.items() if self._matches(name, text, one)), None)

    def _matches(self, name: str, text: str, pattern: Any) -> bool:
        start = process_time()
        try:
            return pattern.match(name, timeout=max(self._left, 0.01)) is not None
        except TimeoutError as error:
            raise AdapterError(
                f"matching the pattern {_shown(text)} with {name} takes too long", hint=_HINT
            ) from error
        finally:
            self._left -= process_time() - start


@lru_cache(maxsize=16)
def patterns(texts: tuple[str, ...]) -> ModulePatterns:
    """Return compiled patterns."""
    return ModulePatterns(texts)


def _compiled(text: str) -> Any:
    """Compile a pattern as PEFT does: it matches the end of a module's name."""
    if len(text) > LONGEST:
        raise AdapterError(
            f"the pattern {_shown(text)} has {len(text)} characters, and at most {LONGEST} are allowed",
            hint=_HINT,
        )
    try:
        re.compile(text)  # PEFT's dialect; regex accepts more
        return regex.compile(rf"(.*\.)?({text})$")
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        raise AdapterError(
            f"the pattern {_shown(text)} is no regular expression ({str(error).splitlines()[0]})", hint=_HINT
        ) from error


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


# ── adapter_config.json ─────────────────────────────────────────────────────────────────────────


CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

Size: TypeAlias = Annotated[int, Field(ge=1, le=2**24)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Strength: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Names: TypeAlias = str | list[str] | None
Flag: TypeAlias = bool | None
Origin: TypeAlias = Annotated[str, StringConstraints(max_length=1_000, pattern=r"^[^\x00]*$")]
Index: TypeAlias = Annotated[int, Field(ge=0, le=2**24)]


class Mapped(TypedDict, total=False):
    base_model_class: str | None
    parent_library: str | None


class AdapterConfigSchema(TypedDict, total=False):
    """The settings that TransFusion reads, or that a moved adapter passes on to PEFT."""

    peft_type: str | None
    task_type: str | None
    auto_mapping: Mapped | None
    base_model_name_or_path: Origin | None
    revision: Origin | None
    inference_mode: Flag
    fan_in_fan_out: Flag
    use_rslora: Flag
    use_dora: Flag
    lora_bias: Flag
    apply_GS: Flag
    prefix_projection: Flag
    bias: bool | str | None
    init_lora_weights: bool | str | None
    r: Size | None
    init_r: Size | None
    target_r: Size | None
    lora_alpha: Strength | None
    alpha: Strength | None
    delora_lambda: Number | None
    lora_dropout: Number | None
    rank_dropout: Number | None
    module_dropout: Number | None
    rank_pattern: dict[str, Size | list[bool]] | None
    alpha_pattern: dict[str, Positive] | None
    lambda_pattern: dict[str, Number] | None
    target_modules: Names
    exclude_modules: Names
    modules_to_save: list[str] | None
    feedforward_modules: Names
    layers_to_transform: Index | list[Index] | None
    layers_pattern: Names
    token_indices: list[Index] | None
    trainable_token_indices: list[Index] | dict[str, list[Index]] | None
    num_virtual_tokens: Size | None
    num_transformer_submodules: Size | None
    num_attention_heads: Size | None
    num_layers: Size | None
    token_dim: Size | None
    encoder_hidden_size: Size | None


def require_sensible(label: str, config: dict[str, Any]) -> None:
    """Refuse a configuration with an invalid value."""
    where = f"{label}: adapter_config.json"
    hint = "download the adapter_config.json that belongs to these weights"
    validate(config, AdapterConfigSchema, where, hint=hint, error=AdapterError)
    require_finite(config, where, hint=hint, error=AdapterError)
    for key in ("rank_pattern", "alpha_pattern"):
        try:
            patterns(tuple(config.get(key) or ()))
        except AdapterError as error:
            raise AdapterError(f"{where}: {key}: {error.message}", hint=error.hint) from error

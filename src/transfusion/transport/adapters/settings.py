"""The configuration of an adapter: its schema, its settings for one module, and patterns of modules.

The patterns are regular expressions from untrusted files, so they are tried within limits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from time import process_time
from typing import Annotated, Any, TypeAlias

import regex
from pydantic import Field, StringConstraints, create_model
from typing_extensions import TypedDict

from transfusion.errors import AdapterError
from transfusion.runtime.untrusted_files import require_finite, validate

WRAPPED = ".base_layer."
"""In the name of a module: the mark between a module that PEFT wraps as a whole and a module within it."""
LONGEST = 1_000  # the largest number of characters in a pattern
MOST = 10_000  # the largest number of patterns in a table
SECONDS = 2.0  # the time limit for all patterns of a table together. An ordinary pattern takes microseconds.

_HINT = "write the name of the module, or the end of its name, in adapter_config.json"


def config_name(module: str) -> str:
    """Return the name of a module in a configuration; within a wrapped module, the name of that module."""
    return module.partition(WRAPPED)[0]


@dataclass(frozen=True)
class ModuleSettings:
    """The settings of one module: from a configuration, or from its tensors in a LoRA file."""

    config: Mapping[str, Any]
    module: str  # the module's name in the live model
    stored_rank: int | None = None
    stored_alpha: float | None = None

    def value(self, key: str, default: Any = None) -> Any:
        """Return a setting that all modules share; null means the default."""
        found = self.config.get(key)
        return default if found is None else found

    def _patterned(self, table: str, key: str) -> float:
        """Return a setting that a table of patterns may override: the first match decides."""
        found: Mapping[str, Any] = self.value(table, {})
        match = patterns(tuple(found)).first(config_name(self.module))
        value = self.value(key, 8) if match is None else found[match]
        if isinstance(value, list):
            raise AdapterError(
                f"the adapter's configuration has lists of directions in {table}, as AdaLoRA has",
                hint="download the adapter_config.json that belongs to these weights",
            )
        return float(value)

    @property
    def _adalora(self) -> bool:
        return str(self.config.get("peft_type")).upper() == "ADALORA"

    @property
    def rank(self) -> int:
        if self.stored_rank is not None:
            return self.stored_rank
        if not self._adalora:
            return int(self._patterned("rank_pattern", "r"))
        kept = self.value("rank_pattern", {}).get(f"{self.module}.lora_E", self.value("init_r", 12))
        return sum(kept) if isinstance(kept, list) else int(kept)  # a flag for every direction, true if kept

    @property
    def alpha(self) -> float:
        return self._patterned("alpha_pattern", "alpha" if "alpha" in self.config else "lora_alpha")

    @property
    def scale(self) -> float:
        """The factor on the product of the stored factors."""
        if self.stored_alpha is not None:
            return self.stored_alpha / self.rank
        if not self.config:  # a LoRA file without alphas
            return 1.0
        if self._adalora:  # by the initial rank, with its constant against division by zero
            start, alpha = float(self.value("init_r", 12)), float(self.value("lora_alpha", 8))
            return (alpha if alpha > 0 else start) / (start + 1e-5)
        return self.alpha / (sqrt(self.rank) if self.value("use_rslora", False) else self.rank)

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens whose rows are trained, in stored order."""
        chosen = self.value("token_indices") or self.value("trainable_token_indices", [])
        if isinstance(chosen, Mapping):
            ends = (rows for name, rows in chosen.items() if f".{self.module}".endswith(f".{name}"))
            chosen = next(ends, next(iter(chosen.values()), []))
        return [int(token) for token in chosen]


def rank_settings(ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return PEFT's settings of a LoRA with these ranks by module, and scales of 1."""
    found = {config_name(module): rank for module, rank in ranks.items()}
    usual = Counter(found.values()).most_common(1)[0][0]
    other = {re.escape(module): rank for module, rank in found.items() if rank != usual}
    now = {"peft_type": "LORA", "r": usual, "lora_alpha": usual, "use_rslora": False}
    return {**now, "rank_pattern": other, "alpha_pattern": dict(other)}


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
        for text, pattern in self._compiled.items():
            start = process_time()
            try:
                if pattern.match(name, timeout=max(self._left, 0.01)):
                    return text
            except TimeoutError as error:
                raise AdapterError(
                    f"matching the pattern {_shown(text)} with {name} takes too long", hint=_HINT
                ) from error
            finally:
                self._left -= process_time() - start
        return None


patterns = lru_cache(maxsize=16)(ModulePatterns)  # returns compiled patterns


def _compiled(text: str) -> Any:
    """Compile a pattern as PEFT does: it matches the end of a module's name."""
    if len(text) > LONGEST:
        why = f"has {len(text)} characters, and at most {LONGEST} are allowed"
        raise AdapterError(f"the pattern {_shown(text)} {why}", hint=_HINT)
    try:
        re.compile(text)  # PEFT's dialect; regex accepts more
        return regex.compile(rf"(.*\.)?({text})$")
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        why = f"is no regular expression ({str(error).splitlines()[0]})"
        raise AdapterError(f"the pattern {_shown(text)} {why}", hint=_HINT) from error


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


# ── adapter_config.json ─────────────────────────────────────────────────────────────────────────


CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

Size: TypeAlias = Annotated[int, Field(ge=1, le=2**24)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Strength: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Origin: TypeAlias = Annotated[str, StringConstraints(max_length=1_000, pattern=r"^[^\x00]*$")]
Index: TypeAlias = Annotated[int, Field(ge=0, le=2**24)]


class BaseClass(TypedDict, total=False):
    """The class of the base, as PEFT records it."""

    base_model_class: str | None
    parent_library: str | None


_TYPES: dict[Any, str] = {
    str: "peft_type task_type",
    BaseClass: "auto_mapping",
    Origin: "base_model_name_or_path revision",
    bool: "inference_mode fan_in_fan_out use_rslora use_dora lora_bias",
    bool | str: "bias init_lora_weights",
    Size: "r init_r target_r num_virtual_tokens num_transformer_submodules num_attention_heads num_layers"
    " token_dim encoder_hidden_size",
    Strength: "lora_alpha alpha",
    Number: "lora_dropout rank_dropout module_dropout",
    dict[str, Size | list[bool]]: "rank_pattern",
    dict[str, Positive]: "alpha_pattern",
    str | list[str]: "target_modules exclude_modules feedforward_modules layers_pattern",
    list[str]: "modules_to_save",
    Index | list[Index]: "layers_to_transform",
    list[Index]: "token_indices",
    list[Index] | dict[str, list[Index]]: "trainable_token_indices",
}
"""The types of settings that TransFusion reads, or that a moved adapter passes on to PEFT; null is none."""
_FIELDS: Any = {name: (kind | None, None) for kind, names in _TYPES.items() for name in names.split()}
AdapterConfig = create_model("AdapterConfig", **_FIELDS)


def require_sensible(label: str, config: dict[str, Any]) -> None:
    """Refuse a configuration with an invalid value."""
    where = f"{label}: adapter_config.json"
    hint = "download the adapter_config.json that belongs to these weights"
    validate(config, AdapterConfig, where, hint=hint, error=AdapterError)
    require_finite(config, where, hint=hint, error=AdapterError)
    for key in ("rank_pattern", "alpha_pattern"):
        try:
            patterns(tuple(config.get(key) or ()))
        except AdapterError as error:
            raise AdapterError(f"{where}: {key}: {error.message}", hint=error.hint) from error

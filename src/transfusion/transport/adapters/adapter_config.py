"""The schema of adapter_config.json, checked when an adapter is opened."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from transfusion.errors import AdapterError
from transfusion.runtime.untrusted_files import require_finite, validate
from transfusion.transport.adapters.module_settings import patterns

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

"""The formulas of adapters, on weight matrices with one row per output and one column per input.

Weights are brought into this form first, whether a library stores them transposed or not. A convolution has
all its inputs in one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from transfusion.transport.adapters.module_settings import ModuleSettings

Parts: TypeAlias = Mapping[str, Tensor]
"""The stored tensors of one module, by the names of their parts."""
Factors: TypeAlias = tuple[Tensor, Tensor]
"""A change of low rank as a product: (outputs, rank) and (rank, inputs)."""


def row_norms(matrix: Tensor) -> Tensor:
    """Return the norm of every row, summed in float64."""
    lengths: Tensor = torch.linalg.vector_norm(matrix.double(), dim=1)
    return lengths.to(matrix.dtype)


def _product(parts: Parts, left: str, right: str) -> Tensor:
    return parts[left].flatten(1) @ parts[right].flatten(1)


def _factors(parts: Parts, prefix: str) -> tuple[str, str]:
    """Return the names of the two factors; those of embeddings differ."""
    middle = "_embedding" if f"{prefix}_embedding_A" in parts else ""
    return f"{prefix}{middle}_B", f"{prefix}{middle}_A"


# ── sums: LoRA and relatives ─────────────────────────────────────────────────────────────────


def lora_added(parts: Parts, settings: ModuleSettings) -> Tensor:
    return settings.lora_scale * _product(parts, *_factors(parts, "lora"))


def lora_factors(parts: Parts, settings: ModuleSettings) -> Factors:
    left, right = _factors(parts, "lora")
    return settings.lora_scale * parts[left].flatten(1), parts[right].flatten(1)


def dora(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return weight + BA with every row rescaled to its trained norm."""
    together = weight + lora_added(parts, settings)
    lengths = parts["lora_magnitude_vector"].flatten() / row_norms(together)
    return together * lengths[:, None]


def lora_bias(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return bias + settings.lora_scale * parts["lora_B.bias"].flatten()


def adalora_added(parts: Parts, settings: ModuleSettings) -> Tensor:
    return settings.adalora_scale * (parts["lora_B"] @ (parts["lora_A"] * parts["lora_E"]))


def adalora_factors(parts: Parts, settings: ModuleSettings) -> Factors:
    return settings.adalora_scale * parts["lora_B"], parts["lora_A"] * parts["lora_E"]


def loha_added(parts: Parts, settings: ModuleSettings) -> Tensor:
    return (
        settings.loha_scale
        * _product(parts, "hada_w1_a", "hada_w1_b")
        * _product(parts, "hada_w2_a", "hada_w2_b")
    )


def delora_added(parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return BA with every rank-one term normalised to λ/r, and columns scaled by the base's column norms."""
    left, right = parts["delora_B"], parts["delora_A"]
    lengths = row_norms(right).clamp(min=1e-4) * row_norms(left.T).clamp(min=1e-4)
    strengths = parts["delora_lambda"] / settings.rank / lengths
    return (left * strengths) @ right * parts["delora_w_norm"]


# ── products ─────────────────────────────────────────────────────────────────────────────────


def hira(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return weight * (1 + _product(parts, *_factors(parts, "hira")))


def ia3(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return weight * parts["ia3_l"]


def ia3_bias(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return bias * parts["ia3_l"].flatten()


def hra(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    """Apply Householder reflections to the inputs; with ``apply_GS``, of orthonormalised directions."""
    directions = parts["hra_u"]
    if settings.value("apply_GS", False):
        basis: Tensor = torch.linalg.qr(directions).Q
        return weight - 2 * (weight @ basis) @ basis.T
    for direction in (directions / row_norms(directions.T)).T:
        weight = weight - 2 * torch.outer(weight @ direction, direction)
    return weight


def beft_bias(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return bias + parts["beft_bias"].flatten()


# ── LoRA files, whose modules may have different parts ───────────────────────────────────────


def added_by_file(parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return the change of a weight; 0 if only the bias is changed."""
    change = parts["diff"].flatten(1) if "diff" in parts and parts["diff"].ndim > 1 else parts.get("diff")
    change = torch.zeros(()) if change is None else change
    if "lora_B" in parts:
        change = change + lora_added(parts, settings)
    return change + loha_added(parts, settings) if "hada_w1_a" in parts else change


def factors_by_file(parts: Parts, settings: ModuleSettings) -> Factors | None:
    alone = "lora_B" in parts and not parts.keys() & {"diff", "hada_w1_a"}
    return lora_factors(parts, settings) if alone else None


def changed_by_file(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return weight + change; where row norms were trained, with every row rescaled to its norm."""
    if "lora_magnitude_vector" in parts:
        return dora(weight, parts, settings)
    return weight + added_by_file(parts, settings)


def bias_by_file(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    if "lora_B.bias" in parts:
        bias = lora_bias(bias, parts, settings)
    return bias + parts["diff_b"].flatten() if "diff_b" in parts else bias

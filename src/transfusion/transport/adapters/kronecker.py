"""LoKr adapters read as LoRAs: the Kronecker product of two matrices as a product of two low-rank factors.

π changes the order of units, and no Kronecker product is left; a LoRA moves. The singular vectors of
w1 ⊗ w2 are the Kronecker products of those of w1 and w2, so that no large matrix is decomposed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import AdapterError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.tensor_files import Rows, TensorInfo
from transfusion.transport.adapters.checks import COMMON

MOST = 128
"""The largest rank of a LoRA that stays an adapter; merged into a model, the product is exact."""
LOKR = "LOKR"
_KEY = re.compile(r"(?P<owner>.+)\.lokr_(?P<part>\w+)")
_TUCKER = "a Tucker decomposition, with a core tensor that TransFusion does not know"
_MERGE = "merge the adapter into its base, and move the merged model"
_AGAIN = "the file is damaged or incomplete; download or save it again"


@dataclass(frozen=True)
class Kronecker:
    """The stored parts of one module, w1 and w2: each one tensor, or a product of two."""

    parts: Mapping[str, TensorInfo]
    scale: float
    most: int | None
    """The largest rank; None for all of it."""

    endings: tuple[str, str] = (".lora_A.weight", ".lora_B.weight")
    """The ends of the keys of its LoRA."""

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Return the shapes of the stored parts of w1 or of w2."""
        return [self.parts[part].shape for part in _side(name, self.parts)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of w1 or w2; that of a convolution has its kernel at the end."""
        first, *second = self.shapes(name)
        return (*first[:1], *(second[0] if second else first)[1:])

    @property
    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of lora_A and lora_B."""
        (rows, columns), (height, width, *kernel) = self.shape("w1"), self.shape("w2")
        return (self.rank, columns * width, *kernel), (rows * height, self.rank, *[1] * len(kernel))

    @property
    def rank(self) -> int:
        """The rank of the product, or the largest that is asked for."""
        whole = 1
        for name in ("w1", "w2"):
            whole *= min(size for shape in self.shapes(name) for size in (shape[0], prod(shape[1:])))
        return whole if self.most is None else min(whole, self.most)

    def decomposed(self, checkpoint: Checkpoint) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
        """Return the singular vectors and values of w1 and w2, and the order of all products of values."""
        found = []
        for name in ("w1", "w2"):
            keys = [self.parts[part].name for part in _side(name, self.parts)]
            first, *second = (checkpoint.read_finite(key).double().flatten(1) for key in keys)
            found.append(torch.linalg.svd(first @ second[0] if second else first, full_matrices=False))
        return found, torch.outer(found[0][1], found[1][1]).flatten().argsort(descending=True)

    def factors(self, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
        """Return lora_A and lora_B, of equal norm, for a scale of 1."""
        ((u, s, v), (x, t, y)), order = self.decomposed(checkpoint)
        some = order[: self.rank]
        one, two = some // len(t), some % len(t)
        root = (abs(self.scale) * s[one] * t[two]).sqrt()
        b = torch.einsum("ir,jr->ijr", u[:, one], x[:, two]).flatten(0, 1) * root  # (outputs, rank)
        a = torch.einsum("ri,rj->rij", v[one], y[two]).flatten(1) * root[:, None]  # (rank, inputs)
        shapes = self.extents
        return a.reshape(shapes[0]), (b if self.scale > 0 else -b).reshape(shapes[1])

    def kept(self, checkpoint: Checkpoint) -> float:
        """Return the share of the squared norm that the rank holds."""
        ((_, s, _), (_, t, _)), order = self.decomposed(checkpoint)
        squares = torch.outer(s, t).flatten().double().square()
        return float(squares[order[: self.rank]].sum() / squares.sum()) if squares.any() else 1.0


@dataclass
class KroneckerCheckpoint(Checkpoint):
    """An adapter's file in which the factors of LoRAs stand for Kronecker products."""

    stored: Checkpoint | None = None
    products: Mapping[str, tuple[Kronecker, int]] = field(default_factory=dict)
    """By the key of a factor: its module, and 0 for lora_A or 1 for lora_B."""
    _last: tuple[Kronecker, tuple[Tensor, Tensor]] | None = field(default=None, repr=False)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        assert self.stored is not None
        if name not in self.products:
            return self.stored.read(name, rows)
        module, side = self.products[name]
        last = self._last
        if last is None or last[0] is not module:
            self._last = last = module, module.factors(self.stored)
        value = last[1][side].to(self.tensors[name].dtype)
        return value if rows is None else value[rows]

    def require_kernel(self, key: str, dims: int) -> None:
        """Refuse a factor for a convolution of so many dimensions whose kernel is not stored as one."""
        if key in self.products and len(self.tensors[key].shape) < dims:
            raise AdapterError(
                f"{self.label}: {key.rpartition('.lora_')[0]} is a convolution, and its LoKr does not say of"
                " which kernel",
                hint=_MERGE,
            )

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of every module, by the key of its lora_A."""
        return {key: module.rank for key, (module, side) in self.products.items() if not side}

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the products became, for records: the largest rank, and the least share that it holds."""
        assert self.stored is not None
        modules = [module for module, side in self.products.values() if not side]
        cut = [module for module in modules if module.rank < replace(module, most=None).rank]
        kept = min((module.kept(self.stored) for module in cut), default=1.0)
        return {"converted_from": LOKR, "rank": max(self.ranks.values()), "kept": kept}


def kronecker_parts(stored: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    """Return the stored parts of every LoKr module, by the module's name in the file."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    for key, info in stored.tensors.items():
        if match := _KEY.fullmatch(key):
            parts.setdefault(match["owner"], {})[match["part"]] = info
    for owner, found in parts.items():
        _require_sound(f"{stored.label}: {owner}", found)
    return parts


def as_lora(
    stored: Checkpoint, modules: Mapping[str, Kronecker], unused: Collection[str] = ()
) -> KroneckerCheckpoint:
    """Return the file of a LoKr adapter with the keys and values of a LoRA."""
    tensors = {
        key: info for key, info in stored.tensors.items() if not _KEY.fullmatch(key) and key not in unused
    }
    products: dict[str, tuple[Kronecker, int]] = {}
    for owner, module in modules.items():
        for side, (ending, shape) in enumerate(zip(module.endings, module.extents, strict=True)):
            key = owner + ending
            tensors[key] = replace(next(iter(module.parts.values())), name=key, shape=shape)
            products[key] = module, side
    label, root, files = stored.label, stored.root, stored.files
    return KroneckerCheckpoint(label, root, tensors, files, stored=stored, products=products)


def _require_sound(where: str, parts: Mapping[str, TensorInfo]) -> None:
    """Refuse parts that are missing, double, or of shapes that do not belong together."""
    if cores := sorted(part for part in parts if part.startswith("t")):
        raise AdapterError(f"{where} has {listing(cores)}: {_TUCKER}", hint=_MERGE)
    sides = {name: _side(name, parts) for name in ("w1", "w2")}
    if {part for side in sides.values() for part in side} != parts.keys():
        raise AdapterError(f"{where} has the parts {listing(sorted(parts))} of a LoKr", hint=_AGAIN)
    for name, side in sides.items():
        shapes = [parts[part].shape for part in side]
        plain = all(len(shape) == 2 for shape in shapes) or (name == "w2" and len(shapes) == 1)
        joined = len(shapes) == 1 or shapes[0][1:] == shapes[1][:1]
        if not plain or not joined or any(len(shape) < 2 or 0 in shape for shape in shapes):
            raise AdapterError(f"{where} has {name} in the shapes {listing(shapes)}", hint=_AGAIN)


def _side(name: str, parts: Collection[str]) -> tuple[str, ...]:
    """Return the stored parts of w1 or of w2."""
    return (name,) if name in parts else (f"{name}_a", f"{name}_b")


def lora_config(config: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return PEFT's configuration of a LoRA in place of that of a LoKr; ranks are by module."""
    usual = max(set(ranks.values()), key=list(ranks.values()).count)
    other = {re.escape(module): rank for module, rank in ranks.items() if rank != usual}
    kept = {key: value for key, value in config.items() if key in COMMON - {"init_weights"}}
    now = {"peft_type": "LORA", "r": usual, "lora_alpha": usual, "use_rslora": False}
    return {**kept, **now, "rank_pattern": other, "alpha_pattern": dict(other)}

"""Adapters read as others: a LoKr as a LoRA, and any adapter in another vocabulary.

A LoKr changes a weight by the Kronecker product of two matrices, a LoRA by a product of two low-rank factors.
π changes the order of units, and no Kronecker product is left; a LoRA moves. The singular vectors of
w1 ⊗ w2 are the Kronecker products of those of w1 and w2, so that no large matrix is decomposed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from transfusion.errors import AdapterError, listing
from transfusion.files.checkpoint import Checkpoint, CheckpointView, RowSelection
from transfusion.files.lora_keys import TUCKER
from transfusion.files.tensor_files import Rows, TensorInfo
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY, VocabularyMap
from transfusion.transport.adapters.kinds import MERGE, TOKENS, WeightReference

if TYPE_CHECKING:
    from transfusion.transport.adapters.adapter import Adapter, AdapterTensor

MOST = 128  # the largest rank of a LoRA that stays an adapter; merged into a model, the product is exact
LOKR = "LOKR"
_KEY = re.compile(r"(?P<owner>.+)\.lokr_(?P<part>\w+)")
_AGAIN = "the file is damaged or incomplete; download or save it again"

Sides: TypeAlias = tuple[tuple[TensorInfo, ...], ...]
"""The stored tensors of w1 and of w2: one each, or two to be multiplied."""


@dataclass(frozen=True)
class Product(ABC):
    """The change of one module as a product of two factors, for a scale of 1."""

    like: TensorInfo
    """A stored tensor, in whose type the factors are."""
    inputs: int
    outputs: int
    most: int | None  # the largest rank; None for all of it

    @property
    @abstractmethod
    def full_rank(self) -> int:
        """The rank that holds all of the change."""

    @property
    def rank(self) -> int:
        return self.full_rank if self.most is None else min(self.full_rank, self.most)

    @property
    def endings(self) -> tuple[str, str]:
        """The ends of the keys of its LoRA."""
        return ".lora_A.weight", ".lora_B.weight"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of lora_A and lora_B."""
        return (self.rank, self.inputs), (self.outputs, self.rank)

    @abstractmethod
    def factors(self, checkpoint: Checkpoint) -> tuple[tuple[Tensor, Tensor], float]:
        """Return lora_A and lora_B for a scale of 1, and the share of the squared norm that they hold."""


@dataclass(frozen=True)
class Kronecker:
    """The product w1 ⊗ w2 that one module adds."""

    sides: Sides
    scale: float
    most: int | None  # the largest rank; None for all of it
    endings: tuple[str, str] = (".lora_A.weight", ".lora_B.weight")  # the ends of the keys of its LoRA

    @property
    def like(self) -> TensorInfo:
        return self.sides[0][0]

    @property
    def full_rank(self) -> int:
        """The rank of the product: that of w1 times that of w2."""
        return prod(
            min(size for one in side for size in (one.shape[0], prod(one.shape[1:]))) for side in self.sides
        )

    @property
    def rank(self) -> int:
        return self.full_rank if self.most is None else min(self.full_rank, self.most)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of lora_A and lora_B; w2 of a convolution has its kernel at the end."""
        (rows, columns), (height, width, *kernel) = (
            (side[0].shape[0], *side[-1].shape[1:]) for side in self.sides
        )
        return (self.rank, columns * width, *kernel), (rows * height, self.rank, *[1] * len(kernel))

    def factors(self, checkpoint: Checkpoint) -> tuple[tuple[Tensor, Tensor], float]:
        """Return lora_A and lora_B of equal norm for a scale of 1, and the share of the squared norm that
        their rank holds.
        """
        found = []
        for side in self.sides:
            first, *second = (checkpoint.read_finite(one.name).double().flatten(1) for one in side)
            found.append(torch.linalg.svd(first @ second[0] if second else first, full_matrices=False))
        (u, s, v), (x, t, y) = found  # w1 = u·s·v, w2 = x·t·y
        products = torch.outer(s, t).flatten()  # the singular values of w1 ⊗ w2
        largest = products.argsort(descending=True)[: self.rank]
        one, two = largest // len(t), largest % len(t)
        root = (abs(self.scale) * products[largest]).sqrt()
        b = torch.einsum("ir,jr->ijr", u[:, one], x[:, two]).flatten(0, 1) * root  # (outputs, rank)
        a = torch.einsum("ri,rj->rij", v[one], y[two]).flatten(1) * root[:, None]  # (rank, inputs)
        total = float(products.square().sum())
        kept = float(products[largest].square().sum()) / total if total else 1.0
        shapes = self.shapes
        return (a.reshape(shapes[0]), (b if self.scale > 0 else -b).reshape(shapes[1])), kept


@dataclass
class ConvertedCheckpoint(Checkpoint):
    """An adapter's file in which the factors of LoRAs stand for other products."""

    stored: Checkpoint | None = None
    products: Mapping[str, tuple[Kronecker | Product, int]] = field(default_factory=dict)
    """By the key of a factor: its module, and 0 for lora_A or 1 for lora_B."""
    kind: str = LOKR
    _last: tuple[Kronecker | Product, tuple[Tensor, Tensor]] | None = field(default=None, repr=False)

    @classmethod
    def over(
        cls,
        stored: Checkpoint,
        modules: Mapping[str, Kronecker] | Mapping[str, Product],
        unused: Collection[str] = (),
        *,
        kind: str = LOKR,
    ) -> ConvertedCheckpoint:
        """Return the file of an adapter with the keys and values of a LoRA."""
        tensors = {
            key: info for key, info in stored.tensors.items() if not _KEY.fullmatch(key) and key not in unused
        }
        products: dict[str, tuple[Kronecker | Product, int]] = {}
        for owner, module in modules.items():
            for side, (ending, shape) in enumerate(zip(module.endings, module.shapes, strict=True)):
                tensors[owner + ending] = replace(module.like, name=owner + ending, shape=shape)
                products[owner + ending] = module, side
        where = stored.label, stored.root, tensors, stored.files
        return cls(*where, stored=stored, products=products, kind=kind)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        assert self.stored is not None
        if name not in self.products:
            return self.stored.read(name, rows)
        module, side = self.products[name]
        last = self._last
        if last is None or last[0] is not module:  # both factors are asked for, one after the other
            self._last = last = module, module.factors(self.stored)[0]
        value = last[1][side].to(self.tensors[name].dtype)
        return value if rows is None else value[rows]

    def require_kernel(self, key: str, dims: int) -> None:
        """Refuse a factor for a convolution of so many dimensions whose kernel is not stored as one."""
        if key in self.products and len(self.tensors[key].shape) < dims:
            raise AdapterError(
                f"{self.label}: {key.rpartition('.lora_')[0]} is a convolution, and its LoKr does not say of"
                " which kernel",
                hint=MERGE,
            )

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the products became, for records: the largest rank, and the least share that it holds."""
        assert self.stored is not None
        modules = [module for module, side in self.products.values() if not side]
        cut = [module for module in modules if module.rank < module.full_rank]
        kept = min((module.factors(self.stored)[1] for module in cut), default=1.0)
        return {"converted_from": self.kind, "rank": max(module.rank for module in modules), "kept": kept}


def kronecker_sides(stored: Checkpoint) -> dict[str, Sides]:
    """Return w1 and w2 of every LoKr module, by the module's name in the file; refuse damaged ones."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for key, info in stored.tensors.items():
        if match := _KEY.fullmatch(key):
            modules.setdefault(match["owner"], {})[match["part"]] = info
    return {owner: _sides(f"{stored.label}: {owner}", parts) for owner, parts in modules.items()}


def _sides(where: str, parts: Mapping[str, TensorInfo]) -> Sides:
    """Return the stored tensors of w1 and w2; refuse parts that are missing, double, or do not fit."""
    if cores := sorted(part for part in parts if part.startswith("t")):
        raise AdapterError(f"{where} has {listing(cores)}: {TUCKER}", hint=MERGE)
    names = [(name,) if name in parts else (f"{name}_a", f"{name}_b") for name in ("w1", "w2")]
    if {part for side in names for part in side} != parts.keys():
        raise AdapterError(f"{where} has the parts {listing(sorted(parts))} of a LoKr", hint=_AGAIN)
    for side in names:
        shapes = [parts[part].shape for part in side]
        plain = all(len(shape) == 2 for shape in shapes) or (side == ("w2",) and len(shapes[0]) > 2)
        joined = len(shapes) == 1 or shapes[0][1:] == shapes[1][:1]
        if not plain or not joined or any(0 in shape for shape in shapes):
            raise AdapterError(f"{where} has {side[0][:2]} in the shapes {listing(shapes)}", hint=_AGAIN)
    return tuple(tuple(parts[part] for part in side) for side in names)


# ── another vocabulary ───────────────────────────────────────────────────────────────────────


def adapter_in_vocabulary(adapter: Adapter, base: Model) -> Adapter:
    """Return the adapter in the vocabulary that its base is read in; the digest stays.

    Rows of tokens that the other vocabulary lacks are dropped, and new rows change nothing.
    """
    if (vocabulary := base.vocabulary) is None or base.original is None:
        return adapter
    selections = dict[str, RowSelection]()
    for factor in adapter.factors(base.original):
        if factor.part is TOKENS:
            selections[factor.key] = _kept_tokens(adapter, factor, vocabulary)
        for dim in factor.layout.dims_with(VOCABULARY):
            if adapter.kind.name == "DORA" and factor.part.name == "lora_embedding_A":
                raise adapter.error(
                    f"{factor.key} of a DORA adapter depends on all tokens together, and A and B have"
                    " different ones",
                    MERGE,
                )
            fill = 1.0 if factor.part.reference is WeightReference.ONE else 0.0
            size = adapter.checkpoint.tensors[factor.key].shape[dim]
            selections[factor.key] = vocabulary.selection(size, dim, fill)
    config = {key: _in_rows_of(vocabulary, key, value) for key, value in adapter.config.items()}
    checkpoint = CheckpointView.over(adapter.checkpoint, selections)
    return replace(adapter, checkpoint=checkpoint, config=config, original=adapter)


def _kept_tokens(adapter: Adapter, factor: AdapterTensor, vocabulary: VocabularyMap) -> RowSelection:
    """Return the trained tokens that the other vocabulary has; refuse an adapter without any."""
    tokens = adapter.settings(factor.module).tokens
    kept = [place for place, token in enumerate(tokens) if vocabulary.row_of(token) is not None]
    if not kept:
        raise adapter.error(
            f"{factor.key} has {len(tokens)} trained token(s), and B's vocabulary has none of them",
            "train these tokens anew on B",
        )
    return RowSelection(torch.tensor(kept))


def _in_rows_of(vocabulary: VocabularyMap, key: str, value: Any) -> Any:
    """Return a setting with the ids of trained tokens in another vocabulary; other settings as they are."""
    if key not in ("token_indices", "trainable_token_indices") or not value:
        return value
    if isinstance(value, Mapping):
        return {name: _in_rows_of(vocabulary, key, tokens) for name, tokens in value.items()}
    return [row for token in value if (row := vocabulary.row_of(int(token))) is not None]

"""Adapters that become LoRAs once their base is known: VeRA and OFT.

A VeRA scales two random projections that all modules share. Its change λb·B·λd·A is the product of two
factors of its rank: nothing is lost. An OFT rotates blocks of neighbouring inputs, W' = W·Rᵀ, and π separates
neighbours. Its change W·(R − 1)ᵀ is a matrix like any other: the LoRA has its largest singular directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transfusion.architecture.naming import Naming
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.tensor_files import TensorInfo
from transfusion.model.model import Model
from transfusion.transport.adapters.conversions import ConvertedCheckpoint, Product
from transfusion.transport.adapters.kinds import COMMON, LORA, MERGE
from transfusion.transport.adapters.places import Place, Places, as_matrix
from transfusion.transport.adapters.settings import rank_settings

if TYPE_CHECKING:
    from transfusion.transport.adapters.adapter import Adapter

VERA, OFT = "VERA", "OFT"
_PROJECTIONS = {side: f"base_model.vera_{side}" for side in "AB"}
_AGAIN = "download the adapter again, with its adapter_config.json"
_SPARE, _ROUNDS = 16, 6  # of the search for the largest singular directions


@dataclass(frozen=True)
class Projections(Product):
    """The change of one module by a VeRA."""

    keys: tuple[str, str, str, str]
    """Of A and B, which all modules share, and of their scales λd and λb."""

    @property
    def full_rank(self) -> int:
        return self.like.shape[0]

    def factors(self, checkpoint: Checkpoint) -> tuple[tuple[Tensor, Tensor], float]:
        a, b, inner, outer = (checkpoint.read_finite(key).double() for key in self.keys)
        return (inner[:, None] * a[:, : self.inputs], outer[:, None] * b[: self.outputs]), 1.0


@dataclass(frozen=True)
class Rotation(Product):
    """The change of one module by an OFT: W·(R − 1)ᵀ."""

    terms: int | None
    """How many terms of the Cayley transform's series it has; None for the transform itself."""
    weight: Callable[[], Tensor]

    @property
    def full_rank(self) -> int:
        return min(self.inputs, self.outputs)

    def factors(self, checkpoint: Checkpoint) -> tuple[tuple[Tensor, Tensor], float]:
        rotation = rotation_of(checkpoint.read_finite(self.like.name).double(), self.terms)
        blocks = rotation.expand(self.inputs // rotation.shape[-1], -1, -1)
        turned = blocks - torch.eye(rotation.shape[-1], dtype=torch.float64)
        weight = self.weight().double()  # (outputs, inputs)
        parts = weight.reshape(len(weight), len(blocks), -1)
        change = torch.einsum("onk,nck->onc", parts, turned).flatten(1)  # (outputs, inputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            left, values, right = torch.svd_lowrank(
                change, min(self.rank + _SPARE, self.full_rank), niter=_ROUNDS
            )
        root = values[: self.rank].sqrt()
        total, held = float(change.square().sum()), float(values[: self.rank].square().sum())
        factors = root[:, None] * right[:, : self.rank].T, left[:, : self.rank] * root
        return factors, min(held / total, 1.0) if total and self.rank < self.full_rank else 1.0


def rotation_of(packed: Tensor, terms: int | None) -> Tensor:
    """Return R of every block, as PEFT computes it from the upper triangles of skew-symmetric matrices Q: the
    Cayley transform (1 − Q)(1 + Q)⁻¹ of −Q, or the first terms of its series 1 + 2Q + 2Q² + … + Qⁿ.
    """
    blocks, numbers = packed.shape
    size = _block_size(numbers)
    rows, columns = torch.triu_indices(size, size, 1)
    skew = packed.new_zeros(blocks, size, size)
    skew[:, rows, columns] = packed
    skew = skew - skew.mT
    one = torch.eye(size, dtype=packed.dtype)
    if terms is None:
        exact: Tensor = torch.linalg.solve(one + skew, one - skew, left=False)
        return exact
    found, power = one.expand_as(skew), skew
    last = (
        max(terms - 1, 3) if terms > 2 else 0
    )  # PEFT's series has a fourth term even if three are asked for
    for exponent in range(1, max(terms - 1, last) + 1):
        found = found + (1 if exponent == last else 2) * power
        power = power @ skew
    return found


def _block_size(numbers: int) -> int:
    """Return the size of a block with so many numbers above its diagonal."""
    return (1 + isqrt(1 + 8 * numbers)) // 2


def lora_on_base(adapter: Adapter, base: Model, most: int | None) -> Adapter:
    """Return a VeRA or an OFT as a LoRA for its base; the rank of an OFT is at most ``most``."""
    base = base.original or base
    places = Places(Naming(base.family, live=True), base.architecture, base.ties)
    parts: dict[str, dict[str, str]] = {}
    for key, one in adapter.keys.items():
        if one.part:
            parts.setdefault(key.rpartition(f".{one.part}")[0], {})[one.part] = key
    make = _projections if adapter.kind.name == VERA else _rotation
    modules: dict[str, Product] = {}
    for owner, keys in parts.items():
        name = adapter.keys[next(iter(keys.values()))].module
        place = places.of_module(name)
        if place.tensor not in base.architecture.tensors:
            raise adapter.error(
                f"{name} belongs to {place.tensor}, which the base does not have",
                "give the base that the adapter was trained on as `base`",
            )
        if len(base.info(place.tensor).shape) - (place.member is not None) != 2:
            raise adapter.error(f"{name} is no linear map ({place.tensor})", MERGE)
        if absent := sorted(adapter.kind.absent(keys.keys())):
            raise adapter.error(f"{name} has no {absent[0]}", _AGAIN)
        modules[owner] = make(adapter, name, keys, partial(_matrix, base, place), most)
    if not modules:
        raise adapter.error(f"the file has no tensor of a {adapter.kind.name} adapter", _AGAIN)
    ranks = {
        adapter.keys[next(iter(keys.values()))].module: modules[owner].rank for owner, keys in parts.items()
    }
    kept = {
        key: value for key, value in adapter.config.items() if key in set(COMMON.split()) - {"init_weights"}
    }
    bias = {"bias": "lora_only"} if str(kept.get("bias")).endswith("_only") else {}
    checkpoint = ConvertedCheckpoint.over(
        adapter.checkpoint,
        modules,
        {*_PROJECTIONS.values(), *(key for keys in parts.values() for key in keys.values())},
        kind=adapter.kind.name,
    )
    return replace(
        adapter, checkpoint=checkpoint, config=kept | bias | rank_settings(ranks), kind=LORA, original=adapter
    )


def _matrix(base: Model, place: Place, *, values: bool = True) -> Tensor:
    """Return the weight at a place as (outputs, inputs), or without values."""
    whole = base.architecture.tensors[place.tensor]
    tensor = base.read(place.tensor) if values else torch.empty(base.info(place.tensor).shape, device="meta")
    return as_matrix(tensor[place.index(whole, base.architecture.sizes)], place.layout(whole))


def _projections(
    adapter: Adapter, name: str, keys: Mapping[str, str], matrix: Callable[..., Tensor], most: int | None
) -> Product:
    stored: Mapping[str, TensorInfo] = adapter.checkpoint.tensors
    if absent := [key for key in _PROJECTIONS.values() if key not in stored]:
        raise adapter.error(
            f"the file has no {absent[0]}: the random projections were not saved with it",
            "load it with PEFT, set save_projection=True in its configuration, and save it again",
        )
    outer, inner = stored[keys["vera_lambda_b"]], stored[keys["vera_lambda_d"]]
    a, b = (stored[_PROJECTIONS[side]] for side in "AB")
    outputs, inputs = matrix(values=False).shape
    fits = a.shape[1] >= inputs and b.shape[0] >= outputs and a.shape[0] == b.shape[1] == inner.shape[0]
    if outer.shape != (outputs,) or not fits:
        raise adapter.error(
            f"{name} has {outer.shape[0]} outputs and rank {inner.shape[0]}, which does not fit a weight of"
            f" {outputs} × {inputs} and projections {a.shape} and {b.shape}",
            "give the base that the adapter was trained on as `base`",
        )
    shared = _PROJECTIONS["A"], _PROJECTIONS["B"], inner.name, outer.name
    return Projections(inner, inputs, outputs, None, keys=shared)


def _rotation(
    adapter: Adapter, name: str, keys: Mapping[str, str], matrix: Callable[..., Tensor], most: int | None
) -> Product:
    info, config = adapter.checkpoint.tensors[keys["oft_R"]], adapter.config
    outputs, inputs = matrix(values=False).shape
    size = _block_size(info.shape[-1])
    blocks = 1 if config.get("block_share") else inputs // size
    if info.shape != (blocks, size * (size - 1) // 2) or inputs % size:
        raise adapter.error(
            f"{keys['oft_R']} has shape {info.shape}, which does not rotate {inputs} inputs",
            "give the base that the adapter was trained on as `base`; older releases of PEFT stored OFT in"
            " another form",
        )
    series = config.get("use_cayley_neumann", False)
    terms = int(config.get("num_cayley_neumann_terms") or 5) if series else None
    return Rotation(info, inputs, outputs, most, terms=terms, weight=matrix)


def about_products(kind: str, about: Mapping[str, Any]) -> str:
    """Return what users must know about an adapter that became a LoRA."""
    share = "all" if about["kept"] == 1 else f"at least {about['kept']:.1%}"
    name = {"LOKR": "a LoKr", VERA: "a VeRA", OFT: "an OFT"}[kind]
    return (
        f"is {name}, and becomes a LoRA of rank {about['rank']}, which holds {share} of the change of every"
        " module"
    )

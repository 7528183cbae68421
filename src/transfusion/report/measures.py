"""What a page computes from π and the weights: how well axes match, where heads go, which parts τ changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os.path import exists
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import Architecture, HeadPolicy
from transfusion.architecture.layouts import Layout, names_in
from transfusion.errors import MismatchError, TransfusionError
from transfusion.files.tensor_files import BLOCK, row_blocks
from transfusion.matching.advice import agreements
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.model.model import Model
from transfusion.model.pair import Pair
from transfusion.report.parts import axis_name, kind_of, layer_of
from transfusion.report.results import Inputs, recorded
from transfusion.runtime.engines import open_engine
from transfusion.transport.adapters.lora_file import is_adapter, open_adapter
from transfusion.transport.alpha import Alpha
from transfusion.transport.changes import TaskVectorSource
from transfusion.transport.plan import TransportPlan
from transfusion.transport.task_vector import NewTokens

Matrix = NDArray[np.floating[Any]]

# ── the models of a run ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Bases:
    """A, B and the fine-tunes, as far as they can be read and have the recorded weights."""

    a: Model | None = None
    b: Model | None = None
    finetuned: tuple[str, ...] = ()
    """The folders of the fine-tunes; empty unless all exist."""
    notes: tuple[str, ...] = ()
    """The models that could not be read, and why."""

    @classmethod
    def of(cls, inputs: Inputs) -> Bases:
        """Open the models that exist on this machine. Nothing is downloaded."""
        metadata, notes = inputs.metadata, list[str]()
        config = recorded(metadata, "settings", "config")
        a, b = (_open_model(info, config, notes) for info in _recorded_bases(inputs))
        if a is not None and b is not None:
            try:
                pair = Pair.open(a, b, vocabulary_share=0.0, other_shapes=True)
            except MismatchError as error:
                return cls(notes=(*notes, f"{error.message}."))
            if pair.difference is not None:
                return cls(notes=tuple(notes))  # the sections about weights are for models of one shape
            a = pair.a
        places = [_open_finetune(one, config, notes) for one in (metadata or {}).get("finetuned", ())]
        there = tuple(place for place in places if place is not None)
        return cls(a, b, there if len(there) == len(places) else (), tuple(notes))


def _recorded_bases(inputs: Inputs) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    if inputs.metadata is not None:
        return inputs.metadata["base"], inputs.metadata["onto"]
    if inputs.alignment is None:
        return None, None
    made = inputs.alignment.provenance
    return (
        {"name": made.source, "fingerprint": made.source_fingerprint},
        {"name": made.target, "fingerprint": made.target_fingerprint},
    )


def _place(info: Mapping[str, Any]) -> str | None:
    named = (str(info[key]) for key in ("path", "name") if info.get(key))
    return next((place for place in named if exists(place)), None)


def _open_model(info: Mapping[str, Any] | None, config: str | None, notes: list[str]) -> Model | None:
    """Open a model if it is at its place and has the recorded weights."""
    if info is None:
        return None
    if (place := _place(info)) is None:
        notes.append(f"{info['name']} is not at its recorded place.")
        return None
    try:
        model = Model.open(place, config=config)
        fingerprint = model.fingerprint
    except TransfusionError as error:
        notes.append(f"{info['name']} cannot be read: {error.message}.")
        return None
    if fingerprint != info["fingerprint"]:
        notes.append(f"{info['name']} has other weights now.")
        return None
    return model


def _open_finetune(info: Mapping[str, Any], config: str | None, notes: list[str]) -> str | None:
    """Return the place of a fine-tune if it is there and has the recorded weights."""
    place = _place(info)
    if place is None or not is_adapter(place):
        return place if _open_model(info, config, notes) is not None else None
    if open_adapter(place).fingerprint == info["fingerprint"]:
        return place
    notes.append(f"{info['name']} has other weights now.")
    return None


# ── how well axes match ──────────────────────────────────────────────────────────────────────

PREDICTED = (
    "The share of B's activations that π predicts from A's, on inputs that were not used to find π:"
    " 1 is everything. Nothing moved: the same without π. Null: the same with A's samples in another order."
)
AGREEMENT = (
    "The correlation between π(A) and B, over all weights that an axis takes part in: 1 is the same weights."
    " Nothing moved: the same without π."
)
SEARCHED = (
    " Null: the correlation that the same search finds between unrelated models, for this kind of axis."
)
SHUFFLED = " Null: A's units in a random order; a search between unrelated models reaches more than this."


@dataclass(frozen=True)
class AxisQuality:
    """How well one axis matches: under π, with nothing moved, and in the null."""

    id: str
    found: float
    identity: float
    null: float

    @property
    def layer(self) -> int:
        """The number of the block; 0 for an axis of no block, such as a tied stream."""
        return layer_of(self.id) or 0


@dataclass(frozen=True)
class Quality:
    """The quality of all axes, and a description of the measure."""

    axes: tuple[AxisQuality, ...]
    name: str
    """The measure's name on the scale of a chart."""
    title: str
    """The measure's name beside a number."""
    about: str
    """The definition of the measure."""

    def kinds(self) -> dict[str, list[AxisQuality]]:
        """Group the axes by kind, in the order of their blocks."""
        found: dict[str, list[AxisQuality]] = {}
        for axis in self.axes:
            found.setdefault(kind_of(axis.id), []).append(axis)
        return found

    def at(self, id: str, parents: Mapping[str, str]) -> AxisQuality | None:
        """Return the quality of an axis, or else of the axis that it lies within."""
        known = {axis.id: axis for axis in self.axes}
        place: str | None = id
        while place is not None and place not in known:
            place = parents.get(place)
        return known[place] if place is not None else None


def measure_quality(inputs: Inputs, advice: Mapping[str, Any], bases: Bases) -> Quality | None:
    """Return the quality that was measured when π was found or verified.

    Without such a measurement, a π of permutations is compared by weights. Otherwise return None.
    """
    proofs = (one.info.axes for one in inputs.of("verify") if hasattr(one.info, "axes"))
    if info := advice.get("axes") or next(proofs, None):
        axes = tuple(AxisQuality(id, one["found"], one["identity"], one["null"]) for id, one in info.items())
        return Quality(axes, "share predicted", "of B's activations predicted", PREDICTED)
    pi, a, b = inputs.alignment, bases.a, bases.b
    if pi is None or a is None or b is None:
        return None
    if not pi.permutes:
        return None
    weights = WeightPair(a.under(pi.provenance.policy), b.under(pi.provenance.policy))
    spaces = weights.architecture.spaces
    ids = [space.id for space in weights.architecture.free() if weights.has_evidence_for(space.id)]
    if not ids:
        return None
    nulls = {kind: one.get("null") for kind, one in advice.get("margins", {}).items()}
    with open_engine() as engine:
        found = agreements(weights, pi.maps, ids, engine)
        identity = agreements(weights, {}, ids, engine)
        known = all(nulls.get(spaces[id].axis) is not None for id in ids)
        null = (
            {id: float(nulls[spaces[id].axis]) for id in ids}
            if known
            else agreements(weights, random_maps(weights.architecture, 0), ids, engine)
        )
    axes = tuple(AxisQuality(id, found[id], identity[id], null[id]) for id in ids)
    about = AGREEMENT + (SEARCHED if known else SHUFFLED)
    return Quality(axes, "correlation", "correlation of π(A) with B", about)


# ── heads ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class HeadPanel:
    """Which head of A becomes which head of B: rows are B's heads, columns A's, and every row sums to 1."""

    id: str
    title: str
    shares: Matrix  # (heads of B, heads of A)

    def strongest(self) -> list[tuple[int, int, float]]:
        """For every head of B, the head of A with the largest share, and the share."""
        return [(to, int(row.argmax()), float(row.max())) for to, row in enumerate(self.shares)]


def head_panels(pi: Alignment, bases: Bases) -> list[HeadPanel]:
    """Return a panel for every axis of heads, block by block.

    If π ignores the boundaries of heads, return one for each axis that lies within heads in the bases.
    """
    flat = pi.provenance.policy.heads is HeadPolicy.FLAT
    parents: Mapping[str, str] = bases.a.architecture.parents if flat and bases.a else pi.parents
    found: list[HeadPanel] = []
    for id in pi.sizes:
        children = [child for child, parent in parents.items() if parent == id]
        if not children or parents.get(id) is not None:
            continue
        if id in pi.maps:
            within = next((child for child in children if kind_of(child).endswith("rep")), None)
            heads = _heads_in_groups(pi, id, within) if within else None
            found.append(heads or HeadPanel(id, titled(id), shares_of(pi.maps[id])))
        elif flat:
            count = pi.sizes[id]
            moved = [child for child in children if child in pi.maps and pi.sizes[child] % count == 0]
            for child in moved:
                matrix = shares_of(pi.maps[child])
                if (width := len(matrix) // count) > 1:
                    blocks = matrix.reshape(count, width, count, width).sum(axis=(1, 3)) / width
                    found.append(HeadPanel(child, titled(child), blocks))  # (heads, heads)
    return found


def _heads_in_groups(pi: Alignment, id: str, within: str) -> HeadPanel | None:
    """Combine the maps of groups and of the heads within each group (grouped-query attention)."""
    groups, heads = pi.maps[id], pi.maps.get(within, Map.identity(pi.sizes[within], pi.sizes[id]))
    if not (groups.permutes and heads.permutes):
        return None
    sources = pi.lineage(within)[:, None] * heads.size + heads.index  # (groups, heads in a group)
    title = titled(id.removesuffix("group") + "head")
    return HeadPanel(within, title, np.asarray(np.eye(sources.size)[sources.reshape(-1)]))


def shares_of(map_: Map) -> Matrix:
    """Return the share of each unit of A in each unit of B; for a rotation, its squared entries."""
    matrix = np.asarray(map_.matrix[0], dtype=np.float64)
    return matrix**2 if map_.rotates else matrix


def titled(id: str) -> str:
    """Return the name of an axis with its layer."""
    layer, kind = layer_of(id), axis_name(kind_of(id))
    return kind if layer is None else f"layer {layer} · {kind}"


# ── the task vector, by part of the model ────────────────────────────────────────────────────


@dataclass
class TensorGroup:
    """The tensors of one role."""

    role: str
    square: float = 0.0
    """‖τ‖² of its tensors."""
    tensors: int = 0
    sums: dict[str, float] = field(default_factory=dict, repr=False)

    def add(self, **parts: float) -> None:
        for name, value in parts.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self, what: str) -> float | None:
        """The mean quality of its axes, ``found`` or ``null``, weighted by ‖τ‖² of each tensor."""
        weight = self.sums.get("weight")
        return self.sums[what] / weight if weight else None

    def cosine(self, what: str) -> float | None:
        """The cosine of τ, ``moved`` by π or ``unmoved``, with the change of B's own fine-tune."""
        lengths = self.sums.get(f"{what}_square", 0.0) * self.sums.get("own_square", 0.0)
        return self.sums[f"{what}_own"] / lengths**0.5 if lengths > 0 else None


def group_changes(inputs: Inputs, bases: Bases, quality: Quality | None) -> list[TensorGroup]:
    """Read A and its fine-tunes once, tensor by tensor, and group the change by role, the largest first.

    With a single fine-tune and a ceiling (B fine-tuned itself), also compare π(τ) with the ceiling's change.
    """
    a, pi = bases.a, inputs.alignment
    if a is None or not bases.finetuned:
        return []
    home = [_source(TransportPlan.planned(a, a), place) for place in bases.finetuned]
    own: TaskVectorSource | None = None
    compared: dict[str, TaskVectorSource] = {}
    if inputs.ceiling and len(home) == 1 and bases.b is not None:
        own = _source(TransportPlan.planned(bases.b, bases.b), inputs.ceiling)
        compared["unmoved"] = home[0]
        if pi is not None:
            compared["moved"] = _source(TransportPlan.planned(a, bases.b, pi), bases.finetuned[0])
    role_of = tensor_roles(a.architecture)
    under = a.architecture.under(pi.provenance.policy) if pi else a.architecture
    found: dict[str, TensorGroup] = {}
    for name in a.architecture.tensors:
        square = sum(_product(source, None, name, a) for source in home if source.changes(name))
        if not square:
            continue
        group = found.setdefault(role_of[name], TensorGroup(role_of[name]))
        group.square += square
        group.tensors += 1
        axes = [quality.at(id, under.parents) for id in under.tensors[name].names()] if quality else []
        if known := [axis for axis in axes if axis is not None]:
            found_mean, null_mean = fmean(one.found for one in known), fmean(one.null for one in known)
            group.add(weight=square, found=square * found_mean, null=square * null_mean)
        if own is not None and own.changes(name):
            group.add(own_square=_product(own, None, name, a))
            for what, source in compared.items():
                products = _product(source, None, name, a), _product(source, own, name, a)
                group.add(**{f"{what}_square": products[0], f"{what}_own": products[1]})
    return sorted(found.values(), key=lambda group: -group.square)


def require_ceiling(b: Model | None, ceiling: str | None) -> None:
    """Refuse a ceiling that is no fine-tune of B, as `transport` would."""
    if b is None or ceiling is None:
        return
    try:
        TransportPlan.planned(b, b).source(ceiling, Alpha(), new_tokens=NewTokens.DROP)
    except MismatchError as error:
        raise MismatchError(error.message, hint="give B fine-tuned itself as `ceiling`") from error


def _source(plan: TransportPlan, place: str) -> TaskVectorSource:
    return plan.source(place, Alpha(), trust_base=True, new_tokens=NewTokens.DROP)


def _product(one: TaskVectorSource, other: TaskVectorSource | None, name: str, a: Model) -> float:
    """Return the inner product of two changes of one tensor, or of one with itself, in blocks of rows."""
    by_rows = one.by_rows(name) and (other is None or other.by_rows(name))

    def changes(source: TaskVectorSource) -> Iterator[Tensor]:
        for rows in row_blocks(a.info(name).shape, BLOCK if by_rows else None):
            yield source.change(name, rows).to(torch.float64)

    if other is None:
        return sum(float(change.square().sum()) for change in changes(one))
    return sum(float((x * y).sum()) for x, y in zip(changes(one), changes(other), strict=True))


def tensor_roles(architecture: Architecture) -> dict[str, str]:
    """Return the part of a transformer that each tensor belongs to, from its layout.

    A bias has the role of its weight. Queries and keys have the same layout, so their role is the name of
    their module.
    """
    found: dict[str, str] = {}
    for name in architecture.tensors:
        weight = f"{name.rpartition('.')[0]}.weight"
        leader = weight if weight in architecture.tensors else name
        found[name] = "task head" if name in architecture.heads else _role(architecture, leader)
    return found


def _role(architecture: Architecture, name: str) -> str:
    layout = architecture.tensors[name]
    inner = [id for id in layout.names() if architecture.spaces[id].stream is None]
    in_a_block = any(part.isdigit() for part in name.split("."))
    if layout.arrow is None and not inner:
        return "norms" if name.endswith(".weight") else "other" if in_a_block else "embeddings"
    written, read = (_axes(architecture, layout, dims) for dims in (layout.outputs, layout.inputs))
    ends = {space.rsplit("_", 1)[-1] for space in written.values()}  # cross_qk is a qk
    if {"qk", "vo"} <= ends:
        return "query, key and value in one"
    if "qk" in ends:
        return name.split(".")[-2]
    if "vo" in ends:
        return "value"
    if any(space.rsplit("_", 1)[-1] == "vo" for space in read.values()):
        return "attention output"
    if not in_a_block:
        return "embeddings"
    free = {space.id for space in architecture.free() if space.stream is None} - set(architecture.children)
    return "MLP in" if free & written.keys() else "MLP out" if free & read.keys() else "other"


def _axes(architecture: Architecture, layout: Layout, dims: Iterable[int]) -> dict[str, str]:
    return {id: architecture.spaces[id].axis for dim in dims for id in names_in(layout.items[dim])}

"""What a page computes from π and the weights: how well axes match, where heads go, which parts τ changes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import exists
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import Architecture, HeadPolicy
from transfusion.errors import MismatchError, TransfusionError
from transfusion.files.tensor_files import BLOCK, row_blocks
from transfusion.matching.advice import agreements
from transfusion.matching.weights import WeightPair
from transfusion.model.model import Model
from transfusion.model.pair import Pair
from transfusion.model.part_roles import tensor_parts
from transfusion.report.parts import axis_name, kind_of, layer_of
from transfusion.report.results import Inputs, recorded
from transfusion.runtime.engines import open_engine
from transfusion.transport.adapters.lora_file import is_adapter, open_adapter
from transfusion.transport.finetunes import open_finetune
from transfusion.transport.model_output import Change
from transfusion.transport.plan import TransportPlan
from transfusion.transport.task_vector import NewTokens

Matrix = NDArray[np.floating[Any]]

# ── the models of a run ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Bases:
    """A, B and the fine-tunes, as far as they can be read and have the recorded weights."""

    a: Model | None = None
    b: Model | None = None
    finetuned: Sequence[str] = ()
    """The folders of the fine-tunes; empty unless all exist."""
    notes: Sequence[str] = ()
    """The models that could not be read, and why."""

    @classmethod
    def of(cls, inputs: Inputs) -> Bases:
        """Open the models that exist on this machine. Nothing is downloaded."""
        metadata, notes = inputs.metadata or {}, list[str]()
        ends = [metadata["base"], metadata["onto"]] if metadata else []
        if not metadata and inputs.alignment is not None:
            made = inputs.alignment.provenance
            ends = [
                {"name": made.source, "fingerprint": made.source_fingerprint},
                {"name": made.target, "fingerprint": made.target_fingerprint},
            ]
        config = recorded(metadata, "settings", "config")
        a, b = (_open(info, config, notes)[1] for info in ends) if ends else (None, None)
        if a is not None and b is not None:
            try:
                pair = Pair.open(a, b, vocabulary_share=0.0, other_shapes=True)
            except MismatchError as error:
                return cls(notes=[*notes, f"{error.message}."])
            if pair.difference is not None:
                return cls(notes=notes)  # the sections about weights are for models of one shape
            a = pair.a
        places = [_open(info, config, notes)[0] for info in metadata.get("finetuned", ())]
        there = [place for place in places if place is not None]
        return cls(a, b, there if len(there) == len(places) else (), notes)


def _open(info: Mapping[str, Any], config: str | None, notes: list[str]) -> tuple[str | None, Any]:
    """Open a model or an adapter, if it is at its recorded place and has the recorded weights."""
    named = (str(info[key]) for key in ("path", "name") if info.get(key))
    if (place := next(filter(exists, named), None)) is None:
        notes.append(f"{info['name']} is not at its recorded place.")
        return None, None
    try:
        found = open_adapter(place) if is_adapter(place) else Model.open(place, config=config)
        if found.fingerprint == info["fingerprint"]:
            return place, found
        notes.append(f"{info['name']} has other weights now.")
    except TransfusionError as error:
        notes.append(f"{info['name']} cannot be read: {error.message}.")
    return None, None


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
        found = next((axis for axis in self.axes if axis.id == id), None)
        return self.at(parents[id], parents) if found is None and id in parents else found


def measure_quality(inputs: Inputs, advice: Mapping[str, Any], bases: Bases) -> Quality | None:
    """Return the quality that was measured when π was found or verified.

    Without such a measurement, a π of permutations is compared by weights. Otherwise return None.
    """
    proofs = (one.info.axes for one in inputs.of("verify") if hasattr(one.info, "axes"))
    if info := advice.get("axes") or next(proofs, None):
        axes = tuple(AxisQuality(id, one["found"], one["identity"], one["null"]) for id, one in info.items())
        return Quality(axes, "share predicted", "of B's activations predicted", PREDICTED)
    pi, a, b = inputs.alignment, bases.a, bases.b
    if pi is None or a is None or b is None or not pi.permutes:
        return None
    weights = WeightPair(a.under(pi.provenance.policy), b.under(pi.provenance.policy))
    spaces = weights.architecture.spaces
    ids = weights.axes
    if not ids:
        return None
    margins = advice.get("margins", {})
    null = {id: recorded(margins, spaces[id].axis, "null") for id in ids}
    known = None not in null.values()
    with open_engine() as engine:
        found = agreements(weights, pi.maps, ids, engine)
        identity = agreements(weights, {}, ids, engine)
        if not known:
            null = agreements(weights, random_maps(weights.architecture, 0), ids, engine)
    axes = tuple(AxisQuality(id, found[id], identity[id], float(null[id])) for id in ids)
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
    """The tensors of one role: sums over them."""

    role: str
    sums: Counter[str] = field(default_factory=Counter, repr=False)
    """``tensors``, ``square`` (‖τ‖²), and the terms of the means and cosines."""

    def mean(self, what: str) -> float | None:
        """The mean quality of its axes, ``found`` or ``null``, weighted by ‖τ‖² of each tensor."""
        return self.sums[what] / weight if (weight := self.sums["weight"]) else None

    def cosine(self, what: str) -> float | None:
        """The cosine of τ, ``moved`` by π or ``unmoved``, with the change of B's own fine-tune."""
        lengths = self.sums[f"{what}_square"] * self.sums["own_square"]
        return self.sums[f"{what}_own"] / lengths**0.5 if lengths > 0 else None


def group_changes(inputs: Inputs, bases: Bases, quality: Quality | None) -> list[TensorGroup]:
    """Read A and its fine-tunes once, tensor by tensor, and group the change by role, the largest first.

    With a single fine-tune and a ceiling (B fine-tuned itself), also compare π(τ) with the ceiling's change.
    """
    a, pi = bases.a, inputs.alignment
    if a is None or not bases.finetuned:
        return []
    home = [_source(TransportPlan.planned(a, a), place) for place in bases.finetuned]
    own: Change | None = None
    compared: dict[str, Change] = {}
    if inputs.ceiling and len(home) == 1 and bases.b is not None:
        own = _source(TransportPlan.planned(bases.b, bases.b), inputs.ceiling)
        compared["unmoved"] = home[0]
        if pi is not None:
            compared["moved"] = _source(TransportPlan.planned(a, bases.b, pi), bases.finetuned[0])
    under = a.architecture.under(pi.provenance.policy) if pi else a.architecture
    found: dict[str, TensorGroup] = {}
    for name, role in tensor_roles(a.architecture).items():
        square = sum(_product(source, source, name, a) for source in home if source.changes(name))
        if not square:
            continue
        sums: Any = found.setdefault(role, TensorGroup(role)).sums
        sums.update(tensors=1, square=square)
        axes = [quality.at(id, under.parents) for id in under.tensors[name].names()] if quality else []
        if known := [axis for axis in axes if axis is not None]:
            means = fmean(one.found for one in known), fmean(one.null for one in known)
            sums.update(weight=square, found=square * means[0], null=square * means[1])
        if own is not None and own.changes(name):
            sums.update(own_square=_product(own, own, name, a))
            for what, source in compared.items():
                sums[f"{what}_square"] += _product(source, source, name, a)
                sums[f"{what}_own"] += _product(source, own, name, a)
    return sorted(found.values(), key=lambda group: -group.sums["square"])


def require_ceiling(b: Model | None, ceiling: str | None) -> None:
    """Refuse a ceiling that is no fine-tune of B, as `transport` would."""
    if b is None or ceiling is None:
        return
    try:
        TransportPlan.planned(b, b).change(open_finetune(ceiling), new_tokens=NewTokens.DROP)
    except MismatchError as error:
        raise MismatchError(error.message, hint="give B fine-tuned itself as `ceiling`") from error


def _source(plan: TransportPlan, place: str) -> Change:
    return plan.change(open_finetune(place), trust_base=True, new_tokens=NewTokens.DROP)


def _product(one: Change, other: Change, name: str, a: Model) -> float:
    """Return the inner product of two changes of one tensor, in blocks of rows."""
    by_rows, total = one.by_rows(name) and other.by_rows(name), 0.0
    for rows in row_blocks(a.info(name).shape, BLOCK if by_rows else None):
        change = one.change(name, rows).to(torch.float64)
        against = change if other is one else other.change(name, rows).to(torch.float64)
        total += float((change * against).sum())
    return total


PARTS = {
    r"^\w*(qk|rot)( <- |$)": ("query", "key"),  # the first in a block is the query
    r"^\w*vo( <- |$)": ("value",),
    r" <- \w*vo$": ("attention output",),
    r"^(expert )?\w*(ffn|mlp|shared|half)( <- |$)": ("MLP in",),
    r" <- (expert )?\w*(ffn|mlp|shared)": ("MLP out",),
    r"^scale ": ("norms",),
}
"""The parts of a transformer, by the axes that a tensor writes and reads."""


def tensor_roles(architecture: Architecture) -> dict[str, str]:
    """Return the part of a transformer that each tensor belongs to; a bias belongs to that of its weight."""
    found: dict[str, list[str]] = {name: [] for name in architecture.tensors}
    for role, part in tensor_parts(architecture).items():
        use = role.use.removeprefix("bias of ")
        names = next((names for pattern, names in PARTS.items() if re.search(pattern, use)), None)
        in_a_block = any(word.isdigit() for word in part.tensor.split("."))
        names = names or ("other" if in_a_block else "embeddings",)
        found[part.tensor].append(names[min(role.number, len(names) - 1)])
    roles = {name: " + ".join(dict.fromkeys(parts)) or "other" for name, parts in found.items()}
    return roles | dict.fromkeys(architecture.task_heads, "task head")

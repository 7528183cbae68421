"""Heads of a fine-tune that B has none to add a change to, where B has another shape than A."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from transfusion.alignment.alignment import Alignment, block_behind
from transfusion.alignment.maps import NormFold
from transfusion.architecture.layouts import Layout, Name
from transfusion.errors import MismatchError
from transfusion.model.model import Model
from transfusion.model.part_roles import Role, TensorPart, moves, place_of, tensor_parts
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.transport.adapters.classes import in_class, named_in
from transfusion.transport.task_vector import TaskVector


@dataclass(frozen=True)
class CarriedHead:
    """A tensor of the fine-tune that is carried over."""

    part: TensorPart
    layout: Layout
    """Its layout on B."""
    fold_a: NormFold | None = None
    """The norm that it reads through, in A and in B."""
    fold_b: NormFold | None = None


def carried_heads(
    label: str, vector: TaskVector, alignment: Alignment, onto: Model, moved: Collection[str]
) -> dict[str, CarriedHead]:
    """Return the heads of a fine-tune by their names on B, without those whose changes are moved."""
    tuned = vector.finetuned
    folds: dict[str, tuple[NormFold | None, NormFold | None]] = {}  # by the point of A's stream
    for pair in alignment.pairs(vector.base.architecture, onto.architecture):
        norms = alignment.folds.get(pair.source.tensor), alignment.folds_b.get(pair.target.tensor)
        if not pair.source.is_weight and norms != (None, None):
            folds[str(pair.source.output)] = norms
    found: dict[str, CarriedHead] = {}
    for role, part in tensor_parts(tuned.architecture).items():
        if part.tensor not in tuned.architecture.task_heads or part.tensor in moved:
            continue
        if tuned.architecture.token_axes.intersection(part.layout.names()):
            continue
        renamed = {id: _axis_on_b(label, part, id, tuned, onto, alignment) for id in part.layout.names()}
        norms = folds.get(str(part.input), (None, None)) if part.is_weight else (None, None)
        name = _name_on_b(label, role, part, tuned, onto, alignment)
        found[name] = CarriedHead(part, part.layout.rename(renamed.__getitem__), *norms)
    return found


def _name_on_b(label: str, role: Role, part: TensorPart, tuned: Model, b: Model, pi: Alignment) -> str:
    """Return the name of a head on B: that of the same role, or the same name in the same family."""
    block = block_behind(pi.paths, role.stack, role.block)
    theirs = tensor_parts(b.architecture).get(replace(role, block=block))
    if theirs is not None and theirs.index is None and theirs.tensor in b.architecture.task_heads:
        return theirs.tensor
    if b.family.name == tuned.family.name:
        return part.tensor
    raise MismatchError(
        f"{label} has the head {part.tensor} ({role}), and {b.label}, a {b.family.name}, has none of this"
        " kind",
        hint="give a B with a head for the same task",
    )


def _axis_on_b(label: str, part: TensorPart, id: str, tuned: Model, b: Model, pi: Alignment) -> str:
    """Return B's name of an axis of a head; refuse an axis that both have, that moves and has no map.

    An axis of the heads alone that B does not have, such as that of a pooler, comes with them as it is.
    """
    if not moves(tuned.architecture, Name(id)):
        return id
    heads = tuned.architecture.task_heads
    if id not in b.architecture.spaces and heads.issuperset(tuned.architecture.occurrences[id]):
        return id
    stack, block, axis = place_of(id)
    number = block_behind(pi.paths, stack, block)
    target = ".".join(str(one) for one in (stack, number, axis) if one not in ("", None))
    if pi.map_between(target, id) is not None:
        return target
    raise MismatchError(
        f"{label}: the head {part.tensor} has the axis {id}, which A and B do not have in common",
        hint="give bases with the parts that the head reads, such as a pooler",
    )


def names_with_heads(
    b: Model, tuned: Model, heads: Mapping[str, CarriedHead], changed: Collection[str]
) -> dict[str, TensorPieces]:
    """Return the tensors of B with their names in files; with heads of the fine-tune's own, without B's."""
    known = b.architecture
    names = {name: b.names[name] for name in (*known.tensors, *known.buffers)}
    if not heads:
        return names
    names = {
        name: one for name, one in names.items() if name not in known.task_heads or name in {*changed, *heads}
    }
    new = [name for name in heads if name not in b.names]
    if not new:
        return names
    own = in_class(names, named_in(tuned.config) or "", b.config, b.family.prefixes)
    return {**own, **{name: tuned.names[name] for name in new}}

"""Models: a checkpoint of which every tensor has been understood."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.architecture import Architecture, Policy
from transfusion.architectures import NO_CONFIG, families
from transfusion.binding import bind
from transfusion.checkpoint import FLOATS, Checkpoint, Rows, TensorInfo, content, row_blocks
from transfusion.errors import ArchitectureError, CheckpointError, LayoutError, MismatchError, listing
from transfusion.memory import InMemory, hold
from transfusion.naming import Naming
from transfusion.storage import Stored, gather
from transfusion.tables import SECTIONS, Config, Family, Shapes, Table
from transfusion.workers import Workers

Reference: TypeAlias = str | Path | InMemory
"""What may be given for a model: a path, a hub id, or the model itself in memory."""


@dataclass(frozen=True)
class Model:
    """A checkpoint, the family it belongs to, and its architecture; tensors by canonical name.

    >>> model = transfusion.Model.open("models/a")
    >>> model.family.name, model.why
    ('vit', 'config.json says model_type "vit"')
    >>> name = "encoder.layer.0.intermediate.dense.weight"
    >>> print(model.info(name).shape, model.architecture.tensors[name])
    (20, 24) layer.0.ffn <- layer.0.y
    """

    checkpoint: Checkpoint
    family: Family
    config: Config
    architecture: Architecture
    names: Mapping[str, Stored]
    """Canonical name → the name in the checkpoint, or the names of its pieces."""
    why: str
    """How the family was recognised."""
    _digests: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, reference: Reference, *, config: str | Path | Mapping[str, Any] | None = None) -> Model:
        """Read the headers of a model, recognise its family and give every tensor its layout.

        A model is a folder, a file or a hub id; or it is in memory: a module of transformers, open_clip or
        timm, or a state dict, whose tensors are then shared, not copied. ``config``, a file of JSON or its
        content, is for weights that come without one.

        >>> module = transformers.ViTForImageClassification.from_pretrained("models/a")
        >>> transfusion.Model.open(module).label
        'ViTForImageClassification in memory'
        >>> transfusion.Model.open(module.state_dict(), config="models/a/config.json").family.name
        'vit'
        """
        if isinstance(reference, str | Path):
            return cls.of(Checkpoint.open(reference, config=config))
        return cls.of(hold(reference, config))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Model:
        family, config, why = recognise(checkpoint)
        naming = Naming(family, live=True)
        names = gather(naming.table(checkpoint.tensors), checkpoint.tensors, checkpoint.label)
        table = _table(checkpoint, family, config, frozenset(names))
        _drop_second_names(checkpoint, names, table.ties)
        shapes = {ours: stored.info(checkpoint.tensors).shape for ours, stored in names.items()}
        architecture = replace(bind(table, shapes, f"{checkpoint.label}: {family.name}"), family=family.name)
        model = cls(checkpoint, family, config, architecture, names, why)
        model._refuse_quantised()
        return model

    @property
    def label(self) -> str:
        return self.checkpoint.label

    def info(self, name: str) -> TensorInfo:
        """What the headers say about a tensor; of one in pieces, about the whole."""
        return self.names[name].info(self.checkpoint.tensors)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """One tensor by canonical name, or some of its rows; values that are not numbers are refused."""
        return self.names[name].join(self.checkpoint.read_finite, rows)

    def raw(self, name: str, rows: Rows | None = None) -> Tensor:
        """The same without that look at every value, for those who will look at what they make of it."""
        return self.names[name].join(self.checkpoint.read, rows)

    def under(self, policy: Policy) -> Model:
        """The same model with the axes of a policy."""
        return replace(self, architecture=self.architecture.under(policy))

    @property
    def digest(self) -> str:
        """A hash of the content of every tensor under its canonical name."""
        total = hashlib.sha256()
        for name in sorted(self.architecture.tensors):
            total.update(name.encode() + self.digest_of(name))
        return total.hexdigest()

    def digest_of(self, name: str, *, checked: bool = True) -> bytes:
        """A hash of the type, shape and content of one tensor; it is read once, block by block.

        Values that are not numbers are refused, unless the caller will look for them.
        """
        read = self.read if checked else self.raw
        if name not in self._digests:
            info = self.info(name)
            digest = hashlib.sha256(f"{info.dtype}{info.shape}".encode())
            for rows in row_blocks(info.shape):
                digest.update(content(read(name, rows if info.shape else None)))
            self._digests[name] = digest.digest()
        return self._digests[name]

    def _refuse_quantised(self) -> None:
        odd = [
            f"{info.name} ({str(info.dtype).removeprefix('torch.')})"
            for name in self.architecture.tensors
            if (info := self.info(name)).dtype not in FLOATS
        ]
        if odd:
            raise CheckpointError(
                f"{self.label}: weights in types that cannot be moved: {listing(odd)}",
                hint="quantised checkpoints cannot be moved; use the original weights",
            )


def _table(checkpoint: Checkpoint, family: Family, config: Config, names: frozenset[str]) -> Table:
    """The family's table; a configuration that it cannot be made from is refused."""
    file = checkpoint.told_by
    try:
        return family.table(config, names)
    except KeyError as error:
        raise ArchitectureError(
            f"{checkpoint.label}: {file} lacks {error.args[0]!r}, which the {family.name} table needs",
            hint="fetch the config.json that belongs to these weights",
        ) from error
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ArchitectureError(
            f"{checkpoint.label}: {file} has a value that makes no sense ({error})",
            hint="fetch the config.json that belongs to these weights",
        ) from error


def _drop_second_names(checkpoint: Checkpoint, names: dict[str, Stored], ties: Mapping[str, str]) -> None:
    """Keep tied tensors once, under their first name, as the libraries store them today."""
    for second, first in ties.items():
        if second in names and first in names:
            two, one = names[second], names[first]
            if not torch.equal(two.join(checkpoint.read), one.join(checkpoint.read)):
                raise ArchitectureError(
                    f"{checkpoint.label}: the configuration ties {listing(two.names)} to"
                    f" {listing(one.names)}, and their values differ",
                    hint='say "tie_word_embeddings": false in config.json if they are meant to differ',
                )
            del names[second]


# ── recognition ──────────────────────────────────────────────────────────────────────────────


def recognise(checkpoint: Checkpoint) -> tuple[Family, Config, str]:
    """The family of a checkpoint, its configuration, and how we know."""
    if checkpoint.config is None:
        return _by_names(checkpoint)
    config = checkpoint.config
    _refuse_quantisation(checkpoint.label, config)
    kind, name, family = _by_config(config)
    if family is None:
        known = sorted(t for f in families() for t in f.model_types)
        raise ArchitectureError(
            f"{checkpoint.label}: no table for {kind} {name!r} ({checkpoint.told_by})",
            hint=f"there are tables for {', '.join(known)}",
        )
    _refuse_unknown_keys(checkpoint, family, config)
    why = f'{checkpoint.told_by} says {kind} "{name}"'
    return family, family.complete(config, _shapes(checkpoint, family)), why


def _by_config(config: Config) -> tuple[str, str | None, Family | None]:
    """What a configuration calls the model, and the family of that name; timm names every size."""
    if "architecture" in config and "model_type" not in config:
        name = config["architecture"]
        of_timm = (f for f in families() if f.library == "timm")
        return "architecture", name, next((f for f in of_timm if _one_of(name, f.model_types)), None)
    name = "open_clip" if "model_cfg" in config else config.get("model_type")
    return "model_type", name, next((f for f in families() if name in f.model_types), None)


def _one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shapes(checkpoint: Checkpoint, family: Family) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by canonical name."""
    naming = Naming(family, live=True)
    return {naming.canonical(name): info.shape for name, info in checkpoint.tensors.items()}


def _by_names(checkpoint: Checkpoint) -> tuple[Family, Config, str]:
    found: list[tuple[Family, dict[str, tuple[int, ...]]]] = []
    for family in families():
        shapes = _shapes(checkpoint, family)
        named = family.signature and all(name in shapes for name in family.signature)
        if named and family.fits(shapes):
            found.append((family, shapes))
    found = [
        one for one in found if not any(set(one[0].signature) < set(other[0].signature) for other in found)
    ]
    if len(found) > 1:  # a part or a cousin of the model may have all its names in the model
        found = [(family, shapes) for family, shapes in found if _knows_all(family, shapes)] or found
    if len(found) != 1:
        raise ArchitectureError(
            f"{checkpoint.label}: no configuration, and the tensors' names belong to"
            + (f" several families: {listing(f.name for f, _ in found)}" if found else " no known family")
            + f" (for instance {listing(checkpoint.tensors, 3)})",
            hint=NO_CONFIG,
        )
    family, shapes = found[0]
    if family.guess is None:
        raise ArchitectureError(
            f"{checkpoint.label}: a {family.name} by its tensors' names, but there is no configuration, and"
            " the number of attention heads cannot be told from the shapes",
            hint=NO_CONFIG,
        )
    config, assumption = family.guess(shapes)
    return family, config, f"the tensors' names; no config.json, so assuming {assumption}"


def _knows_all(family: Family, shapes: Shapes) -> bool:
    """Whether a family's table, with what the shapes tell, describes every one of these tensors."""
    if family.guess is None:
        return False
    try:
        config, _ = family.guess(shapes)
        bind(family.table(config, frozenset(shapes)), shapes, family.name)
    except (ArchitectureError, LayoutError):
        return False
    return True


def _refuse_quantisation(label: str, config: Mapping[str, Any]) -> None:
    if quantisation := config.get("quantization_config"):
        method = (
            quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        )
        raise CheckpointError(
            f"{label}: the checkpoint is quantised ({method})",
            hint="quantised checkpoints cannot be moved; use the original weights",
        )


def _refuse_unknown_keys(checkpoint: Checkpoint, family: Family, config: Mapping[str, Any]) -> None:
    """Whatever may change the symmetries of a model must be a key that its table knows."""
    unknown: list[str] = []
    for key, value in _keys(config):
        leaf = key.rsplit(".", 1)[-1]
        if leaf in family.required:
            if value not in family.required[leaf]:
                unknown.append(f"{key}={value!r}")
        elif leaf not in family.known_keys:
            unknown.append(f"{key}={value!r}")
    if unknown:
        raise ArchitectureError(
            f"{checkpoint.label}: {checkpoint.told_by} has settings that the {family.name} table"
            f" does not know: {listing(unknown)}",
            hint="they may change which units can be exchanged; remove a key only if you know that it"
            " does not, or extend the table",
        )


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in SECTIONS and isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def take_hashes(*models: Model, jobs: int | None = None) -> None:
    """Hash every tensor of some models, side by side; each is then known by its content.

    What is not a number is found later, in what is made of it.
    """
    tensors = [(model, name) for model in models for name in model.architecture.tensors]
    with Workers.hired(jobs) as workers:
        workers.each(lambda one: one[0].digest_of(one[1], checked=False), tensors)


# ── belonging together ───────────────────────────────────────────────────────────────────────


def require_same_shape(a: Model, b: Model) -> None:
    """Refuse two bases that are not two sets of weights of one architecture."""
    if a.family.name != b.family.name:
        raise MismatchError(
            f"{a.label} is a {a.family.name} and {b.label} a {b.family.name}",
            hint="both bases must be of one architecture",
        )
    trunk_a, trunk_b = set(a.architecture.trunk), set(b.architecture.trunk)
    if trunk_a != trunk_b:
        raise MismatchError(
            f"{a.label} and {b.label} do not have the same tensors; only in one:"
            f" {listing(sorted(trunk_a ^ trunk_b))}",
            hint="both bases must be of one architecture and depth",
        )
    for name in sorted(trunk_a):
        shape_a, shape_b = a.info(name).shape, b.info(name).shape
        if shape_a != shape_b:
            layout = a.architecture.tensors[name]
            vocabulary = "vocab" in layout.names()
            raise MismatchError(
                f"{name} ('{layout}') has shape {shape_a} in {a.label} and {shape_b} in {b.label}",
                hint="the vocabularies differ, so token ids mean different things; both bases need the"
                " same tokenizer"
                if vocabulary
                else "both bases must be of one architecture and size",
            )
    if a.architecture.digest() != b.architecture.digest():
        spaces_a, spaces_b = a.architecture.spaces, b.architecture.spaces
        differing = [
            id
            for id in sorted({*a.architecture.trunk_spaces, *b.architecture.trunk_spaces})
            if spaces_a.get(id) != spaces_b.get(id)
        ]
        raise MismatchError(
            f"{a.label} and {b.label} divide their tensors differently: {listing(differing)}",
            hint="their configurations disagree, for instance about the number of heads or about tied"
            " embeddings",
        )


_BOOKKEEPING = re.compile(
    r".*(dropout|pdrop|token_id|initializer|init_|_dict|version|dtype|label|use_cache|architectures|name)"
    r".*|_.*|task_specific_params|problem_type|max_length|attn_implementation"
)


def differing_settings(a: Model, b: Model) -> list[str]:
    """What two configurations say differently about the computation, although the shapes agree."""
    first, second = dict(_keys(a.checkpoint.config or {})), dict(_keys(b.checkpoint.config or {}))
    return [
        f"{key} ({first[key]}, {second[key]})"
        for key in first
        if key in second and first[key] != second[key] and not _BOOKKEEPING.fullmatch(key)
    ]


def shared_tensors(a: Model, b: Model) -> list[str]:
    """The tensors that both have, with the same shape; heads may differ."""
    return [
        name
        for name in a.architecture.tensors
        if name in b.architecture.tensors and a.info(name).shape == b.info(name).shape
    ]

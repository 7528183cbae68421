"""Two bases: opened and compared once, by family, shapes, settings and vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from transfusion.architecture.architecture import Architecture, Policy
from transfusion.architecture.table import Symmetry
from transfusion.errors import MismatchError, SettingError, listing
from transfusion.families import known_keys
from transfusion.files.tokenizer_files import tokens_in
from transfusion.model.model import Model, Reference
from transfusion.model.recognition import settings_of
from transfusion.model.vocabulary_map import LEAST_SHARE, VOCABULARY, VocabularyMap, describe_vocabulary
from transfusion.runtime.progress import SILENT, Progress

ConfigArgument: TypeAlias = str | Path | Mapping[str, Any] | None
"""A configuration for weights that come without one: a JSON file, or its content."""
_OTHER_SHAPES = '; `method="functional"`, in align and transport, moves between different shapes'


@dataclass(frozen=True)
class Pair:
    """A and B, which have been compared. A is read in B's vocabulary, if the tokenizers differ."""

    a: Model
    b: Model
    difference: str | None = None
    """In what they differ beside their vocabularies; None if both have one shape."""
    vocabulary: Mapping[str, Any] = field(default_factory=dict)
    """What `VocabularyMap.about` says of both vocabularies; empty if they were not compared."""

    @classmethod
    def open(
        cls,
        a: Model | Reference,
        b: Model | Reference,
        config: ConfigArgument = None,
        progress: Progress = SILENT,
        vocabulary_share: float | None = None,
        *,
        other_shapes: bool = False,
        kin: bool = False,
    ) -> Pair:
        """Open two bases of one architecture; note how they were recognised and in what they differ.

        ``vocabulary_share`` is the least share of tokens that both must have, if their tokenizers differ.
        With ``other_shapes``, bases of different shapes are accepted; with ``kin``, those of two families
        that were trained on from each other, such as Flux.1 and Chroma.
        """
        least = LEAST_SHARE if vocabulary_share is None else vocabulary_share
        if not 0 <= least <= 1:
            raise SettingError(
                f"`vocabulary_share` = {vocabulary_share}: it must be between 0 and 1", hint="for example 0.5"
            )
        first, second = open_model(a, config), open_model(b, config)
        for model in (first, second):
            if model.checkpoint.config is None:
                progress.note(f"note: {model.label}: recognised by {model.why}")
            else:
                progress.detail(f"{model.label}: {model.family.name}, because {model.why}")
            if model.is_quantised:
                progress.note(f"note: {model.label}: quantised, read as the numbers that it computes with")
            if unread := model.unread_settings:
                what = f"{model.family.library} reads no {listing(unread)}, so that it is ignored"
                progress.note(f"note: {model.label}: {what}")
        own = first.original or first
        related = kin and are_kin(own, second)
        difference = differing_shape(own, second) if other_shapes else None
        if difference is not None:
            progress.note(f"note: A and B have different shapes: {difference}")
        if related:
            require_common_parts(own, second)
            progress.note(f"note: {_describe_kin(own, second)}")
            return cls(own, second)
        found, reason = compare_vocabularies(own, second, families=difference is not None)
        known = first.vocabulary
        if known and found and (known.source, known.target) == (found.source, found.target):
            least, progress = 0.0, SILENT  # A was opened beside this B before
        pair = cls(own, second, difference, {} if found is None else found.about())
        if found is None and reason:
            if difference is None:
                require_same_shape(own, second, uncompared=reason)
            taken = "" if difference else ", and are taken to be the same"
            progress.warn(f"the vocabularies were not compared{taken}: {reason}")
        elif found is not None and not found.is_identity:
            pair = pair._in_vocabulary(found, least, progress)
        if difference is None:
            require_same_shape(pair.a, second)
            if differing := differing_settings(pair.a, second):
                progress.warn(f"the two bases have different settings: {listing(differing)}")
        return pair

    def _in_vocabulary(self, found: VocabularyMap, least: float, progress: Progress) -> Pair:
        """Return the pair with A in B's vocabulary; of one shape, both must have enough in common."""
        about = found.about()
        progress.note(f"note: the vocabularies differ: {describe_vocabulary(about)}")
        if self.difference is None:
            _require_share(self.a, self.b, found, least)
            _require_same_first_position(self.a, self.b)
        return replace(self, a=self.a.in_vocabulary(found, self.b.checkpoint.config), vocabulary=about)

    @property
    def of_kin(self) -> bool:
        """Whether A and B are of two families that have parts in common, and others not."""
        return are_kin(self.a, self.b)

    def under(self, policy: Policy) -> Pair:
        """Return the same models with the axes of a policy."""
        return replace(self, a=self.a.under(policy), b=self.b.under(policy))

    @property
    def with_common_tokens(self) -> Pair:
        """The same models with 0 in the rows of tokens that only B has, so that those rows do not count."""
        if self.a.vocabulary is None:
            return self
        within = self.a.vocabulary.within_target()
        return replace(self, b=self.b.in_vocabulary(within, self.b.checkpoint.config))


def open_model(model: Model | Reference, config: ConfigArgument = None) -> Model:
    """Open a model, unless it is open already."""
    return model if isinstance(model, Model) else Model.open(model, config=config)


# ── shapes and settings ───────────────────────────────────────────────────────────────────


def differing_shape(a: Model, b: Model) -> str | None:
    """Return in what two models differ beside their vocabularies; None if both have one shape, or are kin."""
    if are_kin(a.original or a, b):
        return None
    of_a, of_b = (a.original or a).architecture, b.architecture
    found = [] if of_a.family == of_b.family else [f"{of_a.family} and {of_b.family}"]
    ours, theirs = _blocks(of_a), _blocks(of_b)
    depths = [(ours[stack], theirs[stack]) for stack in ours if stack in theirs]
    found += [f"{one} and {other} blocks" for one, other in depths if one != other]
    both = [id for id in of_a.backbone_spaces if id in of_b.sizes and id != VOCABULARY]
    sizes = {
        id.rpartition(".")[2]: (of_a.sizes[id], of_b.sizes[id])
        for id in both
        if of_a.sizes[id] != of_b.sizes[id]
    }
    found += [f"{axis} {one} and {other}" for axis, (one, other) in sizes.items()]
    if not found and of_a.backbone.keys() != of_b.backbone.keys():
        found.append(f"only one has {listing(sorted(of_a.backbone.keys() ^ of_b.backbone.keys()), 3)}")
    return ", ".join(found) or None


def _blocks(architecture: Architecture) -> dict[str, int]:
    """Return the number of blocks of every stack."""
    found: dict[str, int] = {}
    for name in architecture.backbone:
        for layer in re.findall(r"(?:^|\.)(\w+)\.(\d+)\.", name):
            found[layer[0]] = max(found.get(layer[0], 0), int(layer[1]) + 1)
    return found


def require_same_shape(a: Model, b: Model, *, uncompared: str = "") -> None:
    """Refuse two bases that are not two sets of weights of one architecture.

    ``uncompared`` says why their vocabularies could not be compared token by token.
    """
    if a.family.name != b.family.name:
        raise MismatchError(
            f"{a.label} is a {a.family.name} and {b.label} a {b.family.name}",
            hint=f"both bases must have the same architecture{_moving(a, b)}"
            if a.family.inputs == b.family.inputs
            else "give two releases of one model",
        )
    backbone_a, backbone_b = set(a.architecture.backbone), set(b.architecture.backbone)
    if backbone_a != backbone_b:
        raise MismatchError(
            f"{a.label} and {b.label} do not have the same tensors; only one has"
            f" {listing(sorted(backbone_a ^ backbone_b))}",
            hint=f"both bases must have the same architecture and depth{_moving(a, b)}",
        )
    for name in sorted(backbone_a):
        shape_a, shape_b = a.info(name).shape, b.info(name).shape
        if shape_a != shape_b:
            layout = a.architecture.tensors[name]
            vocabulary, why = VOCABULARY in layout.names(), uncompared and f" ({uncompared})"
            raise MismatchError(
                f"{name} ('{layout}') has shape {shape_a} in {a.label} and {shape_b} in {b.label}",
                hint=f"the vocabularies differ, and their tokens cannot be compared{why};"
                " put the tokenizer.json of each base into its folder, or a vocab.json of tokens and rows"
                if vocabulary
                else f"both bases must have the same architecture and size{_moving(a, b)}",
            )
    if a.architecture.digest() != b.architecture.digest():
        spaces_a, spaces_b = a.architecture.spaces, b.architecture.spaces
        both = sorted({*a.architecture.backbone_spaces, *b.architecture.backbone_spaces})
        differing = [id for id in both if spaces_a.get(id) != spaces_b.get(id)]
        raise MismatchError(
            f"{a.label} and {b.label} have axes of different sizes or structure: {listing(differing)}",
            hint="their configurations differ, for instance in the number of heads or in tied embeddings",
        )


def _moving(a: Model, b: Model) -> str:
    """Say what moves between different shapes, if these models' streams may be rotated at all."""
    return "" if a.architecture.unrotated or b.architecture.unrotated else _OTHER_SHAPES


def are_kin(a: Model, b: Model) -> bool:
    """Whether two models are of different families that were trained on from each other."""
    return a.family.name != b.family.name and a.family.kin == b.family.kin != ""


def require_common_parts(a: Model, b: Model) -> None:
    """Refuse two models of kin with other free axes in a tensor that both have."""
    ours, theirs = a.architecture, b.architecture
    for name in (one for one in ours.backbone if one in theirs.backbone):
        one, other = (f"{model.architecture.tensors[name]}" for model in (a, b))
        spaces = [[known.spaces[id] for id in known.tensors[name].names()] for known in (ours, theirs)]
        differing = any(
            mine != its and Symmetry.PERMUTATION in (mine.group, its.group)
            for mine, its in zip(*spaces, strict=False)
        )
        if one != other or differing:
            raise MismatchError(
                f"{name} is '{one}' in {a.label} and '{other}' in {b.label}, of shapes"
                f" {a.info(name).shape} and {b.info(name).shape}",
                hint="what both have in common must have one size; give two releases of one size",
            )


def common_parts(a: Model, b: Model) -> list[str]:
    """Return the tensors that two models of kin have in common, in one shape."""
    both = (name for name in a.architecture.backbone if name in b.architecture.backbone)
    return [name for name in both if a.info(name).shape == b.info(name).shape]


def _describe_kin(a: Model, b: Model) -> str:
    """Say what two models of kin have in common."""
    count, total = len(common_parts(a, b)), len(a.architecture.backbone)
    return (
        f"{a.label} is a {a.family.name} and {b.label} a {b.family.name}: {count} of {total} tensors of A"
        " have a counterpart in B, and are compared"
    )


_BOOKKEEPING = re.compile(
    r".*(dropout|pdrop|token_id|initializer|init_|_dict|version|dtype|label|use_cache|architectures|name)"
    r".*|_.*|task_specific_params|problem_type|max_length|attn_implementation"
)


def differing_settings(a: Model, b: Model) -> list[str]:
    """Return the settings that change the computation and differ between two models of equal shapes."""
    first, second = dict(settings_of(a.checkpoint.config or {})), dict(settings_of(b.checkpoint.config or {}))
    return [
        f"{key} ({first[key]}, {second[key]})"
        for key in first
        if key in second and first[key] != second[key] and not is_bookkeeping(key)
    ]


def is_bookkeeping(key: str) -> bool:
    """Whether a setting cannot change what a model computes."""
    return key in known_keys("bookkeeping") or _BOOKKEEPING.fullmatch(key) is not None


def shared_tensors(a: Model, b: Model) -> list[str]:
    """Return the tensors that both models have with the same shape; task heads may differ."""
    return [
        name
        for name in a.architecture.tensors
        if name in b.architecture.tensors and a.info(name).shape == b.info(name).shape
    ]


# ── vocabularies ──────────────────────────────────────────────────────────────────────────


def compare_vocabularies(a: Model, b: Model, *, families: bool = False) -> tuple[VocabularyMap | None, str]:
    """Compare the tokenizers of two models token by token; or return None and the reason. With ``families``,
    also those of different families.

    There is no reason if nothing is to be compared: one of the two has no vocabulary outside its heads, both
    are of different families, or both use the tokenizer of open_clip.
    """
    both = all(VOCABULARY in model.architecture.backbone_spaces for model in (a, b))
    if not both or (a.family.name != b.family.name and not families):
        return None, ""
    tables = []
    for model in (a, b):
        table, reason = tokens_in(model.tokenizer_folder)
        if table is None and all(one.family.library == "open_clip" for one in (a, b)):
            return None, ""
        if table is None:
            return None, reason if model.tokenizer_folder else f"{model.label}: {reason}"
        tables.append(table.resized(model.architecture.sizes[VOCABULARY]))
    of_a, of_b = tables
    return VocabularyMap.between(of_a, of_b, b.tokenizer_folder), ""


def require_rows_of(base: Model, label: str, folder: Path | None) -> None:
    """Refuse a fine-tune whose tokenizer has tokens of its base in other rows, as far as both are known."""
    (ours, _), (known, _) = tokens_in(folder), tokens_in((base.original or base).tokenizer_folder)
    if ours is None or known is None:
        return
    places = {token: row for row, token in enumerate(known.tokens) if token is not None}
    moved = [
        f"{token!r:.40} (row {row}, and {places[token]} in the base)"
        for row, token in enumerate(ours.tokens)
        if token in places and token not in known.tokens[row : row + 1]
    ]
    if moved:
        raise MismatchError(
            f"{label} has {len(moved)} token(s) of its base {base.label} in other rows: {listing(moved, 3)}",
            hint="the fine-tune rearranged its vocabulary: its token ids mean other tokens",
        )


def _require_share(a: Model, b: Model, found: VocabularyMap, least: float) -> None:
    """Refuse vocabularies that have little in common."""
    if found.share >= least and found.common:
        return
    first, second = found.kinds
    kinds = "" if found.comparable else f": tokens of {first} and {second} tokenizers cannot be compared"
    smaller = f"`vocabulary_share`, such as {max(found.share - 0.005, 0):.2f}"
    raise MismatchError(
        f"{a.label} and {b.label} have {found.share:.0%} of their tokens in common ({found.common} of"
        f" {found.tokens[0]} and {found.tokens[1]}), and {least:.0%} are wanted{kinds}",
        hint="fine-tune B anew" + (f"; or insist with a smaller {smaller}" if found.common else ""),
    )


def _require_same_first_position(a: Model, b: Model) -> None:
    """Refuse models whose positions start at another row, because their padding tokens have other rows."""
    first, second = ((model.checkpoint.config or {}).get("pad_token_id", 1) for model in (a, b))
    if a.family.positions_after_padding and first != second:
        raise MismatchError(
            f"{a.label} and {b.label} count positions from behind their padding tokens, which are {first} and"
            f" {second}: their position embeddings do not correspond",
            hint="give bases whose padding tokens have the same row",
        )

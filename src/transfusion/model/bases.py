"""Opening the two bases of a run, and naming the files that no output may overwrite."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from os.path import exists, expanduser
from pathlib import Path
from typing import Any, TypeAlias

from transfusion.architecture.architecture import Architecture
from transfusion.errors import MismatchError, SettingError, listing
from transfusion.files.tokenizer_files import tokens_in
from transfusion.model.model import Model, Reference, differing_settings, require_same_shape
from transfusion.model.vocabulary_map import (
    LEAST_SHARE,
    VOCABULARY,
    VocabularyMap,
    describe_vocabulary,
    differing_digits,
)
from transfusion.runtime.progress import SILENT, Progress

ConfigArgument: TypeAlias = str | Path | Mapping[str, Any] | None
"""A configuration for weights that come without one: a JSON file, or its content."""


def open_model(model: Model | Reference, config: ConfigArgument = None) -> Model:
    """Open a model, unless it is open already."""
    return model if isinstance(model, Model) else Model.open(model, config=config)


def open_bases(
    a: Model | Reference,
    b: Model | Reference,
    config: ConfigArgument = None,
    progress: Progress = SILENT,
    vocabulary_share: float | None = None,
    *,
    other_shapes: bool = False,
) -> tuple[Model, Model]:
    """Open two bases of one architecture; note how they were recognised and which settings differ.

    If the tokenizers differ, A is returned in B's vocabulary. ``vocabulary_share`` is the least share of
    tokens that both must have. With ``other_shapes``, bases of different shapes are accepted.
    """
    models = open_model(a, config), open_model(b, config)
    for model in models:
        if model.checkpoint.config is None:
            progress.note(f"note: {model.label}: recognised by {model.why}")
        else:
            progress.detail(f"{model.label}: {model.family.name}, because {model.why}")
    if other_shapes and (difference := differing_shape(*models)) is not None:
        progress.note(f"note: A and B have different shapes: {difference}")
        return in_rows_of(*models, progress), models[1]
    models = in_one_vocabulary(*models, vocabulary_share, progress), models[1]
    require_same_shape(*models)
    if differing := differing_settings(*models):
        progress.warn(f"the two bases have different settings: {listing(differing)}")
    return models


def differing_shape(a: Model, b: Model) -> str | None:
    """Return in what two models differ beside their vocabularies; None if both have one shape."""
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


def in_rows_of(a: Model, b: Model, progress: Progress = SILENT) -> Model:
    """Return A in B's vocabulary as far as both can be compared; A itself, if they cannot."""
    own = a.original or a
    found, reason = compare_vocabularies(own, b, families=True)
    if found is None or found.is_identity:
        if reason:
            progress.warn(f"the vocabularies were not compared: {reason}")
        return own
    progress.note(f"note: the vocabularies differ: {describe_vocabulary(found.about())}")
    return own.in_vocabulary(found, b.checkpoint.config)


def in_one_vocabulary(
    a: Model, b: Model, vocabulary_share: float | None = None, progress: Progress = SILENT
) -> Model:
    """Return A in B's vocabulary: A itself, if both have the same tokens in the same rows.

    Note tokens that are dropped, and vocabularies that cannot be compared. Refuse those that have little in
    common, and those of different sizes that cannot be compared.
    """
    least = LEAST_SHARE if vocabulary_share is None else vocabulary_share
    if not 0 <= least <= 1:
        raise SettingError(
            f"`vocabulary_share` = {vocabulary_share}: it must be between 0 and 1", hint="for example 0.5"
        )
    own = a.original or a
    found, reason = compare_vocabularies(own, b)
    if found is None:
        if reason:
            require_same_shape(own, b, uncompared=reason)
            progress.warn(f"the vocabularies were not compared, and are taken to be the same: {reason}")
        return own
    if found.is_identity:
        return own
    known = a.vocabulary
    if known is not None and (known.source, known.target) == (found.source, found.target):
        return a
    found = replace(found, digits=differing_digits(own.tokenizer_folder, b.tokenizer_folder))
    progress.note(f"note: the vocabularies differ: {describe_vocabulary(found.about())}")
    if found.digits:
        progress.warn(
            f"digits are split differently: {found.digits}; what the fine-tune learned about numbers"
            " may not arrive"
        )
    _require_share(own, b, found, least)
    _require_same_first_position(own, b)
    return own.in_vocabulary(found, b.checkpoint.config)


def with_common_tokens(a: Model, b: Model) -> tuple[Model, Model]:
    """Return both models with 0 in the rows of tokens that only B has, so that those rows do not count."""
    if a.vocabulary is None:
        return a, b
    return a, b.in_vocabulary(a.vocabulary.within_target(), b.checkpoint.config)


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
    kinds = (
        ""
        if found.comparable
        else f": tokens of {found.kinds[0]} and {found.kinds[1]} tokenizers cannot be compared"
    )
    raise MismatchError(
        f"{a.label} and {b.label} have {found.share:.0%} of their tokens in common ({found.common} of"
        f" {found.tokens[0]} and {found.tokens[1]}), and {least:.0%} are wanted{kinds}",
        hint="fine-tune B anew"
        + (
            f"; or insist with a smaller `vocabulary_share`, such as {max(found.share - 0.005, 0):.2f}"
            if found.common
            else ""
        ),
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


def input_files(*inputs: object) -> list[Path]:
    """Return the paths that hold inputs: models, files of π, and references that exist on this machine.

    Other inputs, such as models in memory and hub ids of data, have no path.
    """
    roots = [root for one in inputs if (root := _root(one)) is not None]
    inside = [path for root in roots if root.is_dir() for path in root.iterdir()]
    return [*roots, *inside]


def _root(given: object) -> Path | None:
    if isinstance(given, Model):
        return None if given.checkpoint.in_memory else given.checkpoint.root
    if isinstance(given, str | Path) and exists(expanduser(given)):
        return Path(expanduser(given))
    return None

"""Settings that a fine-tune changed in its configuration, such as its rotary positions.

They are part of what it computes: the output gets them, or the transport is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transfusion.errors import MismatchError, listing
from transfusion.model.model import Model
from transfusion.model.pair import is_bookkeeping
from transfusion.model.recognition import settings_of
from transfusion.running.building import with_defaults

if TYPE_CHECKING:
    from transfusion.transport.model_output import Change

_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
"""Rotary positions: releases of transformers divide them differently among these keys."""
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
"""Lengths of texts that are promised: no number is computed from them alone."""
_TOKENS = "vocab_size"
"""The number of tokens, in configurations of the libraries."""
_ELSEWHERE = (_TOKENS, "tie_word_embeddings", "model_type", "num_classes", "pretrained_cfg", "auto_map")
"""Settings that the output gets with the tensors they describe, or that describe none."""


@dataclass(frozen=True)
class ChangedSettings:
    """The settings in which fine-tunes differ from A, by dotted names."""

    carried: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the output takes over."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Promised lengths of B that the output keeps, because B differs from A in them itself."""

    @classmethod
    def of(cls, sources: Sequence[Change], base: Model, onto: Model) -> ChangedSettings:
        """Compare the configurations of fine-tunes, A and B; refuse changes that B has no place for."""
        own, theirs = base.checkpoint.config, onto.checkpoint.config
        if not own or not theirs:
            return cls()
        carried: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        for source in sources:
            found, held = _between(source, own, theirs, base, onto)
            odd = [key for key in {**found, **carried} if found.get(key) != carried.get(key)]
            odd = [key for key in odd if not _is_length(key)]
            if odd and source is not sources[0]:
                raise MismatchError(
                    f"{listing(one.label for one in sources)} have different settings in config.json:"
                    f" {listing(odd)}",
                    hint="one model has one configuration; move them one by one",
                )
            carried, kept = carried | found, kept | held
        return cls(carried, kept)

    def into(self, config: dict[str, Any], tuned: Mapping[str, Any]) -> dict[str, Any]:
        """Return B's configuration with the settings that the output takes over."""
        found = deepcopy(config)
        for name, value in self.carried.items():
            *sections, key = name.split(".")
            part, origin = found, tuned
            for section in sections:
                part, origin = part.setdefault(section, {}), origin.get(section) or {}
            if key in _ROPE:
                for one in _ROPE:
                    part.pop(one, None)
                part |= {one: deepcopy(origin[one]) for one in _ROPE if one in origin}
            else:
                part[key] = deepcopy(value)
        return found

    @property
    def decisive(self) -> list[str]:
        """The settings that decide what the output computes."""
        return [key for key in self.carried if not _is_length(key)]

    def notes(self) -> list[str]:
        """Return one line for the user about each kind."""
        lines = []
        if self.carried:
            lines.append(f"the output's config.json has settings of the fine-tune: {listing(self.carried)}")
        if self.kept:
            lines.append(f"the output's config.json keeps B's {listing(self.kept)}")
        return lines

    def about(self) -> dict[str, Any]:
        """Return plain data, for records; empty if the fine-tune changed no setting."""
        found = {"carried": dict(self.carried), "kept": dict(self.kept)}
        return {key: value for key, value in found.items() if value}


def _between(
    source: Change, own: Mapping[str, Any], theirs: Mapping[str, Any], base: Model, onto: Model
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of one fine-tune that are carried, and those of B that are kept."""
    tuned = source.config or own
    if not _differing(dict(settings_of(tuned)), dict(settings_of(own))):
        return {}, {}  # most fine-tunes: no library is needed
    counts = token_counts(source, own)
    of_tuned, of_a, of_b = map(_settings, (tuned, own, theirs))
    carried, kept, lost = dict[str, Any](), dict[str, Any](), list[str]()
    for key in _differing(of_tuned, of_a):
        if key in counts:
            continue
        wanted, was, there = (one.get(key) for one in (of_tuned, of_a, of_b))
        if there == was:
            carried[key] = wanted
        elif there != wanted and _is_length(key):
            kept[key] = there
        elif there != wanted:
            lost.append(f"{key} ({was!r:.60} → {wanted!r:.60}; B has {there!r:.60})")
    if lost:
        raise MismatchError(
            f"{source.label} changed settings of {base.label} that {onto.label} has otherwise:"
            f" {listing(lost, 3)}",
            hint="what the fine-tune computes depends on them: give a B with the same settings as A",
        )
    return carried, kept


def token_counts(source: Change, own: Mapping[str, Any]) -> dict[str, int]:
    """Return the settings in which a fine-tune says how many tokens it has, where A has another number."""
    tuned, base = dict(settings_of(source.config or own)), dict(settings_of(own))
    pairs = list(source.token_counts)
    grown = [now for now, _ in pairs]
    return {
        key: now
        for key, now in tuned.items()
        if (now, base.get(key)) in pairs or (now in grown and key.rpartition(".")[2] == _TOKENS)
    }


def _is_length(key: str) -> bool:
    return key.rpartition(".")[2] in _LENGTHS


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting by its dotted name, with the library's defaults, under today's names."""
    found = dict(settings_of(with_defaults(config)))
    for value in found.values():
        if isinstance(value, dict) and "rope_type" in value:
            value.pop("type", None)  # its name in older files
    return found


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the settings that change what a model computes and differ; null means not given."""
    keys = dict.fromkeys([*one, *other])
    leaf = {key: key.rpartition(".")[2] for key in keys}
    return [
        key
        for key in keys
        if one.get(key) != other.get(key) and leaf[key] not in _ELSEWHERE and not is_bookkeeping(leaf[key])
    ]

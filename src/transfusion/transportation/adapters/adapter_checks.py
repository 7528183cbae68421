"""What is refused about an adapter before anything is moved."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

from transfusion.errors import AdapterError, listing
from transfusion.transportation.adapters.adapter_kinds import KINDS, WHOLE, AdapterKind, AdapterPart, kind_of
from transfusion.transportation.adapters.module_settings import ModuleSettings, words
from transfusion.transportation.adapters.refused_kinds import REFUSED

_MERGE = "merge the adapter into its base and move the merged model"
_AGAIN = "the adapter's file is damaged or incomplete; fetch or save it again"
_BOTH = "the configuration and the weights belong to different adapters; fetch both again"

# Settings of all kinds that say nothing about where the numbers belong: they may have any value.
_COMMON = words(
    """
    auto_mapping base_model_name_or_path bias exclude_modules fan_in_fan_out inference_mode init_weights
    layers_pattern layers_to_transform modules_to_save peft_type peft_version r rank_pattern revision
    runtime_config target_modules task_type
    """
)

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways of starting a LoRA that leave the base as it is."""


class _Stored(Protocol):
    """What is asked here of a stored tensor."""

    @property
    def part(self) -> AdapterPart: ...
    @property
    def module(self) -> str: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def tensor(self) -> str: ...


def kind_that_moves(label: str, config: Mapping[str, Any]) -> AdapterKind:
    """The kind of an adapter; one that cannot be moved is refused by name, and with the reason."""
    if (kind := kind_of(config)) is not None:
        return kind
    name = str(config.get("peft_type", "unknown")).upper()
    if name in REFUSED:
        raise AdapterError(f"{label}: adapters of kind {name} cannot be moved: {REFUSED[name]}", hint=_MERGE)
    raise AdapterError(
        f"{label}: adapters of kind {name} are not known",
        hint=f"these move: {listing(KINDS, len(KINDS))}; or {_MERGE}",
    )


def refuse_odd_settings(label: str, kind: AdapterKind, config: Mapping[str, Any]) -> None:
    """Refuse settings that may change what the numbers mean."""
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise AdapterError(
            f"{label}: the adapter was started by {start!r}, which changes the base's weights when it is"
            " loaded",
            hint="convert it to a plain LoRA (PEFT: path_initial_model_for_weight_conversion), or merge it",
        )
    odd = [
        f"{key}={reprlib.repr(value)}"
        for key, value in config.items()
        if key not in _COMMON | kind.settings and value not in (None, False, {}, [], "")
    ]
    if odd:
        raise AdapterError(
            f"{label}: a {kind.name} adapter with settings that are not understood: {listing(odd)}",
            hint=_MERGE,
        )


def require_whole(label: str, kind: AdapterKind, config: Mapping[str, Any], found: Sequence[_Stored]) -> None:
    """Every module must have all the parts that belong together, in one rank, the configuration's."""
    if kind.parts and not any(factor.part in kind.parts for factor in found):
        raise AdapterError(f"{label}: nothing in the file belongs to a {kind.name} adapter", hint=_BOTH)
    modules: dict[str, dict[str, _Stored]] = {}
    for factor in found:
        if factor.module:
            modules.setdefault(factor.module, {})[factor.part.name] = factor
    for module, parts in modules.items():
        _require_partners(label, module, kind, parts.keys())
        ranks = {name: one.rank for name, one in sorted(parts.items()) if one.rank is not None}
        _require_one_rank(label, module, ranks)
        if ranks and kind.rank is not None:
            rank, promised = next(iter(ranks.values())), kind.rank(ModuleSettings(config, module))
            if rank != promised:
                raise AdapterError(
                    f"{label}: {module} has rank {rank}, and the configuration says {promised}",
                    hint=_BOTH,
                )


def require_biases(label: str, found: Sequence[_Stored], base: Collection[str]) -> None:
    """A module that is stored whole, such as a trained head, must have the bias that the base has."""
    whole = {factor.tensor for factor in found if factor.part is WHOLE}
    for weight in sorted(name for name in whole if name.endswith(".weight")):
        bias = weight.removesuffix("weight") + "bias"
        if bias in base and bias not in whole:
            raise AdapterError(f"{label}: it has {weight}, and not its partner {bias}", hint=_AGAIN)


def _require_partners(label: str, module: str, kind: AdapterKind, there: Set[str]) -> None:
    nearest = max(kind.together, key=lambda wanted: len(wanted & there), default=frozenset[str]())
    if (nearest & there) and (absent := nearest - there):
        raise AdapterError(
            f"{label}: {module} has {listing(sorted(nearest & there))} and not its partner"
            f" {listing(sorted(absent))}",
            hint=_AGAIN,
        )


def _require_one_rank(label: str, module: str, ranks: Mapping[str, int]) -> None:
    if len(set(ranks.values())) > 1:
        name, rank = next(iter(ranks.items()))
        other = next(one for one in ranks if ranks[one] != rank)
        raise AdapterError(
            f"{label}: {module} has rank {rank} in {name} and {ranks[other]} in {other}", hint=_AGAIN
        )


def require_tokens(label: str, key: str, rows: int, tokens: Sequence[int], vocabulary: int) -> None:
    """There must be a row for each token that the configuration names, and such tokens."""
    if rows != len(tokens):
        raise AdapterError(
            f"{label}: {key} has {rows} rows, and the configuration names {len(tokens)} tokens", hint=_BOTH
        )
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise AdapterError(
            f"{label}: the configuration names token {max(tokens)}, and the base has {vocabulary} tokens",
            hint="the adapter belongs to a base with another vocabulary; give that one as --base",
        )


def require_exchangeable(
    label: str, tensor: str, size: int, members: Iterable[int], shapes: Set[tuple[int, ...]]
) -> None:
    """Experts change places, so each must find something alike in the place that it goes to."""
    absent = sorted(set(range(size)) - set(members))
    if absent:
        raise AdapterError(
            f"{label}: the adapter changes some of the experts in {tensor}, and not number"
            f" {listing(absent)}; in the new base they have other numbers",
            hint=_MERGE,
        )
    if len(shapes) > 1:
        raise AdapterError(
            f"{label}: the experts in {tensor} have tensors of several shapes"
            f" ({listing(sorted(shapes))}), and cannot change places",
            hint=_MERGE,
        )


def require_one_scale(label: str, config: Mapping[str, Any], modules: Sequence[str]) -> None:
    """Modules that change places must have one scale, which belongs to the place."""
    scales = {
        ModuleSettings(config, module).patterned("alpha_pattern", "lora_alpha", 8) for module in modules
    }
    if len(scales) > 1:
        raise AdapterError(
            f"{label}: alpha_pattern tells experts such as {modules[0]} apart, and experts change places",
            hint=_MERGE,
        )


def require_targets(
    label: str, config: Mapping[str, Any], found: Sequence[_Stored], names: Iterable[str]
) -> None:
    """Refuse a list of target modules with one that the base has, and of which nothing is stored."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or config.get("exclude_modules"):
        return
    stored = [factor.module or factor.tensor.rpartition(".")[0] for factor in found]
    base = [name.rpartition(".")[0] for name in names]
    missing = [
        target
        for target in sorted(targets)
        if not any(ModuleSettings({}, module).targeted_by(target) for module in stored)
        and any(ModuleSettings({}, module).targeted_by(target) for module in base)
    ]
    if missing:
        raise AdapterError(
            f"{label}: missing target module: the configuration names {listing(missing)}, and the file has"
            " nothing for it",
            hint=_AGAIN,
        )

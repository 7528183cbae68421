"""Checks of an adapter before anything is moved."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from transfusion.errors import AdapterError, listing
from transfusion.transport.adapters.kinds import KINDS, WHOLE, AdapterKind, kind_of
from transfusion.transport.adapters.settings import ModuleSettings, words

if TYPE_CHECKING:
    from transfusion.transport.adapters.targets import AdapterTensor


_MERGE = "merge the adapter into its base, and move the merged model"
_AGAIN = "the adapter's file is damaged or incomplete; download or save it again"
_BOTH = "the configuration and the weights belong to different adapters; download both again"

# Settings of all kinds that do not affect the layout of the stored tensors: any value is accepted.
COMMON = words(
    """
    auto_mapping base_model_name_or_path bias exclude_modules fan_in_fan_out inference_mode init_weights
    layers_pattern layers_to_transform modules_to_save peft_type peft_version r rank_pattern revision
    runtime_config target_modules task_type
    """
)

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations of a LoRA that leave the base's weights unchanged."""


_BLOCKS = "it acts on blocks of neighbouring units, and π separates neighbours"
_RANDOM = "it scales random projections that all modules share, and π moves each module differently"
_SPECTRUM = "it stores coefficients of a transform over the order of the units, which π changes"
_SINGULAR = "it is built from singular vectors of A's weights, and B has other ones"
_SPARSE = "it changes single entries that A's weights or a seed selected"
_SEVERAL = "it mixes several adapters, and only single adapters are supported"
_NETWORK = "it is a network beside the base, not a change of the base's weights"
_UNSUPPORTED = "TransFusion does not know the layout of its tensors"

REFUSED = {
    "ADAMSS": _SINGULAR,
    "ADAPTION_PROMPT": _UNSUPPORTED,
    "BOFT": _BLOCKS,
    "BONE": _BLOCKS,
    "C3A": _SPECTRUM,
    "CARTRIDGE": _UNSUPPORTED,
    "CPT": _UNSUPPORTED,
    "DEFT": _UNSUPPORTED,
    "FOURIERFT": _SPECTRUM,
    "FROD": _SINGULAR,
    "GLORA": _UNSUPPORTED,
    "GRALORA": _BLOCKS,
    "LILY": "modules share factors, and π moves each module differently",
    "MISS": _BLOCKS,
    "MULTITASK_PROMPT_TUNING": _UNSUPPORTED,
    "OFT": _BLOCKS,
    "OSF": _SINGULAR,
    "PEANUT": "its change is a network applied to A's weights",
    "POLY": _SEVERAL,
    "PSOFT": _SINGULAR,
    "PVERA": _RANDOM,
    "RANDLORA": _RANDOM,
    "ROAD": _BLOCKS,
    "SHADOW": _NETWORK,
    "SHIRA": _SPARSE,
    "SUPERTUNING": _SPARSE,
    "TINYLORA": _SINGULAR,
    "UNILORA": _RANDOM,
    "VBLORA": "modules share a bank of vectors, and π moves each module differently",
    "VERA": _RANDOM,
    "WAVEFT": _SPECTRUM,
    "XLORA": _SEVERAL,
}


def movable_kind(label: str, config: Mapping[str, Any]) -> AdapterKind:
    """Return the kind of an adapter; refuse a kind that cannot be moved, with the reason."""
    if (kind := kind_of(config)) is not None:
        return kind
    name = str(config.get("peft_type", "unknown")).upper()
    if name in REFUSED:
        raise AdapterError(f"{label}: adapters of kind {name} cannot be moved: {REFUSED[name]}", hint=_MERGE)
    raise AdapterError(
        f"{label}: adapters of kind {name} are not known",
        hint=f"known kinds: {listing(KINDS, len(KINDS))}; or {_MERGE}",
    )


def refuse_odd_settings(label: str, kind: AdapterKind, config: Mapping[str, Any]) -> None:
    """Refuse settings that may change the meaning of the stored tensors."""
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise AdapterError(
            f"{label}: the adapter was initialised by {start!r}, which changes the base's weights when the"
            " adapter is loaded",
            hint="convert it to a plain LoRA (PEFT: path_initial_model_for_weight_conversion), or merge it",
        )
    odd = [
        f"{key}={reprlib.repr(value)}"
        for key, value in config.items()
        if key not in COMMON | kind.settings and value not in (None, False, {}, [], "")
    ]
    if odd:
        raise AdapterError(
            f"{label}: a {kind.name} adapter with unknown settings: {listing(odd)}",
            hint=_MERGE,
        )


def require_whole(
    label: str, kind: AdapterKind, config: Mapping[str, Any], found: Sequence[AdapterTensor]
) -> None:
    """Refuse a module with missing parts, or with another rank than the configuration's."""
    if kind.parts and not any(factor.part in kind.parts for factor in found):
        raise AdapterError(f"{label}: the file has no tensor of a {kind.name} adapter", hint=_BOTH)
    modules: dict[str, dict[str, AdapterTensor]] = {}
    for factor in found:
        if factor.module:
            modules.setdefault(factor.module, {})[factor.part.name] = factor
    for module, parts in modules.items():
        wanted = max(kind.together, key=lambda names: len(names & parts.keys()), default=frozenset[str]())
        there = sorted(wanted & parts.keys())
        if there and (absent := sorted(wanted - parts.keys())):
            raise AdapterError(
                f"{label}: {module} has {listing(there)} without {listing(absent)}", hint=_AGAIN
            )
        ranks = [(one.rank, name) for name, one in sorted(parts.items()) if one.rank is not None]
        for rank, name in ranks[1:]:
            if rank != ranks[0][0]:
                raise AdapterError(
                    f"{label}: {module} has rank {ranks[0][0]} in {ranks[0][1]} and {rank} in {name}",
                    hint=_AGAIN,
                )
        if not ranks or kind.rank is None:
            continue
        if (promised := kind.rank(ModuleSettings(config, module))) != ranks[0][0]:
            raise AdapterError(
                f"{label}: {module} has rank {ranks[0][0]}, and the configuration says {promised}", hint=_BOTH
            )


def require_biases(label: str, found: Sequence[AdapterTensor], base: Collection[str]) -> None:
    """Refuse a whole module, such as a trained head, without the bias that the base has."""
    whole = {factor.tensor for factor in found if factor.part is WHOLE}
    for weight in sorted(name for name in whole if name.endswith(".weight")):
        bias = weight.removesuffix("weight") + "bias"
        if bias in base and bias not in whole:
            raise AdapterError(f"{label}: it has {weight} without {bias}", hint=_AGAIN)


def require_tokens(label: str, key: str, rows: int, tokens: Sequence[int], vocabulary: int) -> None:
    """Refuse rows that do not match the configuration's tokens, and tokens outside the vocabulary."""
    if rows != len(tokens):
        raise AdapterError(
            f"{label}: {key} has {rows} rows, and the configuration names {len(tokens)} tokens", hint=_BOTH
        )
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise AdapterError(
            f"{label}: the configuration names token {max(tokens)}, and the base has {vocabulary} tokens",
            hint="the adapter belongs to a base with another vocabulary; give that base as `base`",
        )


def require_exchangeable(
    label: str,
    config: Mapping[str, Any],
    size: int,
    members: Mapping[int, AdapterTensor],
    shapes: Set[tuple[int, ...]],
) -> None:
    """Refuse an adapter that does not change all experts of a stack alike: π permutes the experts."""
    modules = [factor.module for factor in members.values()]
    tensor = next(iter(members.values())).places[0].tensor
    if absent := sorted(set(range(size)) - members.keys()):
        raise AdapterError(
            f"{label}: the adapter changes some of the experts in {tensor}, and not number"
            f" {listing(absent)}; in B they have other numbers",
            hint=_MERGE,
        )
    if len(shapes) > 1:
        raise AdapterError(
            f"{label}: the experts in {tensor} have tensors of several shapes"
            f" ({listing(sorted(shapes))}), and cannot be permuted",
            hint=_MERGE,
        )
    settings = (ModuleSettings(config, module) for module in modules)  # a scale belongs to a module's name
    if len({one.patterned("alpha_pattern", "lora_alpha", 8) for one in settings}) > 1:
        raise AdapterError(
            f"{label}: alpha_pattern gives experts such as {modules[0]} different scales, and π permutes"
            " experts",
            hint=_MERGE,
        )


def require_targets(
    label: str, config: Mapping[str, Any], found: Sequence[AdapterTensor], names: Iterable[str]
) -> None:
    """Refuse a target module that the base has and for which nothing is stored."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or config.get("exclude_modules"):
        return
    stored = [factor.module or factor.tensor.rpartition(".")[0] for factor in found]
    base = [name.rpartition(".")[0] for name in names]
    missing = [
        target
        for target in sorted(targets)
        if not any(_ends_with(module, target) for module in stored)
        and any(_ends_with(module, target) for module in base)
    ]
    if missing:
        raise AdapterError(
            f"{label}: missing target module: the configuration names {listing(missing)}, and the file has"
            " no tensors for it",
            hint=_AGAIN,
        )


def _ends_with(module: str, target: str) -> bool:
    return f".{module}".endswith(f".{target}")

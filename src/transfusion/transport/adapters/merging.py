"""LoRAs factored again: several merged into one, or one moved between models of different shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import AdapterError, SettingError, listing
from transfusion.files.lora_keys import DENOISER
from transfusion.transport.adapters.adapter import AdapterTensor
from transfusion.transport.adapters.kinds import Factors, lora_factors, singular_directions
from transfusion.transport.adapters.lora_file import CONFIGURATION, LoraFile, OtherParts
from transfusion.transport.adapters.moved_adapter import MovedAdapter
from transfusion.transport.adapters.outputs import AdapterFiles, computed_whole, output_for_b
from transfusion.transport.adapters.settings import config_name, rank_settings
from transfusion.transport.merge_rules import MergeMethod, MergeRule, magnitude_histogram
from transfusion.transport.output import Action, Output, OutputTensor
from transfusion.transport.record import OutputRecord

_OVERSAMPLED, _ITERATIONS = 16, 8
_FULL = "`full=True` merges the weights, and writes a model"


def merged_adapter_output(
    adapters: Sequence[MovedAdapter],
    merging: MergeRule,
    *,
    rank: int | None = None,
    head: int | None = None,
    dtype: torch.dtype | None = None,
    record: OutputRecord | None = None,
) -> Output:
    """Return several moved LoRAs as one LoRA for B; refuse adapters that cannot become one."""
    _require_one_format(adapters)
    merged, wholes = MergedAdapters(tuple(adapters), merging, rank), _wholes(adapters, head)
    tensors = {name: one.in_dtype(dtype) for name, one in (merged.tensors() | wholes).items()}

    def about() -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            **adapters[0].adapter.about,
            "rank": max(merged.ranks.values()),
            "kept": min(merged.kept.values(), default=None),
            "moved": 2 * len(merged.modules),
            "carried": sorted(wholes),
        }

    record = record or OutputRecord("merge")
    return replace(
        output_for_b(adapters, tensors, merged.settings(), about, record, dtype, merging),
        adapter_files=_merged_files(adapters, set(merged.ranks.values())),
        prepare=lambda threads: merging.prepare([partial(_counts, one) for one in adapters]),
    )


@dataclass
class MergedAdapters:
    """LoRA adapters for B, merged into one LoRA adapter.

    Sums and means are exact at the sum of the ranks. The result of TIES and DARE has full rank: it is
    approximated by the nearest product of the wanted rank, and ``kept`` records the share that this keeps.
    """

    adapters: tuple[MovedAdapter, ...]
    merging: MergeRule
    rank: int | None = None
    kept: dict[str, float] = field(default_factory=dict)
    """For every module that was factored again, the share of the squared norm that was kept."""

    @cached_property
    def modules(self) -> dict[str, list[int]]:
        """For every module, the numbers of the adapters that change it."""
        found: dict[str, list[int]] = {}
        for number, one in enumerate(self.adapters):
            for module in one.modules:
                found.setdefault(module, []).append(number)
        return found

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of every module of the result."""
        ranks = {}
        for module, numbers in self.modules.items():
            together = sum(self.adapters[number].modules[module]["lora_A"].rank or 0 for number in numbers)
            largest = together if self._exact else min(self._extents(module))
            ranks[module] = together if self.rank is None else min(self.rank, largest)
        return ranks

    @property
    def _exact(self) -> bool:
        return self.merging.how in (MergeMethod.SUM, MergeMethod.MEAN)

    def _first(self, module: str) -> tuple[MovedAdapter, dict[str, AdapterTensor]]:
        """Return the first adapter that changes a module, and its tensors there: the result has its names."""
        one = self.adapters[self.modules[module][0]]
        return one, one.modules[module]

    def _extents(self, module: str) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of a module."""
        one, parts = self._first(module)
        stored = one.adapter.checkpoint.tensors
        return stored[parts["lora_B"].key].shape[0], stored[parts["lora_A"].key].shape[1]

    def tensors(self) -> dict[str, OutputTensor]:
        """Return every factor of the result, by its key."""
        made: dict[str, OutputTensor] = {}
        factors = lru_cache(maxsize=1)(self._factors)  # both are asked for, one after the other
        for module, rank in self.ranks.items():
            one, parts = self._first(module)
            outputs, inputs = self._extents(module)
            dtype = one.adapter.checkpoint.tensors[parts["lora_A"].key].dtype
            for side, part, shape in ((1, "lora_A", (rank, inputs)), (0, "lora_B", (outputs, rank))):
                compute = partial(lambda module, side: factors(module)[side], module, side)
                made[parts[part].key] = computed_whole(shape, dtype, compute)
            if alpha := parts.get("alpha"):
                info = one.adapter.checkpoint.tensors[alpha.key]  # makes the scale of the module 1
                full = partial(torch.full, info.shape, rank, dtype=info.dtype)
                made[alpha.key] = computed_whole(info.shape, info.dtype, full)
        return made

    def _factors(self, module: str) -> Factors:
        """Return lora_B and lora_A of a module, for a scale of 1."""
        rank = self.ranks[module]
        products = {number: _factors(self.adapters[number], module) for number in self.modules[module]}
        if self._exact:
            left, right = self._concatenated(module, products)
            if rank == len(right):
                return left, right
            u, s, v = singular_directions(left.double(), right.double())
            total = s.square().sum()
        else:
            change = self._combined(module, products).double()
            with torch.random.fork_rng(devices=()):  # a randomised decomposition, the same in every run
                torch.manual_seed(self.merging.seed)
                size = min(rank + _OVERSAMPLED, *change.shape)
                u, s, v = torch.svd_lowrank(change, q=size, niter=_ITERATIONS)
            v, total = v.T, change.square().sum()
        u, s, v = u[:, :rank], s[:rank], v[:rank]
        self.kept[module] = float(s.square().sum() / total) if total else 1.0
        return u * s.sqrt(), s.sqrt()[:, None] * v  # of equal norm

    def _concatenated(self, module: str, products: Mapping[int, Factors]) -> Factors:
        """Return the factors of a weighted sum."""
        shares, lefts = self.merging.shares(len(self.adapters)), []
        for number, (left, _) in products.items():
            one = self.adapters[number]
            lefts.append(
                one.alpha_of(one.modules[module]["lora_B"], self.merging.alpha) * shares[number] * left
            )
        # (outputs, ranks), (ranks, inputs)
        return torch.cat(lefts, dim=1), torch.cat([right for _, right in products.values()])

    def _combined(self, module: str, products: Mapping[int, Factors]) -> Tensor:
        """Return the merged change of a module, as a matrix."""
        one, parts = self._first(module)
        if isinstance(one.alpha_of(parts["lora_B"], self.merging.alpha), Tensor):
            names = listing(place.tensor for place in parts["lora_B"].places)
            raise SettingError(
                f"alpha: {names} are one module in these LoRAs, and have different α",
                hint="give them one α, or combine by sum or mean",
            )
        changes = {number: left @ right for number, (left, right) in products.items()}  # (outputs, inputs)
        combined = self.merging.combine(changes, len(self.adapters), parts["lora_B"].tensor)
        assert combined is not None, "a module without factors"
        return combined

    def settings(self) -> dict[str, Any]:
        """Return PEFT's configuration of the result."""
        saved = {name for one in self.adapters for name in one.adapter.config.get("modules_to_save") or ()}
        return {
            **self.adapters[0].adapter.config,
            **rank_settings(self.ranks),
            "target_modules": sorted(map(config_name, self.ranks)),
            "exclude_modules": None,
            "layers_to_transform": None,
            "layers_pattern": None,
            "modules_to_save": sorted(saved) or None,
        }


def _factors(one: MovedAdapter, module: str) -> Factors:
    """Return the moved factors of a module: s·B (outputs, rank) and A (rank, inputs)."""
    parts = {name: one.on_b(factor) for name, factor in one.modules[module].items()}
    found = lora_factors(parts, one.adapter.settings(module))
    assert found is not None, "plain LoRAs, as was required"
    return found


def _counts(one: MovedAdapter, high: int | None) -> Tensor:
    """Count the magnitudes of an adapter's change, for the threshold of TIES."""
    return magnitude_histogram((torch.matmul(*_factors(one, module)) for module in one.modules), high)


def _wholes(adapters: Sequence[MovedAdapter], head: int | None) -> dict[str, OutputTensor]:
    """Return the tensors that are stored as a whole: those of one adapter, or of the chosen ``head``."""
    found: dict[str, dict[int, AdapterTensor]] = {}
    for number, one in enumerate(adapters):
        for factor in one.factors:
            if factor.whole:
                found.setdefault(factor.tensor, {})[number] = factor
    shared = [tensor for tensor, owners in found.items() if len(owners) > 1]
    if shared and head is None:
        raise AdapterError(
            f"several of the adapters have their own {listing(shared)}, which cannot be merged",
            hint="choose which one to keep with `head`, which counts from 1 on the command line and from 0 in"
            " Python",
        )
    made: dict[str, OutputTensor] = {}
    for owners in found.values():
        for number, factor in owners.items():
            if len(owners) == 1 or number == head:
                info = adapters[number].adapter.checkpoint.tensors[factor.key]
                compute = partial(adapters[number].on_b, factor)
                made[factor.key] = computed_whole(info.shape, info.dtype, compute, Action.CARRIED)
    return made


def _merged_files(adapters: Sequence[MovedAdapter], ranks: Collection[int]) -> AdapterFiles:
    """Return how the result is stored. A LoRA file keeps the entries of the header that all share."""
    files, *others = (one.adapter.files for one in adapters)
    rank = str(next(iter(ranks))) if len(ranks) == 1 else "Dynamic"  # kohya's word for several
    now = {"ss_network_dim": rank, "ss_network_alpha": rank}
    shared = {
        key: now.get(key, text)
        for key, text in files.header.items()
        if key in now or all(one.header.get(key) == text for one in others)
    }
    shared.pop(CONFIGURATION, None)  # the tensors hold the scales now
    return replace(files, header=shared)


def _require_one_format(adapters: Sequence[MovedAdapter]) -> None:
    """Refuse adapters that cannot become one LoRA in one format."""
    for one in adapters:
        kind, stored = one.adapter.kind.name, one.adapter.checkpoint.tensors
        parts = {factor.part.name: factor for factor in one.factors if factor.module}
        odd = sorted(parts.keys() - {"lora_A", "lora_B", "alpha"})
        if kind != "LORA" or odd:
            what = listing(odd) if kind == "LORA" else f"an adapter of kind {kind}"
            raise one.adapter.error(f"{what} cannot be merged into one adapter", _FULL)
        if any(stored[factor.key].shape[2:] for factor in one.factors if factor.module):
            raise one.adapter.error("adapters of convolutions cannot be merged into one adapter", _FULL)
    files = [one.adapter for one in adapters if isinstance(one.adapter, LoraFile)]
    if files and (len(files) < len(adapters) or len({one.naming for one in files}) > 1):
        raise AdapterError(
            f"{listing(one.label for one in adapters)}: adapters of several formats cannot become one",
            hint=f"save them in one format; or {_FULL}",
        )
    if any(one.others is OtherParts.KEEP and one.components != {DENOISER} for one in files):
        raise AdapterError(
            "several LoRAs with parts for other models cannot become one",
            hint='`other_parts="drop"` leaves these parts out',
        )


# ── between shapes ───────────────────────────────────────────────────────────────────────────

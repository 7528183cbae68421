"""Several LoRA adapters merged into one: factors concatenated, or factored again to a rank."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import AdapterError, SettingError, listing
from transfusion.files.lora_keys import DENOISER
from transfusion.transport.adapters.adapter import HASHES, Adapter, AdapterFiles
from transfusion.transport.adapters.kinds import lora_added
from transfusion.transport.adapters.lora_file import CONFIGURATION, LoraFile, OtherParts
from transfusion.transport.adapters.move import MovedAdapter, config_for
from transfusion.transport.adapters.settings import ModuleSettings, config_name
from transfusion.transport.adapters.targets import AdapterTensor
from transfusion.transport.merge_rules import MergeMethod, MergeRule, magnitude_histogram
from transfusion.transport.output import Action, Output, OutputTensor
from transfusion.transport.record import OutputRecord

_OVERSAMPLED, _ITERATIONS = 16, 8
_FACTORS, _ALPHA = ("lora_A", "lora_B"), "alpha"
_FULL = "`full=True` merges the weights, and writes a model"


@dataclass(frozen=True)
class LowRankPair:
    """The two factors of one adapter on one module."""

    number: int
    """The index of the adapter."""
    a: AdapterTensor
    b: AdapterTensor
    settings: ModuleSettings


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
    record = record or OutputRecord("merge")
    merged, first = MergedAdapters(tuple(adapters), merging, rank, head), adapters[0]
    ranks = merged.ranks()

    def metadata() -> dict[str, Any]:
        return {
            **record.of(adapters, first.base, first.onto, first.alignment, merging),
            "kind": "adapter",
            "peft_type": "LORA",
            **first.adapter.stated_format,
            "dtype": dtype and str(dtype).removeprefix("torch."),
            "rank": max(ranks.values()),
            "kept": min(merged.kept.values()) if merged.kept else None,
            "moved": 2 * len(merged.modules),
            "carried": sorted(merged.wholes()),
        }

    stored = [one.adapter for one in adapters]
    return Output(
        f"{listing(one.adapter.label for one in adapters)}, moved onto {first.onto.label}",
        first.onto,
        {name: one.in_dtype(dtype) for name, one in merged.tensors().items()},
        config_for(first.onto, merged.settings()),
        metadata,
        record.texts,
        inputs=[*(one.checkpoint for one in stored), first.base.checkpoint, first.onto.checkpoint],
        adapter=_merged_files(stored, set(ranks.values())),
        pi=first.alignment if record.keeps_pi else None,
        prepare=lambda threads: merged.prepare(),
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
    head: int | None = None
    kept: dict[str, float] = field(default_factory=dict)
    """For every module that was factored again, the share of the squared norm that was kept."""
    _last: tuple[str, tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        for one in self.adapters:
            _require_plain(one)
        _require_one_format([one.adapter for one in self.adapters])

    @cached_property
    def modules(self) -> dict[str, list[LowRankPair]]:
        """For every module, the pairs of factors of the adapters that change it."""
        found: dict[str, list[LowRankPair]] = {}
        for number, one in enumerate(self.adapters):
            for module, factors in one.modules.items():
                first, second = sorted(
                    (one for one in factors if one.part.name in _FACTORS), key=lambda one: one.part.name
                )
                pair = LowRankPair(number, first, second, one.adapter.settings(module))
                found.setdefault(module, []).append(pair)
        return found

    def ranks(self) -> dict[str, int]:
        """Return the rank of every module of the result."""
        return {module: self._rank(pairs) for module, pairs in self.modules.items()}

    def _rank(self, pairs: Sequence[LowRankPair]) -> int:
        together = sum(pair.a.rank or 0 for pair in pairs)
        if self.rank is None:
            return together
        return min(self.rank, together if self._exact else min(self._extents(pairs[0])))

    def _extents(self, pair: LowRankPair) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the module."""
        tensors = self.adapters[pair.number].adapter.checkpoint.tensors
        return tensors[pair.b.key].shape[0], tensors[pair.a.key].shape[1]

    @property
    def _exact(self) -> bool:
        return self.merging.how in (MergeMethod.SUM, MergeMethod.MEAN)

    # ── tensors ──────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> dict[str, OutputTensor]:
        """Return every tensor of the result, by its key."""
        made: dict[str, OutputTensor] = {}
        for module, pairs in self.modules.items():
            stored = self.adapters[pairs[0].number].adapter.checkpoint.tensors
            rank, (outputs, inputs) = self._rank(pairs), self._extents(pairs[0])
            dtype = stored[pairs[0].a.key].dtype
            for side, factor, shape in ((0, pairs[0].a, (rank, inputs)), (1, pairs[0].b, (outputs, rank))):
                compute = partial(self._factor, module, side)
                made[factor.key] = OutputTensor(shape, dtype, compute, by_rows=False)
            for factor in self._alphas(module):
                info = stored[factor.key]
                full = torch.full(info.shape, rank, dtype=info.dtype)  # makes the scale of the module 1
                made[factor.key] = OutputTensor(info.shape, info.dtype, partial(_same, full), by_rows=False)
        return made | self.wholes()

    def _alphas(self, module: str) -> list[AdapterTensor]:
        """Return the stored alpha of a module, if the adapter whose names it has stores one."""
        factors = self.adapters[self.modules[module][0].number].modules[module]
        return [factor for factor in factors if factor.part.name == _ALPHA]

    def _factor(self, module: str, side: int, _: slice) -> Tensor:
        if self._last is None or self._last[0] != module:
            self._last = (module, self._factors(module))
        return self._last[1][side]

    def _factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return lora_A and lora_B of a module, for a scale of 1."""
        pairs = self.modules[module]
        rank = self._rank(pairs)
        if self._exact:
            a, b = self._concatenated(pairs)
            return (a, b) if rank == len(a) else self._truncated(module, a, b, rank)
        return self._factored(module, self._combined(pairs), rank)

    def _concatenated(self, pairs: Sequence[LowRankPair]) -> tuple[Tensor, Tensor]:
        weights = self.merging.shares(len(self.adapters))
        first, second = [], []
        for pair in pairs:
            one = self.adapters[pair.number]
            alpha = one.alpha_of(pair.b, self.merging.alpha)
            first.append(one.moved(pair.a))
            second.append(alpha * weights[pair.number] * pair.settings.lora_scale * one.moved(pair.b))
        return torch.cat(first), torch.cat(second, dim=1)

    def _truncated(self, module: str, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return the nearest product of a smaller rank, computed from the factors."""
        left, right = torch.linalg.qr(b.double()), torch.linalg.qr(a.double().T)
        u, s, v = torch.linalg.svd(left.R @ right.R.T)
        self._record(module, float(s.square().sum()), s[:rank])
        return _balanced(left.Q @ u[:, :rank], s[:rank], (right.Q @ v.T[:, :rank]).T)

    def _combined(self, pairs: Sequence[LowRankPair]) -> Tensor:
        """Return the merged change of a module, as a matrix."""
        if isinstance(self.adapters[0].alpha_of(pairs[0].b, self.merging.alpha), Tensor):
            names = listing(place.tensor for place in pairs[0].b.places)
            raise SettingError(
                f"alpha: {names} are one module in these LoRAs, and have different α",
                hint="give them one α, or combine by sum or mean",
            )
        changes = {
            pair.number: _product(self.adapters[pair.number], (pair.a, pair.b), pair.settings)
            for pair in pairs
        }
        combined = self.merging.combine(changes, len(self.adapters), pairs[0].b.tensor)
        assert combined is not None, "a module without pairs"
        return combined

    def _factored(self, module: str, change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return the nearest product of this rank, by a randomised SVD with a fixed seed."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.merging.seed)
            size = min(rank + _OVERSAMPLED, *change.shape)
            u, s, v = torch.svd_lowrank(change.double(), q=size, niter=_ITERATIONS)
        self._record(module, float(change.double().square().sum()), s[:rank])
        return _balanced(u[:, :rank], s[:rank], v[:, :rank].T)

    def _record(self, module: str, total: float, kept: Tensor) -> None:
        self.kept[module] = float(kept.square().sum()) / total if total else 1.0

    def prepare(self) -> None:
        """Let the merge rule read every change if it needs a threshold (TIES)."""
        self.merging.prepare([partial(_counts, one) for one in self.adapters])

    def wholes(self) -> dict[str, OutputTensor]:
        """Return the tensors that are stored as a whole: those of one adapter, or of the chosen ``head``."""
        found: dict[str, dict[int, AdapterTensor]] = {}
        for number, one in enumerate(self.adapters):
            for factor in one.factors:
                if factor.whole:
                    found.setdefault(factor.tensor, {})[number] = factor
        shared = [tensor for tensor, owners in found.items() if len(owners) > 1]
        if shared and self.head is None:
            raise AdapterError(
                f"several of the adapters have their own {listing(shared)}, which cannot be merged",
                hint="choose which one to keep with `head`, which counts from 1 on the command line and from"
                " 0 in Python",
            )
        return {
            factor.key: self._whole(self.adapters[number], factor)
            for owners in found.values()
            for number, factor in owners.items()
            if len(owners) == 1 or number == self.head
        }

    @staticmethod
    def _whole(moved: MovedAdapter, factor: AdapterTensor) -> OutputTensor:
        info = moved.adapter.checkpoint.tensors[factor.key]
        compute = lambda _: moved.moved(factor)  # noqa: E731
        return OutputTensor(info.shape, info.dtype, compute, action=Action.CARRIED, by_rows=False)

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def settings(self) -> dict[str, Any]:
        ranks = {config_name(module): rank for module, rank in self.ranks().items()}
        usual = max(set(ranks.values()), key=list(ranks.values()).count)
        other = {re.escape(module): rank for module, rank in ranks.items() if rank != usual}
        saved = {name for one in self.adapters for name in one.adapter.config.get("modules_to_save") or ()}
        return {
            **self.adapters[0].adapter.config,
            "r": usual,
            "lora_alpha": usual,
            "rank_pattern": other,
            "alpha_pattern": dict(other),
            "use_rslora": False,
            "target_modules": sorted(ranks),
            "exclude_modules": None,
            "layers_to_transform": None,
            "layers_pattern": None,
            "modules_to_save": sorted(saved) or None,
        }


def _same(tensor: Tensor, _: slice) -> Tensor:
    return tensor


def _product(one: MovedAdapter, factors: Sequence[AdapterTensor], settings: ModuleSettings) -> Tensor:
    """Return the change of one module by an adapter, as a matrix."""
    return lora_added({factor.part.name: one.moved(factor) for factor in factors}, settings)


def _counts(one: MovedAdapter, high: int | None) -> Tensor:
    modules = one.modules.items()
    changes = (_product(one, factors, one.adapter.settings(module)) for module, factors in modules)
    return magnitude_histogram(changes, high)


def _balanced(u: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return lora_A and lora_B of equal norm."""
    root = s.sqrt()
    return root[:, None] * v, u * root


def _merged_files(adapters: Sequence[Adapter], ranks: Set[int]) -> AdapterFiles:
    """Return how the result is stored. A LoRA file keeps the entries of the header that all share."""
    files, headers = adapters[0].files, [one.files.header for one in adapters]
    own = files.header
    shared = {key: text for key, text in own.items() if all(h.get(key) == text for h in headers)}
    rank = str(next(iter(ranks))) if len(ranks) == 1 else "Dynamic"  # kohya's word for several
    now = {"ss_network_dim": rank, "ss_network_alpha": rank}
    shared |= {key: now.get(key, text) for key, text in own.items() if key in (*HASHES, *now)}
    shared.pop(CONFIGURATION, None)  # the tensors hold the scales now
    return replace(files, header=shared)


def _require_one_format(adapters: Sequence[Adapter]) -> None:
    files = [one for one in adapters if isinstance(one, LoraFile)]
    if files and (len(files) < len(adapters) or len({one.naming for one in files}) > 1):
        raise AdapterError(
            f"{listing(one.label for one in adapters)}: adapters of several formats cannot become one",
            hint="save them in one format; or `full=True` merges the weights, and writes a model",
        )
    if any(one.others is OtherParts.KEEP and one.components != {DENOISER} for one in files):
        raise AdapterError(
            "several LoRAs with parts for other models cannot become one",
            hint='`other_parts="drop"` leaves these parts out',
        )


def _require_plain(one: MovedAdapter) -> None:
    odd = sorted({factor.part.name for factor in one.factors if factor.module} - {*_FACTORS, _ALPHA})
    kind = one.adapter.kind.name
    if kind != "LORA" or odd:
        what = listing(odd) if kind == "LORA" else f"an adapter of kind {kind}"
        raise AdapterError(f"{one.label}: {what} cannot be merged into one adapter", hint=_FULL)
    if any(one.adapter.checkpoint.tensors[f.key].shape[2:] for f in one.factors if f.module):
        raise AdapterError(
            f"{one.label}: adapters of convolutions cannot be merged into one adapter", hint=_FULL
        )

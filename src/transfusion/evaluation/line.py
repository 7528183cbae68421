"""The line B + α·δ in one live module, with one α or one per layer.

`sweep` measures many α on it, `fewshot` learns α by gradients, and `barrier` follows it from π(A) to B. A
transport is linear in α, whatever the fine-tune and π are: the weights at α = 0 and α = 1 are computed once,
and all others are interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment, require_one_shape
from transfusion.architecture.naming import Naming, without_part
from transfusion.architecture.table import Family
from transfusion.evaluation.evaluate import hold, named_base
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.settings import LineSettings
from transfusion.evaluation.task import EvaluationData
from transfusion.matching.advice import Verdict
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.model.pair import Pair
from transfusion.running.building import in_type
from transfusion.running.live_model import LiveModel
from transfusion.runtime.engines import as_precision, require_device
from transfusion.runtime.progress import phase
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.alpha import Alpha
from transfusion.transport.finetunes import Finetune, check_named_base, open_finetune
from transfusion.transport.output import Output
from transfusion.transport.plan import Base, TransportPlan
from transfusion.transport.transport import refuse_beside_via, with_calibration

NAIVE = "naive"
Via: TypeAlias = Alignment | str | Path
"""π, or its file."""


@dataclass(frozen=True)
class Line:
    """Two sets of weights in one live module, and all models between and beyond them."""

    live: LiveModel
    start: Mapping[str, Tensor]
    """The parameters at α = 0 that change along the line, and task heads, by their names in memory."""
    end: Mapping[str, Tensor]
    """The same at α = 1."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Their canonical names, which the patterns of a per-layer α match; by default those in memory."""
    method: str | None = None
    """The method of π; None without π."""
    carries: bool = False
    """Whether α = 0 differs from B: the fine-tune's task head is there, moved by π."""

    @contextmanager
    def at(self, alpha: Alpha | float) -> Iterator[None]:
        """Within the block, the live module holds start + α·(end − start)."""
        chosen = Alpha.of(alpha)
        held = {
            name: torch.lerp(start, self.end[name], chosen.at(self.names.get(name, name)))
            for name, start in self.start.items()
        }
        with self.live.holding(held):
            yield

    def moved(self) -> list[str]:
        """Return the parameters that depend on α, by their names in memory."""
        return [name for name, start in self.start.items() if not torch.equal(start, self.end[name])]


@dataclass(frozen=True)
class Lines:
    """B as a live module of a fine-tune's class, and the lines B + α·π(τ) that begin there."""

    a: Model
    b: Model
    finetuned: Finetune
    live: LiveModel
    """B at α = 0, with the fine-tune's task head if B has none of that kind."""
    input_model: Model
    """The model whose folder says how inputs are prepared."""
    naive: Alignment
    options: Mapping[str, Any]
    ways: Mapping[str, Alignment | None] = field(default_factory=dict)
    """Every π by its label; None for τ as it is."""

    @classmethod
    def of(
        cls,
        finetuned: Finetune | Base,
        base: Base,
        onto: Base,
        *,
        data: EvaluationData | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **options: Any,
    ) -> Lines:
        """Open the three models and build the live one; ``options`` are those of `TransportPlan.move`.

        If ``data`` names a task head, the live model has it.
        """
        as_precision(dtype)
        require_device(device, dtype)
        pair = Pair.open(base, onto, vocabulary_share=0.0)
        a, b = pair.a, pair.b
        finetuned = open_finetune(finetuned)
        naive = require_one_shape(align(a, b, method=NAIVE, advice=False))
        moved = _transport(TransportPlan.between(pair, naive), finetuned, alpha=0.0, dtype=dtype, **options)
        module = in_type(moved.module(), dtype).eval()
        held = hold(module, moved)
        if data is not None and data.task_head is not None:
            live = data.live(held, dtype, device)
        else:
            live = LiveModel(module.to(device), held.family, held.architecture, {}).drawn(held, dtype=dtype)
        sizes = [model.architecture.sizes for model in (held, b)]
        tokens = b.architecture.token_axes  # the fine-tune's tokenizer knows its new ones
        grown = any(sizes[0].get(id) != sizes[1][id] for id in tokens)
        input_model = finetuned if grown and isinstance(finetuned, Model) else b
        return cls(a, b, finetuned, live, input_model, naive, options)

    @property
    def labels(self) -> tuple[str, str, str]:
        """The references of the fine-tune, A and B."""
        return self.finetuned.label, self.a.label, self.b.label

    def evaluator(self, data: EvaluationData, batch: int | None) -> Evaluator:
        """Return the evaluator of the live model."""
        return data.evaluator(self.input_model, self.live, batch=batch)

    def each(self) -> Iterator[tuple[str, Line]]:
        """Iterate over the lines of all π, with their labels; one is in memory at a time."""
        for label, alignment in self.ways.items():
            yield label, self.along(alignment)

    def along(self, alignment: Alignment | None) -> Line:
        """Return the line of one π; without π, that of τ as it is."""
        plan = TransportPlan.between(Pair(self.a, self.b), alignment or self.naive)
        first, last = (self._weights(plan, alpha) for alpha in (0.0, 1.0))
        calls = _canonical_names(self.live.module, self.live.family)
        table = self.live.architecture.tensors
        start: dict[str, Tensor] = {}
        end: dict[str, Tensor] = {}
        names: dict[str, str] = {}
        carries = False
        for name, parameter in self.live.module.named_parameters():
            call = next((call for call in calls[parameter] if call in last), None)
            if call is None:  # of a task head that is used for measuring only
                continue
            wholes = [without_part(call)[0] for call in calls[parameter]]
            names[name] = next((whole for whole in wholes if whole in table), wholes[0])
            own = torch.equal(first[call], parameter.data)
            carries = carries or not own
            if not own or not torch.equal(first[call], last[call]):
                start[name], end[name] = parameter.data if own else first[call], last[call]
        method = alignment.provenance.method if alignment is not None else None
        return Line(self.live, start, end, names, method, carries)

    def _weights(self, plan: TransportPlan, alpha: float) -> dict[str, Tensor]:
        """Return every parameter of B + α·π(τ), by all its canonical names."""
        like = next(self.live.module.parameters())
        moved = _transport(plan, self.finetuned, alpha=alpha, dtype=like.dtype, **self.options)
        calls = _canonical_names(nn.Module.to(moved.module(), like), moved.onto.family)
        return {call: parameter.data for parameter, names in calls.items() for call in names}


def line_inputs(settings: LineSettings) -> tuple[Any, ...]:
    """Return the fine-tune, the bases and the files of π, which an output must not replace."""
    return (settings.finetuned, _base(settings), settings.onto, *given_alignments(settings.via))


def _base(settings: LineSettings) -> Base:
    return named_base(settings.finetuned) if settings.base is None else settings.base


def open_lines(settings: LineSettings) -> Lines:
    """Open the models and every π, for the lines of τ as it is (``naive``) and of all π."""
    via, progress, resources = given_alignments(settings.via), settings.progress, settings.resources
    if via:
        refuse_beside_via(settings.aligning)
    aligning = with_calibration(settings, via or None).aligning
    pair = Pair.open(_base(settings), settings.onto, settings.config, progress, settings.vocabulary_share)
    tuned = open_finetune(settings.finetuned, settings.config)
    check_named_base(tuned, pair.a, pair.b, progress, trust_base=settings.trust_base)
    with phase("building the models"):
        lines = Lines.of(
            tuned,
            pair.a,
            pair.b,
            data=settings.task,
            dtype=as_precision(settings.dtype),
            device=resources.device,
            trust_base=settings.trust_base,
            new_tokens=settings.new_tokens,
        )
    if not via:
        aligning |= {"seed": settings.seed, "force_unrelated": True}  # measured, whatever it brings
        found = align(pair.a, pair.b, resources=resources, progress=progress, **aligning)
        via, advice = [found], found.provenance.advice
        if advice.get("verdict") == Verdict.DOUBT:
            stops = "; transport would stop here" if settings.chosen.follows_advice else ""
            progress.warn(f"{advice['verdict']}: {advice['text']}{stops}")
    ways = [*([None] if settings.naive else []), *map(require_one_shape, via)]
    return replace(lines, ways=dict(zip(labels_of(ways), ways, strict=True)))


def given_alignments(via: Via | Sequence[Via] | None) -> list[Via]:
    """Return the alignments, or their files, as a list."""
    return [via] if isinstance(via, Alignment | str | Path) else list(via or ())


def labels_of(ways: Sequence[Alignment | None], plain: str = NAIVE) -> list[str]:
    """Return the names of the methods; equal ones get their residual policy, then numbers."""
    names = [pi.provenance.method if pi else plain for pi in ways]
    whole = [
        f"{name} ({pi.provenance.policy.residual})" if pi and names.count(name) > 1 else name
        for name, pi in zip(names, ways, strict=True)
    ]
    return [
        f"{label} {whole[: place + 1].count(label)}" if whole.count(label) > 1 else label
        for place, label in enumerate(whole)
    ]


def _canonical_names(module: nn.Module, family: Family) -> dict[nn.Parameter, list[str]]:
    """Return the canonical names of every parameter; a tied parameter has two."""
    calls: dict[nn.Parameter, list[str]] = {}
    for naming in (Naming(family, live=True), Naming(family)):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            calls.setdefault(parameter, []).append(naming.canonical(name))
    return calls


def _transport(plan: TransportPlan, finetuned: Finetune, alpha: float, **options: Any) -> Output:
    """Prepare a transport as a whole model; an adapter is folded in."""
    return plan.move((finetuned,), Alpha(alpha), full=isinstance(finetuned, Adapter), **options)

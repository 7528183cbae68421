"""Compare models on a task and on a support set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import isdir
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from transfusion.errors import CheckpointError, SettingError
from transfusion.evaluation.scores import Interval, Score, gain, gain_interval, score_interval
from transfusion.evaluation.settings import EvaluateSettings
from transfusion.evaluation.task import EvaluationData
from transfusion.model.model import Model, Reference
from transfusion.report.result_files import ResultFiles
from transfusion.runtime.engines import as_precision
from transfusion.runtime.progress import Advance
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb
from transfusion.transport.adapters.lora_file import is_adapter, open_adapter
from transfusion.transport.output import Output
from transfusion.transport.plan import TransportPlan

_Compared = TypeVar("_Compared")


@dataclass(frozen=True)
class ModelScores:
    """The scores of one model."""

    model: str
    task: Score
    support: Score | None


@dataclass(frozen=True)
class Evaluation:
    """The scores of several models."""

    rows: tuple[ModelScores, ...]
    task: dict[str, Any]
    support: dict[str, Any] | None
    reference: ModelScores | None
    """The model that gains are relative to."""
    notes: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The result as it is written to files, with the record of its run."""

    def gains(self, row: ModelScores) -> dict[str, float | None] | None:
        """Return the gains of a model over the reference; None without a reference."""
        return self._over_reference(row, gain)

    def gain_intervals(self, row: ModelScores) -> dict[str, Interval | None] | None:
        """Return the confidence intervals of a model's gains; None for the reference, or without one."""
        return None if row is self.reference else self._over_reference(row, gain_interval)

    def _over_reference(
        self, row: ModelScores, compare: Callable[[Score, Score], _Compared | None]
    ) -> dict[str, _Compared | None] | None:
        base = self.reference
        if base is None:
            return None
        both = row.support is not None and base.support is not None
        support = compare(row.support, base.support) if both else None  # type: ignore[arg-type]
        return {"task": compare(row.task, base.task), "support": support}

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        return {
            "task": self.task,
            "support": self.support,
            "against": self.reference.model if self.reference else None,
            "models": [
                {
                    "model": row.model,
                    "task": _measured(row.task),
                    "support": _measured(row.support) if row.support else None,
                    "gain": self.gains(row),
                    "gain_interval": self.gain_intervals(row),
                }
                for row in self.rows
            ],
        }


def _measured(score: Score) -> dict[str, Any]:
    return {**score.metadata(), "interval": score_interval(score)}


@verb(EvaluateSettings)
def evaluate(settings: EvaluateSettings) -> Evaluation:
    """Measure models on a task, and on a support: what the base could do before.

    >>> found = transfusion.evaluate(
    ...     ["models/tuned", "models/lora"], data="data.safetensors", against="models/a"
    ... )
    >>> [row.model for row in found.rows], found.task["question"]
    (['models/a', 'models/tuned', 'models/lora'], 'class of every example')
    >>> found.rows[1].task.accuracy - found.rows[0].task.accuracy == found.gains(found.rows[1])["task"] / 100
    True
    """
    record, dtype, models = RunRecord("evaluate"), as_precision(settings.dtype), settings.models
    given = list(models) if isinstance(models, list | tuple) else [models]
    if not given:
        raise SettingError("no models to measure", hint="give at least one")
    asked = [one for one in (settings.task, settings.beside) if one is not None]
    against, base = settings.against, settings.base
    read = (*given, against, base, *(file for one in asked for file in one.files))
    files = ResultFiles.checked(settings.output, force=settings.force, inputs=read)
    base = Model.open(base) if base is not None and not isinstance(base, Model) else base
    opened = _labelled(_opened(given, against, base, trust_base=settings.trust_base))  # type: ignore[arg-type]
    device, batch = settings.resources.device, settings.batch
    with settings.resources.in_process(), settings.progress.bar(text="building the models") as advance:
        found = _measure(opened, asked, against is not None, batch, dtype, device, advance)
    for note in found.notes:
        settings.progress.warn(note)
    return files.finish(found, record)


def _measure(
    opened: Sequence[Model],
    asked: Sequence[EvaluationData],
    relative: bool,
    batch: int | None,
    dtype: torch.dtype,
    device: str,
    advance: Advance,
) -> Evaluation:
    """Measure open models one after the other; gains are relative to the first, if at all."""
    rows: list[ModelScores] = []
    about: list[dict[str, Any]] = []
    notes: list[str] = []
    for model in opened:
        scores: list[Score] = []
        about = []
        live = asked[0].live(model, dtype, device)
        for one in asked:
            if one.task_head != asked[0].task_head:
                live = one.live(model, dtype, device)
            evaluator = one.evaluator(model, live, batch=batch)
            about.append(evaluator.metadata())
            notes += [*evaluator.notes, *one.replaced(model, opened[0] if relative else None)]
            what, count = f"{model.label} · {evaluator.batch_source.label}", len(evaluator)
            scores.append(evaluator.measure(partial(advance, what, total=count)))
        rows.append(ModelScores(model.label, scores[0], scores[1] if len(scores) > 1 else None))
    return Evaluation(
        tuple(rows),
        about[0],
        about[1] if len(about) > 1 else None,
        rows[0] if relative else None,
        tuple(dict.fromkeys(notes)),
    )


def _opened(
    given: Sequence[Model | Reference],
    against: Model | Reference | None,
    base: Model | None,
    *,
    trust_base: bool,
) -> list[Model]:
    """Open the models to measure; the reference comes first, and once."""
    references = [*given, *([] if against is None else [against])]
    if base is not None and not any(names_adapter(one) for one in references):
        raise SettingError(
            "`base`: none of the models is an adapter",
            hint="leave it out, or give the model that gains are relative to as `against`",
        )
    opened = [open_model(one, base, trust_base=trust_base) for one in references]
    if against is None:
        return opened
    *models, reference = opened
    others = [
        model
        for one, model in zip(given, models, strict=True)
        if one is not against and not _same(model, reference)
    ]
    return [reference, *others]


def _same(one: Model, other: Model) -> bool:
    """Whether two models are one: the same module, or the same path."""
    ours, theirs = one.checkpoint, other.checkpoint
    if ours.in_memory or theirs.in_memory:
        return ours is theirs or (ours.module is not None and ours.module is theirs.module)
    return ours.root.resolve() == theirs.root.resolve()


def _labelled(models: Sequence[Model]) -> list[Model]:
    """Number models in memory that have the same label."""
    seen: Counter[str] = Counter()
    named: list[Model] = []
    for model in models:
        seen[model.label] += 1
        if model.checkpoint.in_memory and seen[model.label] > 1:
            label = f"{model.label}, {seen[model.label]}"
            model = replace(model, checkpoint=replace(model.checkpoint, label=label))
        named.append(model)
    return named


# ── opening models ───────────────────────────────────────────────────────────────────────────


def open_model(
    reference: Model | Reference, base: Model | Reference | None = None, *, trust_base: bool = False
) -> Model:
    """Open a model; fold an adapter into ``base``, or into the folder that its configuration names."""
    if isinstance(reference, Model):
        return reference
    try:
        return Model.open(reference)
    except CheckpointError:
        if not (names_adapter(reference) and isdir(reference)):
            raise
    base = named_base(reference) if base is None else base
    return fold(reference, base if isinstance(base, Model) else Model.open(base), trust_base=trust_base)


def named_base(finetuned: Model | Reference) -> str:
    """Return the base that an adapter's configuration names, if that is a folder here; refuse otherwise."""
    if not names_adapter(finetuned):
        raise SettingError("`base`: the model that was fine-tuned is not given", hint="give A as `base`")
    named = open_adapter(finetuned).config.get("base_model_name_or_path")
    if not isinstance(named, str) or not isdir(named):
        origin = f"{named}, which is no folder here" if named else "no base"
        raise CheckpointError(
            f"{finetuned}: this is an adapter, and its configuration names {origin}",
            hint="give its base as `base`: the model that it was trained on, or moved onto",
        )
    return named


def names_adapter(reference: Model | Reference) -> TypeGuard[str | Path]:
    """Whether a reference is the path of an adapter."""
    return isinstance(reference, str | Path) and is_adapter(reference)


def fold(adapter: str | Path, base: Model, *, trust_base: bool = False) -> Model:
    """Return the base with an adapter folded into its weights: in memory, with the base's tokenizer."""
    folded = TransportPlan.planned(base, base).transport(adapter, full=True, trust_base=trust_base)
    model = hold(folded.module(), folded)
    model.checkpoint.label = str(adapter)
    root = base.checkpoint.root
    model.checkpoint.auxiliary_folder = root if root.is_dir() else base.checkpoint.auxiliary_folder
    return model


def hold(module: nn.Module, output: Output) -> Model:
    """Return the model of an output's module; modules of some libraries do not keep their configuration."""
    return Model.open(module, config=None if hasattr(module, "config") else output.config)

"""Compare models on a task and on a support set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import isdir
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import RenderableType
from torch import nn

from transfusion.errors import CheckpointError, SettingError
from transfusion.evaluation.scores import (
    Interval,
    Score,
    Scores,
    gain,
    gain_interval,
    score_interval,
    task_and_support,
)
from transfusion.evaluation.settings import EvaluateSettings
from transfusion.model.model import Model, Reference
from transfusion.report import views
from transfusion.report.result_files import Result, ResultFiles, fields_of
from transfusion.runtime.engines import as_precision
from transfusion.runtime.progress import phase
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb
from transfusion.transport.adapters.lora_file import is_adapter, open_adapter
from transfusion.transport.output import Output
from transfusion.transport.plan import TransportPlan


@dataclass(frozen=True, kw_only=True)
class ModelScores(Scores):
    """The scores of one model."""

    model: str
    gain: dict[str, float | None] | None = None
    """The gains over the reference on the ``task`` and the ``support``; None without a reference."""
    gain_interval: dict[str, Interval | None] | None = None
    """Their confidence intervals; None for the reference itself."""

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        found = fields_of(self)
        for name, score in (("task", self.task), ("support", self.support)):
            if score is not None:
                found[name]["interval"] = score_interval(score)
        return found


@dataclass(frozen=True, repr=False)
class Evaluation(Result):
    """The scores of several models."""

    task: dict[str, Any]
    """The task: data, examples, question, metric."""
    support: dict[str, Any] | None
    against: str | None
    """The model that gains are relative to; it is the first."""
    rows: tuple[ModelScores, ...] = field(repr=False)

    def __rich__(self) -> RenderableType:
        return views.evaluation(self.written)

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        return {**fields_of(self), "models": [row.metadata() for row in self.rows]}


@verb(EvaluateSettings)
def evaluate(settings: EvaluateSettings) -> Evaluation:
    """Measure models on a task, and on a support: what the base could do before.

    >>> found = transfusion.evaluate(
    ...     ["models/tuned", "models/lora"], data="data.safetensors", against="models/a"
    ... )
    >>> [row.model for row in found.rows], found.task["question"]
    (['models/a', 'models/tuned', 'models/lora'], 'class of every example')
    >>> found.rows[1].task.accuracy - found.rows[0].task.accuracy == found.rows[1].gain["task"] / 100
    True
    """
    record, dtype, models = RunRecord("evaluate"), as_precision(settings.dtype), settings.models
    given: list[Any] = list(models) if isinstance(models, list | tuple) else [models]
    if not given:
        raise SettingError("no models to measure", hint="give at least one")
    asked = [one for one in (settings.task, settings.beside) if one is not None]
    read = (*given, settings.against, settings.base, *(file for one in asked for file in one.files))
    files = ResultFiles.checked(settings.output, force=settings.force, inputs=read)
    with phase("opening the models"):
        opened = _opened(given, settings)
    reference = opened[0] if settings.against is not None else None
    rows: list[ModelScores] = []
    notes: list[str] = []
    with settings.resources.in_process(), settings.progress.bar(text="building the models") as advance:
        for model in opened:
            scores: list[Score] = []
            about: list[dict[str, Any]] = []
            live = asked[0].live(model, dtype, settings.resources.device)
            for one in asked:
                if one.task_head != asked[0].task_head:
                    live = one.live(model, dtype, settings.resources.device)
                evaluator = one.evaluator(model, live, batch=settings.batch)
                about.append(evaluator.metadata())
                notes += [
                    *evaluator.notes,
                    *one.replaced(model, reference),
                ]
                what, count = f"{model.label} · {evaluator.batch_source.label}", len(evaluator)
                scores.append(evaluator.measure(partial(advance, what, total=count)))
            task, support = task_and_support(scores)
            row = ModelScores(task=task, support=support, model=model.label)
            if reference is not None:
                row = replace(row, gain=row.over(rows[0] if rows else row, gain))
            if reference is not None and rows:
                row = replace(row, gain_interval=row.over(rows[0], gain_interval))
            rows.append(row)
    notes = list(dict.fromkeys(notes))
    for note in notes:
        settings.progress.warn(note)
    against = None if reference is None else reference.label
    found = Evaluation(*task_and_support(about), against, tuple(rows), notes=tuple(notes))
    return files.finish(found, record)


def _opened(given: Sequence[Model | Reference], settings: EvaluateSettings) -> list[Model]:
    """Open the models to measure; the reference comes first, and once. Number those with the same label."""
    against, base = settings.against, settings.base
    references = [*([] if against is None else [against]), *(one for one in given if one is not against)]
    if base is not None and not any(names_adapter(one) for one in references):
        raise SettingError(
            "`base`: none of the models is an adapter",
            hint="leave it out, or give the model that gains are relative to as `against`",
        )
    base = Model.open(base) if base is not None and not isinstance(base, Model) else base
    models: list[Model] = []
    seen: Counter[str] = Counter()
    for reference in references:
        model = open_model(reference, base, trust_base=settings.trust_base)
        if models and against is not None and _same(model, models[0]):
            continue
        seen[model.label] += 1
        if model.checkpoint.in_memory and seen[model.label] > 1:
            label = f"{model.label}, {seen[model.label]}"
            model = replace(model, checkpoint=replace(model.checkpoint, label=label))
        models.append(model)
    return models


def _same(one: Model, other: Model) -> bool:
    """Whether two models are one: the same module, or the same path."""
    ours, theirs = one.checkpoint, other.checkpoint
    if ours.in_memory or theirs.in_memory:
        return ours is theirs or (ours.module is not None and ours.module is theirs.module)
    return ours.root.resolve() == theirs.root.resolve()


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
    folded = TransportPlan.planned(base, base).move(
        (open_adapter(adapter),), full=True, trust_base=trust_base
    )
    model = hold(folded.module(), folded)
    model.checkpoint.label = str(adapter)
    root = base.checkpoint.root
    model.checkpoint.auxiliary_folder = root if root.is_dir() else base.checkpoint.auxiliary_folder
    return model


def hold(module: nn.Module, output: Output) -> Model:
    """Return the model of an output's module; modules of some libraries do not keep their configuration."""
    return Model.open(module, config=None if hasattr(module, "config") else output.config)

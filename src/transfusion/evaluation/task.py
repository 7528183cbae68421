"""Tasks: examples with the user's settings for them, and the evaluator of a model on them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import expanduser, isdir, isfile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.architecture.naming import Naming, without_part
from transfusion.data.dataset import Dataset
from transfusion.data.examples import TASKS, Columns, Examples
from transfusion.data.read_examples import read_examples
from transfusion.errors import ArchitectureError, DataError, MismatchError, SettingError, listing
from transfusion.evaluation.classes import Classes, class_names, class_numbers
from transfusion.evaluation.evaluator import MOST, Evaluator, batch_size_for
from transfusion.evaluation.inputs import (
    IGNORED,
    Batch,
    Batches,
    ImageProcessor,
    TextTokenizer,
    tensor_batches,
    text_batches,
)
from transfusion.evaluation.scorers import (
    HEAD,
    IMAGE,
    TEXT,
    LinearTaskHeadScorer,
    PredictionKind,
    Scorer,
    ZeroShotScorer,
    compares_images_with_texts,
    logits_of,
    name_of,
    prediction_kind,
    read_linear_task_head,
)
from transfusion.evaluation.scores import ACCURACY, F1, LOSS, METRICS, PERPLEXITY
from transfusion.files.checkpoint import CONFIGS
from transfusion.files.references import weights_in
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.probed_model import ProbedModel, vocabulary
from transfusion.runtime.engines import require_device

TENSORS = (".safetensors", ".npz")


@dataclass(frozen=True)
class EvaluationData:
    """A reference to examples, and the settings that the user gave for them."""

    reference: str | Path | Dataset | Examples
    """A folder, a file or a hub id; or examples in memory."""
    split: str | None = None
    text: tuple[str, ...] = ()
    """The text columns: one, or two for pairs."""
    image: str | None = None
    label: str | None = None
    classes: str | Path | Classes | None = None
    """A file of class names and templates, or the name of classes that ship with the package."""
    templates: tuple[str, ...] = ()
    """Templates that replace those of the file."""
    limit: int | None = None
    task_head: str | Path | Model | None = None
    """A fine-tuned model whose task head is used, or a file with a linear one."""
    metric: str | None = None
    """The main metric, if not the usual one."""
    truncate: bool = False
    """Whether texts that are too long for the model are truncated."""

    @property
    def files(self) -> list[str | Path]:
        """The references that may be files on this machine: examples, class names and task head."""
        return [one for one in (self.reference, self.classes, self.task_head) if isinstance(one, str | Path)]

    @classmethod
    def of(cls, given: str | Path | Dataset | Examples | EvaluationData) -> EvaluationData:
        """Return ``given`` if it has settings already; otherwise data without settings."""
        return given if isinstance(given, EvaluationData) else cls(given)

    def live(self, model: Model, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LiveModel:
        """Build the live model to measure, with the task head that was asked for."""
        require_device(device, dtype)
        if (donor := self.task_head_donor()) is None:
            return LiveModel.of(model, dtype, device=device)
        live = with_task_head_of(donor, model, dtype)
        live.module.to(device)
        return live

    def replaced(self, model: Model, base: Model | None) -> list[str]:
        """Return a note if ``task_head`` replaces a task head that the model has and the base has not."""
        donor = self.task_head_donor()
        if donor is None or not all(has_own_task_head(model, one) for one in (donor, base) if one):
            return []
        return [f"{model.label} has a task head of its own; it was replaced by that of {donor.label}"]

    def task_head_donor(self) -> Model | None:
        """Return the model whose task head is used."""
        if self.task_head is None or isinstance(self.task_head, Model):
            return self.task_head
        return None if read_linear_task_head(self.task_head) else open_task_head_donor(self.task_head)

    def evaluator(self, model: Model, live: LiveModel, *, batch: int | None = None) -> Evaluator:
        """Return the evaluator of a live model; without ``batch``, with a batch size that fits.

        With a ``task_head`` the live model has to be the one that `live` builds.
        """
        for name, value in (("limit", self.limit), ("batch", batch)):
            if value is not None and value < 1:
                none = "no examples" if name == "limit" else "no examples at a time"
                raise SettingError(f"{name} = {value}: {none}", hint="give 1 or more")
        if self.metric is not None and self.metric not in METRICS:
            raise SettingError(
                f"metric = {self.metric!r} is not a choice", hint=f"choose one of {', '.join(METRICS)}"
            )
        found = self._read()
        notes: tuple[str, ...] = ()
        if isinstance(found, Dataset):
            source, scorer = tensor_batches(found), tensor_scorer(live, found)
            metrics, batch = self._metrics(scorer, None), batch or MOST
        else:
            task = Task(self, model, live, found)
            source, scorer, notes = task.of_texts() if found.images is None else task.of_images()
            metrics = self._metrics(scorer, found.task)
            batch = 1 if task.one_at_a_time(scorer) else batch
            batch = batch or batch_size_for(scorer, task.heaviest(source), len(source))
        return Evaluator(source, scorer, batch, metrics, notes)

    def _read(self) -> Dataset | Examples:
        given = self.reference
        if isinstance(given, Dataset | Examples):
            return given.limited(self.limit)
        if Path(given).suffix in TENSORS and not isdir(given):
            return Dataset.load(given).limited(self.limit)
        columns = Columns(self.text, self.image, self.label)
        return read_examples(given, self.split, columns).limited(self.limit)

    def _metrics(self, scorer: Scorer, known: str | None) -> tuple[str, ...]:
        """Return the metrics of a known task, the one that was asked for first; refuse one without sense."""
        tokens = scorer.classes is None
        usual = (LOSS,) if tokens else TASKS[known].metrics if known else (ACCURACY,)
        chosen = self.metric or usual[0]
        if (chosen == PERPLEXITY and not tokens) or (chosen == F1 and scorer.classes != 2):
            raise DataError(
                f"{scorer.label}: no {chosen} of the {scorer.question}",
                hint="perplexity is of next tokens, and f1 of two classes",
            )
        return tuple(dict.fromkeys((chosen, *usual)))


DataReference: TypeAlias = str | Path | Dataset | Examples | EvaluationData
"""Examples: a path, a hub id, examples in memory, or any of these with settings."""


# ── tensors ──────────────────────────────────────────────────────────────────────────────────


def tensor_scorer(live: LiveModel, data: Dataset) -> Scorer:
    """Return the scorer of the model's task head; refuse examples that the model cannot be measured on."""
    takes = set(inspect.signature(live.module.forward).parameters)
    data.require_for(
        name_of(live),
        takes=takes if live.family.library == "transformers" else set(live.inputs),
        needs=next(iter(live.inputs)),
        image=tuple(live.inputs["pixel_values"].shape[1:]) if "image" in live.family.inputs else None,
        vocabulary=vocabulary(live.module),
    )
    logits = logits_of(live, data.label, data.limited(1).inputs)
    shifted = data.labels is not None and "decoder_input_ids" in data.inputs  # of an encoder-decoder
    kind = prediction_kind(live, logits, shifted=shifted)
    if data.labels is not None:
        _require_labels(live, data, data.labels, logits)
    elif kind is not PredictionKind.NEXT:
        raise DataError(f"{data.label}: no labels in it", hint="add a tensor 'labels', one per example")
    classes = None if kind is PredictionKind.NEXT else logits.shape[-1]
    return Scorer(live, data.label, kind, classes)


def _require_labels(live: LiveModel, data: Dataset, labels: Tensor, logits: Tensor) -> None:
    wanted = tuple(logits.shape[1:-1])
    if tuple(labels.shape[1:]) != wanted:
        raise DataError(
            f"{data.label}: labels have shape {tuple(labels.shape)}, and {name_of(live)} gives logits"
            f" for {(len(data), *wanted)}",
            hint="give one label per example" if not wanted else "give one label per position",
        )
    counting = labels[labels != IGNORED] if wanted else labels
    classes = logits.shape[-1]
    wrong = counting[(counting < 0) | (counting >= classes)]
    if len(wrong):
        raise DataError(
            f"{data.label}: label {int(wrong[0])} is none of the {classes} classes, counted from 0, of"
            f" {name_of(live)}",
            hint="the labels must be those that the model was trained with",
        )


# ── images and texts ─────────────────────────────────────────────────────────────────────────

Prepared: TypeAlias = tuple[Batches, Scorer, tuple[str, ...]]
"""Batches, their scorer, and notes."""


@dataclass(frozen=True)
class Task:
    """A model and raw examples, which are prepared for it."""

    data: EvaluationData
    model: Model
    live: LiveModel
    examples: Examples

    @cached_property
    def classes(self) -> Classes | None:
        given = self.data.classes
        return (
            given if given is None or isinstance(given, Classes) else Classes.of(given, self.data.templates)
        )

    @cached_property
    def donor(self) -> Model | None:
        return self.data.task_head_donor()

    def of_images(self) -> Prepared:
        """Prepare images for the task head that was asked for, zero-shot, or the model's own task head."""
        self._require_kind(IMAGE, "image", "patches")
        processor = ImageProcessor.of(ProbedModel(self.model, self.live.module))
        images = self.examples.images or ()
        scorer = self._linear(IMAGE)
        if scorer is None and compares_images_with_texts(self.live):
            scorer = self._zero_shot()
        scorer = scorer or self._own_task_head(processor.inputs(images[:1]))
        source = Batches(self.examples.label, images, processor.inputs, self._targets(scorer))
        return source, scorer, processor.notes

    def of_texts(self) -> Prepared:
        """Prepare texts for the task head that was asked for, or the model's own."""
        self._require_kind(TEXT, "tokens")
        texts, label = self.examples.texts or (), self.examples.label
        scorer = self._linear(TEXT)
        if scorer is None and compares_images_with_texts(self.live):
            raise ArchitectureError(
                f"{label}: texts, and {name_of(self.live)} has no task head to classify them",
                hint='give a linear task head on its text features: `head="FILE.safetensors"`',
            )
        tokenizer = self._tokenizer()
        tokens, cut = tokenizer.read(texts, label, truncate=self.data.truncate)
        source = text_batches(label, tokens, tokenizer, self.live.module)
        scorer = scorer or self._own_task_head(self.heaviest(source).inputs)
        notes = [f"{label}: {cut} of {len(texts)} texts were truncated"] if cut else []
        if self.one_at_a_time(scorer):
            notes.append(f"{self.model.label}: one text at a time: its configuration has no pad_token_id")
        if scorer.classes is not None:
            source = replace(source, targets=self._targets(scorer))
        return source, scorer, tuple(notes)

    def _require_kind(self, kind: str, *read: str) -> None:
        inputs = self.live.family.inputs
        if not set(read) & set(inputs):
            raise DataError(
                f"{self.examples.label}: {kind}s, and {name_of(self.live)} reads {', '.join(inputs)}",
                hint="give inputs of a kind that the model reads",
            )

    def heaviest(self, source: Batches) -> Batch:
        """Return the longest text, or any image."""
        index = 0
        if self.examples.texts is not None:
            index = max(range(len(source)), key=lambda one: len(source.examples[one]["input_ids"]))
        return next(source.chosen([index]).batches(1))

    def one_at_a_time(self, scorer: Scorer) -> bool:
        """Whether texts go one at a time: without a padding token the library cannot find their ends."""
        config: Any = getattr(self.live.module, "config", None)
        texts = self.examples.texts is not None and hasattr(config, "pad_token_id")
        return texts and scorer.question is PredictionKind.CLASS and config.pad_token_id is None

    def _tokenizer(self) -> TextTokenizer:
        models = [self.model, *([self.donor] if self.donor else [])]
        return TextTokenizer.of(*(ProbedModel(model, self.live.module) for model in models))

    # ── scorers ──────────────────────────────────────────────────────────────────────────────

    def _linear(self, kind: str) -> Scorer | None:
        """Return the scorer of a linear task head, if one was asked for."""
        head = read_linear_task_head(self.data.task_head)
        if head is None:
            return None
        question = f"class of every {kind}, by a linear head on its features"
        return LinearTaskHeadScorer(self.live, self.examples.label, question, len(head.weight), kind, head)

    def _zero_shot(self) -> Scorer:
        classes, label = self.classes, self.examples.label
        if classes is None:
            raise DataError(
                f"{label}: {name_of(self.live)} has no classes of its own",
                hint="give a file of class names and templates with `classes` (`support_classes` for the"
                " support), or a linear task head with `head`",
            )
        classes.require_templates()
        tokenizer, count = self._tokenizer(), len(classes.templates)
        prompts, _ = tokenizer.read(
            classes.prompts(), classes.label, truncate=self.data.truncate, what="prompt"
        )
        question = f"zero-shot class of every image, {count} prompt{'s' * (count != 1)} a class"
        return ZeroShotScorer(self.live, label, question, len(classes.names), tokenizer, prompts)

    def _own_task_head(self, inputs: Any) -> Scorer:
        """Return the scorer of the model's own task head: classes, or next tokens."""
        label, name = self.examples.label, name_of(self.live)
        try:
            logits = logits_of(self.live, label, inputs)
        except ArchitectureError as error:
            hint = "give a model with a task head, or that of a fine-tuned model with `head`"
            if self.classes is not None:
                hint = (
                    "class names are for models such as CLIP that read them; this one needs a task head of"
                    " its own, or that of a fine-tuned model with `head`"
                )
            raise ArchitectureError(
                f"{(self.donor or self.model).label}: {name} has no task head for {label}",
                hint="give a fine-tuned model with a task head" if self.donor else hint,
            ) from error
        kind = prediction_kind(self.live, logits)
        if kind is PredictionKind.POSITION or logits.shape[-1] == 1:
            raise ArchitectureError(
                f"{self.model.label}: {name} gives scores of shape {tuple(logits.shape)}, neither classes of"
                " an example nor next tokens",
                hint="give a .safetensors with inputs and labels, or another model",
            )
        classes = None if kind is PredictionKind.NEXT else logits.shape[-1]
        return Scorer(self.live, label, kind, classes)

    def _targets(self, scorer: Scorer) -> Tensor:
        """Return the number of every example's class."""
        count = scorer.classes or 0
        own = self._own_names(count) if scorer.question is PredictionKind.CLASS else ()
        owner = self.model.label
        if isinstance(scorer, ZeroShotScorer) and self.classes is not None:
            owner = self.classes.label
        return class_numbers(self.examples, class_names(own, self.classes, count, owner), count, owner)

    def _own_names(self, count: int) -> tuple[str, ...]:
        """Return the model's own class names."""
        config: Any = getattr(self.live.module, "config", None)
        info = getattr(config, "id2label", None)
        if isinstance(info, dict) and len(info) == count:
            return tuple(str(info[place]) for place in sorted(info))
        about = (self.model.checkpoint.config or {}).get("label_names") or []
        return tuple(map(str, about)) if len(about) == count else ()


# ── task heads of other models ───────────────────────────────────────────────────────────────
# A task head is the part of a model that turns features into classes; it is no attention head.


def open_task_head_donor(given: str | Path) -> Model:
    """Open the model whose task head is used; refuse a file that is neither a model nor a task head."""
    path = Path(expanduser(given))
    try:
        return Model.open(given)
    except ArchitectureError as error:
        if not isfile(path) or any((path.parent / name).exists() for name in CONFIGS):
            raise
        raise DataError(
            f"{path}: neither a linear task head nor a model: {listing(weights_in(path), 4)}", hint=HEAD
        ) from error


def has_own_task_head(model: Model, other: Model) -> bool:
    """Whether a model has all tensors of the other's task head, with other values."""
    heads = model.architecture.task_heads
    if not heads or any(name not in model.names for name in other.architecture.task_heads):
        return False
    return any(
        name not in other.names or not torch.equal(model.read(name), other.read(name)) for name in heads
    )


def with_task_head_of(tuned: Model, model: Model, dtype: torch.dtype) -> LiveModel:
    """Build the fine-tuned model with the encoder of another model.

    The fine-tune keeps its task head, as its table defines it, and the tensors that the other model lacks.
    """
    if tuned.family.name != model.family.name:
        raise MismatchError(
            f"{model.label} is a {model.family.name} and {tuned.label}, whose task head was asked for, a"
            f" {tuned.family.name}",
            hint="give a fine-tune of the same architecture",
        )
    shared = [
        name
        for name in tuned.architecture.tensors
        if name in model.names and name not in tuned.architecture.task_heads
    ]
    lacking = [name for name in tuned.architecture.backbone if name not in model.names]
    if lacking:
        raise MismatchError(
            f"{model.label} has no {listing(lacking, 4)}, which is not in the task head of {tuned.label}",
            hint="give a fine-tune of the same architecture and depth",
        )
    for name in shared:
        one, other = model.info(name).shape, tuned.info(name).shape
        if one != other:
            raise MismatchError(
                f"{name} has shape {one} in {model.label} and {other} in {tuned.label}",
                hint="give a fine-tune of the same architecture and size",
            )
    if not tuned.architecture.task_heads:
        raise ArchitectureError(f"{tuned.label}: it has no task head", hint="give a classifier")
    module, naming = build(tuned, dtype), Naming(tuned.family, live=True)
    wanted = set(shared)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        ours, part = without_part(naming.canonical(name))
        if ours not in wanted:
            continue
        if part is not None:
            raise ArchitectureError(
                f"{type(module).__name__} keeps {ours} in parts, so no other encoder can be put into it",
                hint="save B with the fine-tune's class and its task head instead",
            )
        parameter.data = model.read(ours).to(dtype)
    return LiveModel(module, tuned.family, tuned.architecture, {}).drawn(tuned, dtype=dtype)

"""The settings of `evaluate`, `sweep`, `fewshot` and `barrier`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion.errors import SettingError
from transfusion.matching.settings import PRECISE, MatchingSettings
from transfusion.runtime.progress import BARS, SILENT, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.settings import MODELS, RESOURCES, A, B, argument, setting
from transfusion.transport.settings import FATES, numbers

if TYPE_CHECKING:
    import torch

    from transfusion.evaluation.barrier import Shortcuts
    from transfusion.evaluation.line import Via
    from transfusion.evaluation.task import DataReference, EvaluationData
    from transfusion.model.model import Model, Reference
    from transfusion.report.result_files import Paths

EXAMPLES, SUPPORT, TEST, LEARNING = "Examples", "Support: what the base could do before", "Test", "Learning"
METRICS = ("accuracy", "f1", "matthews", "loss", "perplexity")
SHORTCUTS = ("interpolated", "plain", "rounded")
ALPHAS = (0.01, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.25, 1.5, 1.75, 2.0)
"""The default values: the range of the paper, and 1, which adds all of τ."""
MOST = 1000
"""The largest count in first:last:count."""
EPOCHS, RATE, START = 40, 0.05, 1.0
"""The passes over all shots, the learning rate of Adam, and the initial coefficients."""


def columns(text: str) -> tuple[str, ...]:
    """Return the names of one column, or of two with a comma between them."""
    return tuple(one.strip() for one in text.split(","))


def alphas(text: str) -> list[float]:
    """Return first:last:count in equal steps, or numbers with commas between them."""
    if ":" not in text:
        return list(numbers(text))
    try:
        first, last, count = text.split(":")
        low, high, steps = float(first), float(last), int(count)
        if not 2 <= steps <= MOST:
            raise ValueError
        return [round(low + (high - low) * step / (steps - 1), 6) for step in range(steps)]
    except ValueError as error:
        raise SettingError(
            f"{text!r} is not first:last:count", hint=f"count from 2 to {MOST}, or give values with commas"
        ) from error


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The examples that models are measured on."""

    data: DataReference = argument(
        "The task: a folder of images, one sub-folder a class; a .csv, .tsv, .jsonl, .parquet or .txt; a"
        " folder of datasets; a .safetensors or .npz; or a hub id (org/name:config@revision)."
    )
    classes: str | Path | None = setting(
        None,
        "Class names and templates: a file of JSON, or eurosat, dtd, gtsrb, svhn, imagenet-r.",
        panel=EXAMPLES,
    )
    template: Sequence[str] = setting(
        (),
        'Instead of the file\'s templates, such as "a photo of a {}."; may be given several times.',
        many=True,
        panel=EXAMPLES,
    )
    task_head: str | Path | Model | None = setting(
        None,
        "The task head (classifier) to measure with: that of a fine-tuned model, or a linear one in a"
        " .safetensors (weight, bias).",
        flag="--head",
        panel=EXAMPLES,
    )
    split: str | None = setting(None, "The split of a dataset.", panel=EXAMPLES)
    text: tuple[str, ...] = setting(
        (), "The column of texts; two for pairs: one,other.", parse=columns, shown="by name", panel=EXAMPLES
    )
    image: str | None = setting(None, "The column of images.", shown="by name", panel=EXAMPLES)
    label: str | None = setting(None, "The column of classes.", shown="by name", panel=EXAMPLES)
    limit: int | None = setting(
        None,
        "The number of examples: the first ones; of images, as many of every class.",
        kind=int,
        least=1,
        shown="all",
        panel=EXAMPLES,
    )
    truncate: bool = setting(False, "Cut texts that are too long for the model.", panel=EXAMPLES)
    batch: int | None = setting(
        None, "The number of examples at a time.", kind=int, least=1, shown="what fits", panel=RESOURCES
    )
    dtype: torch.dtype | str = setting(
        "float32", f"The type to compute in: {', '.join(PRECISE)}.", choices=PRECISE, shown=True, panel=MODELS
    )
    force: bool = setting(False, "Replace existing files.")
    architecture: str | Path | None = setting(
        None, "A file with a table of your own.", kind=Path, panel=MODELS
    )
    resources: Resources = setting(LOCAL, "Threads and device.", kind=Resources, only=("device", "jobs"))
    progress: Progress = setting(SILENT, "Follows the run.", shown=BARS, typed=False)

    @property
    def task(self) -> EvaluationData:
        """The examples, with what was said of them."""
        from transfusion.evaluation.task import EvaluationData

        given = EvaluationData.of(self.data)
        names = ("classes", "task_head", "split", "text", "image", "label", "limit", "truncate", "metric")
        said: dict[str, Any] = {name: value for name in names if (value := getattr(self, name, None))}
        if self.template:
            said["templates"] = tuple(self.template)
        return replace(given, **said)


@dataclass(frozen=True, kw_only=True)
class MetricSettings(DataSettings):
    """Examples, and the metric of the task."""

    metric: str | None = setting(
        None,
        f"The metric of the task: {', '.join(METRICS)}.",
        choices=METRICS,
        metavar="NAME",
        shown="accuracy, the task's, or loss",
        panel=EXAMPLES,
    )


@dataclass(frozen=True, kw_only=True)
class SupportSettings(MetricSettings):
    """A task, and a support beside it: what the base could do before."""

    support: DataReference | None = setting(
        None, "Examples of what the base could do before, as --data.", panel=SUPPORT
    )
    support_classes: str | Path | None = setting(None, "As --classes, of the support.", panel=SUPPORT)
    support_split: str | None = setting(None, "As --split, of the support.", panel=SUPPORT)
    support_head: str | Path | Model | None = setting(None, "As --head, of the support.", panel=SUPPORT)

    @property
    def beside(self) -> EvaluationData | None:
        """The support; templates, limit and truncation are those of the task, unless it says others."""
        from transfusion.evaluation.task import EvaluationData

        own = {"classes": self.support_classes, "split": self.support_split, "task_head": self.support_head}
        own = {name: value for name, value in own.items() if value is not None}
        if self.support is None:
            if own:
                raise SettingError(
                    f"{', '.join(f'`support_{name}`' for name in own)}: there is no support",
                    hint="give `support`, or leave it out",
                )
            return None
        if isinstance(self.support, EvaluationData):
            return replace(self.support, **own)  # type: ignore[arg-type]
        task = self.task
        common: dict[str, Any] = {name: getattr(task, name) for name in ("templates", "limit", "truncate")}
        return EvaluationData(self.support, **own, **common)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class FigureSettings:
    """The files of a result that has a figure."""

    output: Paths = setting(
        None,
        "A file to write: a figure (.png, .svg, .pdf) or .json; may be given several times.",
        kind=Path,
        flag="--output,-o",
        many=True,
    )


@dataclass(frozen=True)
class EvaluateSettings(SupportSettings):
    """The settings of `evaluate`."""

    models: Model | Reference | Sequence[Model | Reference] = argument(
        "Models or PEFT adapters: folders, files or hub ids.", many=True
    )
    _: KW_ONLY
    against: Model | Reference | None = setting(None, "B: the model that gains are relative to.", metavar="B")
    base: Model | Reference | None = setting(
        None,
        "The base of the adapters, which are folded into it in memory: A for an adapter trained on A, B for"
        " one that was moved onto B.",
        metavar="BASE",
        shown="as their configuration says",
    )
    output: str | Path | None = setting(
        None, "A .json file to write the result to.", kind=Path, flag="--output,-o"
    )
    trust_base: bool = setting(False, "Do not check the base of a transported adapter.", panel=MODELS)


@dataclass(frozen=True)
class LineSettings(MatchingSettings, MetricSettings):
    """B + α·π(τ) in memory: what `sweep` and `fewshot` have in common."""

    finetuned: Model | Reference = argument(
        "The fine-tune of A: a model, or a PEFT adapter.", metavar="FINETUNED"
    )
    _: KW_ONLY
    via: Via | Sequence[Via] | None = setting(
        None, "A file of π; give several to compare them. Without it, align first.", metavar="PI", many=True
    )
    base: Model | Reference | None = setting(
        None,
        "A: the base that was fine-tuned.",
        metavar="A",
        shown="of an adapter, as its configuration says",
    )
    onto: Model | Reference = argument("B: the new release to move it onto.", metavar="B")
    naive: bool = setting(True, "Also measure B + α·τ, with nothing moved.", flag="--naive/--no-naive")
    new_tokens: str = setting(
        "refuse", "Tokens that the fine-tune added.", choices=FATES, shown=True, panel=MODELS
    )
    trust_base: bool = setting(False, "Do not check that the fine-tune descends from A.", panel=MODELS)
    resources: Resources = setting(LOCAL, "Threads and device.", kind=Resources, only=("device", "jobs"))


@dataclass(frozen=True)
class SweepSettings(FigureSettings, LineSettings, SupportSettings):
    """The settings of `sweep`."""

    _: KW_ONLY
    alphas: Sequence[float] = setting(
        ALPHAS,
        "The values of α: first:last:count, or numbers with commas between them.",
        parse=alphas,
        shown="12 values from 0.01 to 2, 1 among them",
    )


@dataclass(frozen=True)
class FewShotSettings(LineSettings):
    """The settings of `fewshot`."""

    _: KW_ONLY
    via: Via | None = setting(None, "The file of π; without it, align first.", metavar="PI")
    output: str | Path | None = setting(
        None, "The file of α for π(τ), for 'transport --alpha'.", kind=Path, flag="--output,-o"
    )
    shots: int = setting(
        10, "The number of examples of every class; of texts, of all texts.", least=1, shown=True
    )
    naive_output: str | Path | None = setting(None, "The file of α for τ as it is.", kind=Path)
    results: Paths = setting(
        None,
        "A file for all that was measured: a figure (.png, .svg, .pdf) or .json; may be given several times.",
        kind=Path,
        many=True,
    )
    test: DataReference | None = setting(
        None,
        "Examples to measure on; those that were drawn for training are left out.",
        shown="the examples that were not drawn",
        panel=TEST,
    )
    test_split: str | None = setting(None, "As --split, of the test.", shown="as --split", panel=TEST)
    epochs: int = setting(
        EPOCHS, "The number of passes over the examples.", least=1, shown=True, panel=LEARNING
    )
    rate: float = setting(RATE, "The step size of Adam.", shown=True, panel=LEARNING)
    start: float = setting(
        START, "The first value of every coefficient.", least=0, shown=True, panel=LEARNING
    )

    @property
    def tested(self) -> EvaluationData:
        """The examples to measure on, read as those of the task."""
        from transfusion.evaluation.task import EvaluationData

        if isinstance(self.test, EvaluationData):
            return self.test
        task = self.task
        return replace(task, reference=self.test or task.reference, split=self.test_split or task.split)


@dataclass(frozen=True)
class BarrierSettings(FigureSettings, DataSettings):
    """The settings of `barrier`."""

    a: Model | Reference = argument(A, metavar="A")
    b: Model | Reference = argument(B, metavar="B")
    _: KW_ONLY
    via: Via | Sequence[Via] | None = setting(
        None, "A file of π; give several to compare them.", metavar="PI", many=True
    )
    vanilla: bool = setting(True, "Also measure between A and B as they are.", flag="--vanilla/--no-vanilla")
    points: int = setting(11, "The number of values of α, ends included.", least=2, most=10_001, shown=True)
    shortcuts: Shortcuts | str | None = setting(
        None,
        "What residual connections carry between π(A) and B, where the stream's maps differ:"
        f" {', '.join(SHORTCUTS)}.",
        choices=SHORTCUTS,
        shown="interpolated, or as π asks",
    )
    resources: Resources = setting(LOCAL, "Threads and device.", kind=Resources, only=("device", "jobs"))

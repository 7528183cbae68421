"""The options about examples: the task, and the support."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli.option_checks import given, one_of

if TYPE_CHECKING:
    from transfusion.evaluation.task import EvaluationData

METRICS = ("accuracy", "f1", "matthews", "loss", "perplexity")
_EXAMPLES = "Examples"
_SUPPORT = "Support: what the base could do before"

TaskData = Annotated[
    str,
    typer.Option(
        "--data",
        show_default=False,
        help="The task: a folder of images, one sub-folder a class; a .csv, .tsv, .jsonl, .parquet or .txt; a"
        " folder of datasets; a .safetensors or .npz; or a hub id (org/name:config@revision).",
    ),
]
SupportData = Annotated[
    str | None,
    typer.Option(
        "--support",
        show_default=False,
        help="Examples of what the base could do before, as --data.",
        rich_help_panel=_SUPPORT,
    ),
]
ClassesOption = Annotated[
    str | None,
    typer.Option(
        "--classes",
        show_default=False,
        help="Class names and templates: a file of JSON, or eurosat, dtd, gtsrb, svhn, imagenet-r.",
        rich_help_panel=_EXAMPLES,
    ),
]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        show_default=False,
        help='Instead of the file\'s templates, such as "a photo of a {}."; may be given several times.',
        rich_help_panel=_EXAMPLES,
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        show_default=False,
        help="The task head (classifier) to measure with: that of a fine-tuned model, or a linear one in a"
        " .safetensors (weight, bias).",
        rich_help_panel=_EXAMPLES,
    ),
]
SplitOption = Annotated[
    str | None,
    typer.Option("--split", show_default=False, help="The split of a dataset.", rich_help_panel=_EXAMPLES),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        show_default="by name",
        help="The column of texts; two for pairs: one,other.",
        rich_help_panel=_EXAMPLES,
    ),
]
ImageOption = Annotated[
    str | None,
    typer.Option("--image", show_default="by name", help="The column of images.", rich_help_panel=_EXAMPLES),
]
LabelOption = Annotated[
    str | None,
    typer.Option("--label", show_default="by name", help="The column of classes.", rich_help_panel=_EXAMPLES),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        show_default="accuracy, the task's, or loss",
        help=f"The metric of the task: {', '.join(METRICS)}.",
        callback=one_of(METRICS),
        rich_help_panel=_EXAMPLES,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="all",
        help="The number of examples: the first ones; of images, as many of every class.",
        rich_help_panel=_EXAMPLES,
    ),
]
Truncate = Annotated[
    bool,
    typer.Option("--truncate", help="Cut texts that are too long for the model.", rich_help_panel=_EXAMPLES),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        show_default="what fits",
        help="The number of examples at a time.",
        rich_help_panel="Resources",
    ),
]
SupportClasses = Annotated[
    str | None,
    typer.Option(show_default=False, help="As --classes, of the support.", rich_help_panel=_SUPPORT),
]
SupportSplit = Annotated[
    str | None,
    typer.Option(show_default=False, help="As --split, of the support.", rich_help_panel=_SUPPORT),
]
SupportHead = Annotated[
    str | None, typer.Option(show_default=False, help="As --head, of the support.", rich_help_panel=_SUPPORT)
]
Naive = Annotated[bool, typer.Option("--naive/--no-naive", help="Also measure B + α·τ, with nothing moved.")]


def examples(
    data: TaskData,
    classes: ClassesOption = None,
    template: Templates = None,
    task_head: HeadOption = None,
    split: SplitOption = None,
    text: TextOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    limit: Limit = None,
    truncate: Truncate = False,
) -> EvaluationData:
    """Return the examples that the options describe."""
    from transfusion.evaluation.task import EvaluationData

    return EvaluationData(
        data,
        split=split,
        text=tuple(one.strip() for one in text.split(",")) if text else (),
        image=image,
        label=label,
        classes=classes,
        templates=tuple(template or ()),
        limit=limit,
        task_head=task_head,
        truncate=truncate,
    )


@given(asked=examples)
def task(asked: EvaluationData, metric: MetricOption = None) -> EvaluationData:
    """Return the task: examples and metric."""
    return replace(asked, metric=metric)


@dataclass(frozen=True)
class Support:
    """The options of the support; everything else is as in the task."""

    reference: str | None
    split: str | None
    classes: str | None
    task_head: str | None

    def beside(self, task: EvaluationData) -> EvaluationData | None:
        """Return the support beside a task, if there is one."""
        from transfusion.evaluation.task import EvaluationData

        if self.reference is None:
            return None
        return EvaluationData(
            self.reference,
            split=self.split,
            classes=self.classes,
            templates=task.templates,
            limit=task.limit,
            task_head=self.task_head,
            truncate=task.truncate,
        )


def support(
    support: SupportData = None,
    support_classes: SupportClasses = None,
    support_split: SupportSplit = None,
    support_head: SupportHead = None,
) -> Support:
    """Return the options of the support."""
    if support is None and (support_classes or support_split or support_head):
        raise typer.BadParameter("--support-… goes with --support")
    return Support(support, support_split, support_classes, support_head)

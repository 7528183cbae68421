"""The flags about examples: what a model is asked, and what it could do before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli.grouped_options import given
from transfusion.cli.option_checks import one_of
from transfusion.cli.options import PRECISE

if TYPE_CHECKING:
    from transfusion.evaluation.evaluation_data import EvaluationData

METRICS = ("accuracy", "f1", "matthews", "loss", "perplexity")
_EXAMPLES = "The examples"
_SUPPORT = "The support"

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
        "--support", show_default=False, help="What the base could do before.", rich_help_panel=_SUPPORT
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
        help="Borrow a head: of a fine-tuned model, or a linear one in a .safetensors (weight, bias).",
        rich_help_panel=_EXAMPLES,
    ),
]
SplitOption = Annotated[
    str | None, typer.Option("--split", show_default=False, help="Which split.", rich_help_panel=_EXAMPLES)
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
        help=f"The headline of the task: {', '.join(METRICS)}.",
        callback=one_of(METRICS),
        rich_help_panel=_EXAMPLES,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="all",
        help="Only so many examples: the first, of images as many of every class.",
        rich_help_panel=_EXAMPLES,
    ),
]
Truncate = Annotated[
    bool,
    typer.Option(
        "--truncate", help="Cut texts that are longer than the model takes.", rich_help_panel=_EXAMPLES
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, show_default="what fits", help="How many examples at a time."),
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
Precision = Annotated[
    str, typer.Option("--dtype", help=f"Compute in {' or '.join(PRECISE)}.", callback=one_of(PRECISE))
]


def examples(
    data: TaskData,
    classes: ClassesOption = None,
    template: Templates = None,
    head: HeadOption = None,
    split: SplitOption = None,
    text: TextOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    limit: Limit = None,
    truncate: Truncate = False,
) -> EvaluationData:
    """Examples as the flags describe them."""
    from transfusion.evaluation.evaluation_data import EvaluationData

    return EvaluationData(
        data,
        split=split,
        text=tuple(one.strip() for one in text.split(",")) if text else (),
        image=image,
        label=label,
        classes=classes,
        templates=tuple(template or ()),
        limit=limit,
        head=head,
        truncate=truncate,
    )


@given(asked=examples)
def task(asked: EvaluationData, metric: MetricOption = None) -> EvaluationData:
    """A task: examples, and what counts."""
    return replace(asked, metric=metric)


@dataclass(frozen=True)
class Support:
    """What the user said about the support; all else is as the task has it, columns by their names."""

    reference: str | None
    split: str | None
    classes: str | None
    head: str | None

    def beside(self, task: EvaluationData) -> EvaluationData | None:
        """The support of a task, if there is one."""
        from transfusion.evaluation.evaluation_data import EvaluationData

        if self.reference is None:
            return None
        return EvaluationData(
            self.reference,
            split=self.split,
            classes=self.classes,
            templates=task.templates,
            limit=task.limit,
            head=self.head,
            truncate=task.truncate,
        )


def support(
    support: SupportData = None,
    support_classes: SupportClasses = None,
    support_split: SupportSplit = None,
    support_head: SupportHead = None,
) -> Support:
    """The support as the flags describe it."""
    if support is None and (support_classes or support_split or support_head):
        raise typer.BadParameter("--support-… goes with --support")
    return Support(support, support_split, support_classes, support_head)


def sources(*asked: EvaluationData | Support) -> list[str]:
    """Whatever the flags about examples name that may be on this machine: data, class names and heads."""
    places = [place for one in asked for place in (one.reference, one.classes, one.head)]
    return [str(place) for place in places if isinstance(place, str | Path)]

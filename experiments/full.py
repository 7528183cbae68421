"""The full scale: the paper's own bases and datasets, fetched from the hub.

The paper names bases, datasets and α. Where it is silent, these are the usual settings of work on task
vectors: AdamW at 1e-5 with a weight decay of 0.1, batches of 128, 2 000 steps, the first 200 of them a
warm-up, then half a cosine; the head that the captions make stays frozen. Text towers learn with the same
settings, under a linear head on the embedding; pairs are given as one text. The classifiers for the barrier
learn for 100 epochs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from experiments.bases import Released
from experiments.questions import pieces
from experiments.settings import ImageTask, Lmc, Scale, TextTask
from experiments.tuning import Schedule
from transfusion.data.dataset import Dataset
from transfusion.data.examples import Columns
from transfusion.data.read_examples import read_examples
from transfusion.evaluation.task import EvaluationData

MODEL, A, B = "ViT-B-16", "commonpool_l_s1b_b8k", "datacomp_l_s1b_b8k"
TUNING = Schedule(steps=2000, rate=1e-5, batch=128, warm=0.1, decay=0.1)
GLUE, SUPPORT = "nyu-mll/glue", "axiong/imagenet-r"
CONTEXT = 77


def image_task(paper: str, reference: str, classes: str) -> ImageTask:
    """Images of the hub, or of a folder, under the package's prompts for their classes.

    Numbers of classes are taken as they are: everybody counts these classes in the same order, and no two
    copies on the hub call them by the same names.
    """

    @cache
    def data(split: str) -> EvaluationData:
        return EvaluationData(
            replace(read_examples(reference, split, Columns(label="label")), names=None), classes=classes
        )

    return ImageTask(paper, paper, reference, TUNING, partial(data, "train"), partial(data, "test"))


def support() -> EvaluationData:
    """ImageNet-R, whose classes are numbers of WordNet."""
    return EvaluationData(SUPPORT, split="test", classes="imagenet-r", label="wnid")


def _text(paper: str, config: str, columns: tuple[str, ...]) -> TextTask:
    return TextTask(
        paper,
        paper,
        f"{GLUE}:{config}",
        TUNING,
        2,
        partial(glue, config, columns, "train"),
        partial(glue, config, columns, "validation"),  # the tests of GLUE have no labels
    )


@cache
def glue(config: str, columns: tuple[str, ...], split: str) -> Dataset:
    """A task of GLUE in CLIP's pieces of words, cut where it is longer than CLIP reads."""
    found = read_examples(f"{GLUE}:{config}", split, Columns(columns, None, "label"))
    assert found.texts is not None
    assert found.labels is not None
    inputs = {"input_ids": pieces([" ".join(texts) for texts in found.texts], CONTEXT)}
    return Dataset.of(found.label, inputs, torch.tensor(found.labels))


FULL = Scale(
    name="full",
    bases=Released(MODEL, A, B),
    images=(
        image_task("EuroSAT", "tanganke/eurosat", "eurosat"),
        image_task("DTD", "tanganke/dtd", "dtd"),
        image_task("GTSRB", "tanganke/gtsrb", "gtsrb"),
        image_task("SVHN", "ufldl-stanford/svhn:cropped_digits", "svhn"),
    ),
    support=support,
    support_about=f"ImageNet-R ({SUPPORT})",
    texts=(
        _text("QQP", "qqp", ("question1", "question2")),
        _text("SST2", "sst2", ("sentence",)),
        _text("RTE", "rte", ("sentence1", "sentence2")),
        _text("CoLA", "cola", ("sentence",)),
    ),
    lmc=Lmc(
        about="two ViT-B/16 taught CIFAR-10 from scratch for 100 epochs",
        vit={"image_size": 224, "patch_size": 16, "num_labels": 10},
        epochs=100,
        rate=5e-4,
        batch=256,
        side=224,
        images=10_000,
    ),
)

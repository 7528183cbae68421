"""The full scale: the paper's own bases and datasets, fetched from the hub.

The paper names bases, datasets and α. Where it is silent, these are the usual settings of work on task
vectors: AdamW at 1e-5 with a weight decay of 0.1, batches of 128, 2 000 steps, the first 200 of them a
warm-up, then half a cosine; the head that the captions make stays frozen. Text towers learn with the same
settings, under a linear head on the embedding; pairs are given as one text. The classifiers for the barrier
learn for 100 epochs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from experiments.pairs.clips import MODELS, Saved
from experiments.pairs.training import kept, key
from experiments.questions import pieces
from experiments.settings import ImageTask, Lmc, Scale, Schedule, TextTask
from transfusion.data.dataset import Dataset
from transfusion.data.examples import Columns
from transfusion.data.read_examples import read_examples
from transfusion.errors import CheckpointError
from transfusion.evaluation.task import EvaluationData
from transfusion.runtime.optional_libraries import require_library

PATIENCE = 10.0
"""Seconds that the hub has to answer."""


@dataclass(frozen=True)
class Released:
    """Two releases of one model of open_clip; the seed changes nothing."""

    model: str
    a: str
    b: str

    def folder(self, which: str, seed: int) -> Path:
        """Where A or B is; it is fetched if it is not there."""
        tag = {"a": self.a, "b": self.b}[which]
        name = key(f"{self.model}-{tag}", {"model": self.model, "tag": tag})
        return kept(name, lambda: self._fetched(tag), MODELS)

    def _fetched(self, tag: str) -> Saved:
        open_clip, hub = require_library("open_clip"), require_library("huggingface_hub")
        hub.utils.logging.set_verbosity_error()  # the error says what its retries would say
        try:
            place = (open_clip.get_pretrained_cfg(self.model, tag).get("hf_hub") or "").strip("/")
            if place:
                require_answer(hub, place)
            made = open_clip.create_model(self.model, pretrained=tag)
        except Exception as error:  # whatever stands between here and the hub
            reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
            raise CheckpointError(
                f"{self.model} {tag}: cannot be fetched ({reason})",
                hint="the full scale needs the hub, or open_clip's cache; --small needs neither, but the"
                " package registries (npm, pip) until its data is in the cache",
            ) from error
        config = {
            "model_cfg": open_clip.get_model_config(self.model),
            "preprocess_cfg": open_clip.get_model_preprocess_cfg(made),
        }
        return Saved(made.eval(), config)

    def about(self) -> str:
        """In words."""
        return f"open_clip {self.model}: A {self.a}, B {self.b}"


def require_answer(hub: Any, place: str) -> None:
    """Fail at once, without retries, where neither the cache has a model nor the hub answers."""
    try:
        hub.snapshot_download(place, local_files_only=True)
    except hub.errors.LocalEntryNotFoundError:
        with suppress(hub.errors.HfHubHTTPError):  # an answer, if not the one that was hoped for
            hub.HfApi().model_info(place, timeout=PATIENCE)


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

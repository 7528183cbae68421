"""Data: what the user asked to be measured on, and how a meter is made of it for a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from transfusion.dataset import Dataset
from transfusion.errors import SettingError
from transfusion.evaluation.meters import Meter
from transfusion.live import Live
from transfusion.model import Model

BATCH = 64


@dataclass(frozen=True)
class Data:
    """Where the examples are, and how they are to be understood, as far as the user said so."""

    reference: str | Path | Dataset
    """A folder, a file, a hub id, or tensors in memory."""
    split: str | None = None
    text: tuple[str, ...] = ()
    """The columns with the text: one, or two for pairs."""
    image: str | None = None
    label: str | None = None
    classes: str | Path | None = None
    """A file of class names and templates, or the name of one that ships with the package."""
    templates: tuple[str, ...] = ()
    """Instead of the templates of the classes' file."""
    limit: int | None = None
    head: str | Path | Model | None = None
    """A fine-tuned model whose head is borrowed, or a file with a linear head."""
    metric: str | None = None
    truncate: bool = False
    """Whether texts that are longer than the model are cut."""

    @classmethod
    def of(cls, given: str | Path | Dataset | Data) -> Data:
        """The same, if it is that already; or data of which nothing more is said."""
        return given if isinstance(given, Data) else cls(given)

    def live(self, model: Model, dtype: torch.dtype = torch.float32) -> Live:
        """The live model to measure: with the head that the user asked for."""
        return Live.of(model, dtype)

    def meter(
        self,
        model: Model,
        live: Live,
        *,
        dtype: torch.dtype = torch.float32,
        batch: int | None = None,
    ) -> Meter:
        """A meter for a live model, which was made of this model; without ``batch``, of a size that fits."""
        if self.limit is not None and self.limit < 1:
            raise SettingError(f"limit = {self.limit}: no examples", hint="give 1 or more")
        data = self.reference if isinstance(self.reference, Dataset) else Dataset.load(self.reference)
        meter = Meter.of(live, data.limited(self.limit), dtype, batch or BATCH)
        return meter if self.metric is None else replace(meter, headline=self.metric)

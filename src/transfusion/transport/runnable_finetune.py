"""A fine-tune that is to be run: a model in files, or one that is computed from others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transport.output import Output


@dataclass(frozen=True)
class RunnableFinetune:
    """A model, or what computes one."""

    made: Model | Output
    resources: Resources = LOCAL

    def module(self) -> nn.Module:
        """Build the whole module in memory, in float32."""
        if isinstance(self.made, Model):
            return build(self.made, torch.float32)
        return nn.Module.float(self.made.module()).eval()  # libraries warn in methods of their own

    def model(self, folder: Path) -> Model:
        """Return the model in files, to be run unit by unit; one that is computed is written to a folder."""
        if isinstance(self.made, Model):
            return self.made
        return Model.open(self.made.save(folder, resources=self.resources))

"""B with a part of the change that moves onto it: B + α·π(τ), to be run for several α."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.model.model import Model
from transfusion.running.building import build, skeleton
from transfusion.running.live_model import HowToRun, RunningModel


class MovedModel(ABC):
    """The moved fine-tune, which can be run with any α."""

    module: nn.Module
    """Its module; without weights, if it runs unit by unit."""

    @abstractmethod
    def at(self, alpha: float) -> AbstractContextManager[RunningModel]:
        """Within the block, run the model with this α."""


class WholeMove(MovedModel):
    """The whole module in memory, with B's weights and their change."""

    def __init__(self, module: nn.Module, b: Model, how: HowToRun) -> None:
        self.module, self.b, self.how = nn.Module.to(module, how.device), b, how
        naming = Naming(b.family, live=True)
        places = {naming.canonical(name): parameter for name, parameter in module.named_parameters()}
        self.ends: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        """For every parameter that B has too, B's value and the change that α = 1 adds."""
        for name, own in nn.Module.to(build(b, torch.float32), how.device).named_parameters():
            parameter = places.get(naming.canonical(name))
            if parameter is not None and parameter.shape == own.shape:
                self.ends[parameter] = own.data, parameter.data - own.data

    @contextmanager
    def at(self, alpha: float) -> Iterator[RunningModel]:
        for parameter, (start, change) in self.ends.items():
            parameter.data = start + alpha * change
        yield RunningModel(self.module, self.b.family, self.how.workers, self.how.device)


class StreamedMove(MovedModel):
    """Both models in files: every unit is read from both, and combined, when it runs."""

    def __init__(self, moved: Model, b: Model, how: HowToRun) -> None:
        self.moved, self.b, self.how = moved, b, how
        self.module = skeleton(moved)

    def at(self, alpha: float) -> AbstractContextManager[RunningModel]:
        def read(name: str) -> Tensor:
            whole = self.moved.read(name).float()
            if name not in self.b.names or self.b.info(name).shape != self.moved.info(name).shape:
                return whole
            own = self.b.read(name).float()
            return own + alpha * (whole - own)

        return self.how.opened(self.moved, read)

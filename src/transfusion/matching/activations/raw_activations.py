"""Evidence for optimal transport: the activations of two live models on the same random inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.alignment.moves import move_tensor
from transfusion.architecture.architecture import Shortcut
from transfusion.architecture.layouts import Layout
from transfusion.matching.weights.unit_vectors import unfold
from transfusion.model.model import Model
from transfusion.running.activations import ModuleRecord, record_outputs
from transfusion.running.live_model import LiveModel


class RawActivations:
    """The outputs of the modules of A and B, over several draws of random inputs."""

    def __init__(
        self, a: Model, b: Model, *, dtype: torch.dtype, device: str, draws: int = 4, batch: int = 8
    ) -> None:
        self.architecture = a.architecture
        self._a, self._b = (_record(model, draws, batch, dtype, device) for model in (a, b))

    def features(self, id: str, maps: Mapping[str, Map]) -> tuple[Tensor, Tensor] | None:
        """Return B's units and A's as vectors, (rows, size, samples): the outputs of every module that
        produces the axis, or else of those that hand it on; None where no module's output has it.

        A's activations stay in A's order, whatever was found before; only ancestors of the axis are moved.
        """
        first_a, first_b = self._a[0].outputs, self._b[0].outputs
        having = [name for name in first_b if name in first_a and id in first_b[name][0].names()]
        producing = [name for name in having if self.architecture.tensors[f"{name}.weight"].arrow]
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        others = {other: map_ for other, map_ in maps.items() if other != id}
        for name in producing or having:
            for of_a, of_b in zip(self._a, self._b, strict=True):
                ours += self._unfolded(of_b.outputs[name], id, {})
                theirs += self._unfolded(of_a.outputs[name], id, others)
        return (torch.cat(ours, dim=2), torch.cat(theirs, dim=2)) if ours else None

    def stream(self, cut: Shortcut) -> Tensor | None:
        """Return the norm of each unit of B's stream where a shortcut begins."""
        values = [record.streams[cut.entry] for record in self._b if cut.entry in record.streams]
        if not values or values[0].shape[-1] != self.architecture.sizes[cut.source]:
            return None
        samples = torch.cat([value.flatten(0, -2) for value in values])
        return samples.square().sum(dim=0).sqrt()

    def _unfolded(self, output: tuple[Layout, Tensor], id: str, maps: Mapping[str, Map]) -> list[Tensor]:
        layout, value = output
        value = move_tensor(value, layout, maps, self.architecture.sizes, self.architecture.parents)
        return [
            piece
            for dim in layout.dims_with(id)
            for piece in unfold(value, layout, id, dim, self.architecture)
        ]


def _record(model: Model, draws: int, batch: int, dtype: torch.dtype, device: str) -> list[ModuleRecord]:
    """Run a model on some draws of random inputs."""
    live, records = LiveModel.of(model), list[ModuleRecord]()
    for seed in range(draws):
        with record_outputs(live) as record:
            live.drawn(model, batch=batch, seed=seed).outputs()
        outputs = {
            name: (layout, value.to(device, dtype)) for name, (layout, value) in record.outputs.items()
        }
        streams = {name: value.to(device, dtype) for name, value in record.streams.items()}
        records.append(ModuleRecord(outputs, streams))
    return records

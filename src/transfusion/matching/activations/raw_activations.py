"""Evidence from what two live models compute from the same made-up inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.alignment.tensor_moves import move_tensor
from transfusion.architecture.architecture import Shortcut
from transfusion.layouts import Layout
from transfusion.live.hooks import record_outputs, record_streams
from transfusion.live.live_model import LiveModel
from transfusion.matching.weights.unit_vectors import unfold
from transfusion.model.model import Model

_Recording = list[dict[str, tuple[Layout, Tensor]]]


class RawActivations:
    """What the modules of A and B put out, over several draws of probes."""

    def __init__(
        self, a: Model, b: Model, *, dtype: torch.dtype, device: str, draws: int = 4, batch: int = 8
    ) -> None:
        self.architecture = a.architecture
        self._a, _ = _watched(a, draws, batch, dtype, device)
        self._b, self._streams = _watched(b, draws, batch, dtype, device)

    def features(self, id: str, maps: Mapping[str, Map]) -> tuple[Tensor, Tensor] | None:
        """B's units and A's as vectors, (rows, size, samples): the outputs of every module that produces
        the axis, or else of those that hand it on; None where no module's output has it.

        What A computes is in A's order whatever was found before; only ancestors of the axis are moved.
        """
        speaking = [name for name in self._b[0] if name in self._a[0] and id in self._b[0][name][0].names()]
        weights = {name: self.architecture.tensors[f"{name}.weight"] for name in speaking}
        producing = [name for name in speaking if weights[name].arrow]
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        others = {other: map_ for other, map_ in maps.items() if other != id}
        for name in producing or speaking:
            for of_a, of_b in zip(self._a, self._b, strict=True):
                ours += self._unfolded(of_b[name], id, {})
                theirs += self._unfolded(of_a[name], id, others)
        return (torch.cat(ours, dim=2), torch.cat(theirs, dim=2)) if ours else None

    def stream(self, cut: Shortcut) -> Tensor | None:
        """How large each unit of B's stream is where a shortcut begins: one number per unit."""
        values = [record[cut.entry] for record in self._streams if cut.entry in record]
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


def _watched(
    model: Model, draws: int, batch: int, dtype: torch.dtype, device: str
) -> tuple[_Recording, list[dict[str, Tensor]]]:
    """A model run on some draws of probes: what came out of its modules, and its stream at every entry."""
    live = LiveModel.of(model)
    outputs: _Recording = []
    streams: list[dict[str, Tensor]] = []
    for seed in range(draws):
        with record_outputs(live) as record, record_streams(live) as stream:
            live.drawn(model, batch=batch, seed=seed).outputs()
        outputs.append(
            {name: (layout, value.to(device=device, dtype=dtype)) for name, (layout, value) in record.items()}
        )
        streams.append({name: value.to(device=device, dtype=dtype) for name, value in stream.items()})
    return outputs, streams

"""π(A): the same function as A, its units in B's order."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from transfusion import __version__
from transfusion.alignment.alignment import Alignment, require_one_shape
from transfusion.errors import AlignmentError, listing
from transfusion.files.publishing import require_writable
from transfusion.model.bases import input_files, open_model
from transfusion.model.model import Model
from transfusion.runtime.resources import Resources
from transfusion.runtime.settings import verb
from transfusion.transport.output_model import COPIES, OutputModel, OutputShape, OutputTensor
from transfusion.transport.settings import ApplySettings


@dataclass
class AppliedModel(OutputModel[OutputTensor]):
    """π(A): A's tensors in B's order of units."""

    alignment: Alignment
    model: Model

    @property
    def like(self) -> Model:
        return self.model

    @cached_property
    def entries(self) -> list[OutputTensor]:
        infos = {name: self.model.info(name) for name in self.model.names}
        return [
            OutputTensor(name, self.model.names[name], OutputShape(info.shape, info.dtype))
            for name, info in infos.items()
        ]

    def by_rows(self, entry: OutputTensor) -> bool:
        return bool(entry.shape.extents)

    def rows(self, entry: OutputTensor, rows: slice) -> Tensor:
        read = partial(self.model.raw, entry.name)
        layout = self.model.architecture.tensors.get(entry.name)
        if layout is None or not entry.shape.extents:
            return read(rows if entry.shape.extents else None)
        return self.alignment.move_rows(read, layout, rows)

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model,)

    def within_memory(self, resources: Resources) -> Resources:
        fixed = 2 * self.alignment.nbytes + self.held_bytes()
        return resources.within_memory(COPIES * self.block_bytes(), "one thread", fixed)

    def conclude(self) -> None:
        """Refuse inputs that have changed on the way."""
        self.require_unchanged()

    def require_finite_inputs(self, entry: OutputTensor) -> None:
        self.model.read(entry.name)

    def recipe(self) -> dict[str, Any]:
        return {"alignment": self.alignment.digest, "to": self.model.fingerprint}

    def texts(self) -> dict[str, str]:
        details = {
            "transfusion": __version__,
            "verb": "apply",
            "applied": self.alignment.digest,
            "to": {"name": self.model.label, "fingerprint": self.model.fingerprint},
        }
        return {"transfusion.json": json.dumps(details, indent=2, ensure_ascii=False) + "\n"}


@verb(ApplySettings)
def apply(settings: ApplySettings) -> AppliedModel:
    """Return π(A): the same function as A, with its units in B's order.

    A π that mixes units, or that needs other shortcuts than A has, is refused.

    >>> moved = transfusion.apply("pi.safetensors", "models/a")
    >>> print(moved.save("models/a-in-the-order-of-b"))
    models/a-in-the-order-of-b
    """
    alignment = require_one_shape(settings.via)
    metadata = alignment.provenance
    model = open_model(settings.a, settings.config).under(metadata.policy)
    to = None if settings.output is None else Path(settings.output)
    if to is not None:
        require_writable(to, force=settings.force, inputs=input_files(settings.via, model))
    alignment = alignment.fitted(model.architecture)
    alignment.require_for(model.architecture)
    alignment.require_between(source=model)
    soft = [id for id, map_ in alignment.maps.items() if not map_.permutes]
    if soft:
        raise AlignmentError(
            f"π(A) is not the same function as A: this π mixes the units of {listing(soft, 2)}",
            hint="only permutations can be applied; transport takes this π as it is",
        )
    broken = [f"{cut.source} → {cut.target}" for cut in alignment.rotated(model.architecture.shortcuts)]
    if broken:
        raise AlignmentError(
            "π(A) is not an ordinary checkpoint: the residual stream has different maps before and after"
            f" {len(broken)} shortcut(s) ({listing(broken, 2)}), and a plain shortcut cannot convert one into"
            " the other",
            hint='align with `residual="tied"`; transport needs no shortcuts and takes this π as it is',
        )
    moved = AppliedModel(alignment, model)
    if to is not None:
        with settings.progress.bar(len(moved.entries)) as advance:
            moved.save(to, force=settings.force, resources=settings.resources, on_tensor=advance)
    return moved

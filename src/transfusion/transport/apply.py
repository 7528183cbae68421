"""π(A): the same function as A, its units in B's order."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from transfusion import __version__
from transfusion.alignment.alignment import Alignment, require_one_shape
from transfusion.errors import AlignmentError, listing
from transfusion.files.publishing import require_writable
from transfusion.model.model import Model, input_files
from transfusion.model.pair import open_model
from transfusion.runtime.settings import verb
from transfusion.transport.output import Output, OutputTensor
from transfusion.transport.record import FILE
from transfusion.transport.sentences import modules_moved
from transfusion.transport.settings import ApplySettings


def applied_output(alignment: Alignment, model: Model) -> Output:
    """Return π(A): A's tensors in B's order of units."""
    tensors = {
        name: OutputTensor(info.shape, info.dtype, partial(_rows, alignment, model, name), stored)
        for name, stored in model.names.items()
        for info in (model.info(name),)
    }

    def metadata() -> dict[str, Any]:
        return {
            "transfusion": __version__,
            "verb": "apply",
            "applied": alignment.digest,
            "to": {"name": model.label, "fingerprint": model.fingerprint},
        }

    return Output(
        f"π({model.label})",
        model,
        tensors,
        model.checkpoint.config,
        metadata,
        lambda metadata: {FILE: json.dumps(metadata, indent=2, ensure_ascii=False) + "\n"},
        recipe=lambda: {"alignment": alignment.digest, "to": model.fingerprint},
        inputs=[model.checkpoint],
        copied=model.checkpoint.auxiliary_files(),
        sentence=modules_moved(model.checkpoint, alignment),
    )


def _rows(alignment: Alignment, model: Model, name: str, rows: slice) -> Tensor:
    read = partial(model.raw, name)
    layout, shape = model.architecture.tensors.get(name), model.info(name).shape
    if layout is None or not shape:
        return read(rows if shape else None)
    return alignment.move_rows(read, layout, rows)


@verb(ApplySettings)
def apply(settings: ApplySettings) -> Output:
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
    broken = [
        f"{cut.source} → {cut.target}" for cut in alignment.broken_shortcuts(model.architecture.shortcuts)
    ]
    if broken:
        raise AlignmentError(
            "π(A) is not an ordinary checkpoint: the residual stream has different maps before and after"
            f" {len(broken)} shortcut(s) ({listing(broken, 2)}), and a plain shortcut cannot convert one into"
            " the other",
            hint='align with `residual="tied"`; transport needs no shortcuts and takes this π as it is',
        )
    moved = applied_output(alignment, model)
    if to is not None:
        with settings.progress.bar(len(moved.tensors)) as advance:
            moved.save(to, force=settings.force, resources=settings.resources, on_tensor=advance)
    return moved

"""π(A): the same function as A, its units in B's order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from transfusion import __version__
from transfusion.alignment import Alignment
from transfusion.errors import AlignmentError, listing
from transfusion.maps import Permutation
from transfusion.model import Model, Reference
from transfusion.writer import Shards, write_model


@dataclass
class Applied:
    """π(A): A's tensors in B's order of units."""

    alignment: Alignment
    model: Model

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name."""
        tensor = self.model.read(name)
        layout = self.model.architecture.tensors.get(name)
        return tensor if layout is None else self.alignment.move(tensor, layout)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole of it in memory, under A's names."""
        return {
            piece: value
            for name, stored in self.model.names.items()
            for piece, value in stored.split(self.tensor(name)).items()
        }

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write it like A: the same files, configuration and companions."""
        shards: Shards = {file: {} for file in self.model.checkpoint.files}
        for name, stored in self.model.names.items():
            for piece, get in stored.apart(partial(self.tensor, name)).items():
                shards[self.model.checkpoint.tensors[piece].file][piece] = get
        return write_model(
            Path(path),
            shards,
            like=self.model.checkpoint,
            config=self.model.checkpoint.config,
            story=lambda: {
                "transfusion": __version__,
                "applied": self.alignment.digest,
                "to": {"name": self.model.label, "sha256": self.model.digest},
            },
            force=force,
        )


def apply(via: Alignment | str | Path, a: Model | Reference) -> Applied:
    """Prepare π(A), the same function as A; refused where that is not an ordinary checkpoint.

    >>> moved = transfusion.apply("pi.safetensors", "models/a")
    >>> print(moved.save("models/a-in-the-order-of-b"))
    models/a-in-the-order-of-b
    """
    alignment = via if isinstance(via, Alignment) else Alignment.load(via)
    story = alignment.provenance
    model = (a if isinstance(a, Model) else Model.open(a)).under(story.policy)
    alignment.require_for(model.architecture)
    alignment.require_between(source=model)
    soft = [id for id, map_ in alignment.maps.items() if not isinstance(map_, Permutation)]
    if soft:
        raise AlignmentError(
            f"π(A) is not the same function as A: this π mixes the units of {listing(soft, 2)}",
            hint="only permutations can be applied; 'transport' takes this π as it is",
        )
    broken = [f"{cut.source} → {cut.target}" for cut in alignment.turned(model.architecture.shortcuts)]
    if broken:
        raise AlignmentError(
            "π(A) is not an ordinary checkpoint: the residual stream has different maps before and after"
            f" {len(broken)} shortcut(s) ({listing(broken, 2)}), and a plain shortcut cannot turn one into"
            " the other",
            hint="align with --residual tied; 'transport' needs no shortcuts and takes this π as it is",
        )
    return Applied(alignment, model)

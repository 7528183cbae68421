"""One stored tensor of an adapter, and where it belongs on a base."""

from __future__ import annotations

from dataclasses import dataclass

from transfusion.architecture.layouts import Layout
from transfusion.transport.adapters.adapter_kinds import WHOLE, AdapterPart
from transfusion.transport.adapters.adapter_targets import TensorSlice


@dataclass(frozen=True)
class AdapterTensor:
    """One stored tensor of an adapter, with its layout on a base."""

    key: str
    """The name in the adapter's file."""
    tensor: str
    """The canonical name of the tensor that it changes or replaces."""
    layout: Layout
    """The axes; for a member of a stack, those of the whole stack."""
    part: AdapterPart = WHOLE
    module: str = ""
    """The live model's name of the target module; empty for a whole tensor."""
    weight: TensorSlice | None = None
    """The place of the module's weight; the first one, if there are several."""
    joined: tuple[TensorSlice, ...] = ()
    """All places, in order, of a module that is several tensors of the table joined along their outputs."""
    rank: int | None = None
    stack: tuple[str, ...] = ()
    """The keys of all members of the stack that it belongs to; π may permute them."""

    @property
    def whole(self) -> bool:
        """Whether this is a copy of the whole tensor, and not a factor of a change."""
        return self.part is WHOLE

    @property
    def places(self) -> tuple[TensorSlice, ...]:
        """The places of the module's weight: one, or several that are joined; none for a whole tensor."""
        return self.joined or (() if self.weight is None else (self.weight,))

    def tensor_at(self, place: TensorSlice) -> str:
        """Return the canonical name of the tensor that it changes at one of its places."""
        return place.tensor if self.part.of == "weight" else place.bias.tensor

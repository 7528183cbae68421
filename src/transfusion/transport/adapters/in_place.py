"""A moved adapter within a live module, without PEFT: weights are computed from its tensors in every pass.

PEFT has no place for what a LoRA file may hold: one pair of factors for joined weights, halves in another
order, whole differences. The formulas are those by which an adapter becomes part of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from transfusion.errors import AdapterError, listing
from transfusion.running.building import places_of
from transfusion.transport.adapters.adapter import AdapterTensor
from transfusion.transport.adapters.kinds import WeightReference
from transfusion.transport.adapters.moved_adapter import MovedAdapter
from transfusion.transport.alpha import Alpha

IN_PLACE = "adapter_in_place"
"""The name of the adapter among the parts of its module."""


@dataclass
class _OfParameters(MovedAdapter):
    """A moved adapter whose tensors are what they are now."""

    now: Callable[[str], Tensor] = field(kw_only=True)
    """Returns a tensor by its key."""

    def on_b(self, factor: AdapterTensor) -> Tensor:
        return self.now(factor.key)


class AdapterInPlace(nn.Module):
    """The trained tensors of an adapter, as a part of the module that it changes."""

    def __init__(self, moved: MovedAdapter) -> None:
        """Every tensor has the value that it was moved to, in float32."""
        super().__init__()
        self.moved, self.active = moved, True
        self.names: dict[str, str] = {}
        """The names of parameters in this part, by key."""
        self._fixed: dict[str, Tensor] = {}
        for number, factor in enumerate(moved.factors):
            value = moved.on_b(factor).detach().float()
            if factor.part.name == "alpha":  # a number that stays
                self._fixed[factor.key] = value
                continue
            self.names[factor.key] = f"{number}:{factor.part.name or 'whole'}".replace(".", "_")
            self.register_parameter(self.names[factor.key], nn.Parameter(value.clone()))
        given = {one.name: getattr(moved, one.name) for one in fields(moved) if one.init}
        self.formulas = _OfParameters(**given, now=self._now)

    def _now(self, key: str) -> Tensor:
        fixed = self._fixed.get(key)
        return self.get_parameter(self.names[key]) if fixed is None else fixed

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors, by the keys of the adapter's file."""
        return {key: self.get_parameter(name).detach().cpu() for key, name in self.names.items()}

    def values_of_b(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the values with which B stays as it is, of those parameters that α scales, by their names
        in the whole module.
        """
        unmoved = replace(self.moved, alpha=Alpha(0.0))
        keys = {f"{IN_PLACE}.{name}": key for key, name in self.names.items()}
        scaled = {one.key: one for one in unmoved.factors if one.part.reference is not WeightReference.NONE}
        return {
            name: unmoved.on_b(scaled[keys[name]]).to(one.device, one.dtype)
            for name, one in trained.items()
            if keys.get(name) in scaled
        }


class _Changed(nn.Module):
    """Computes one weight of B with the adapter."""

    def __init__(self, adapter: AdapterInPlace, name: str) -> None:
        super().__init__()
        self._of = adapter, name  # within a tuple, it is no part of this one

    def forward(self, weight: Tensor) -> Tensor:
        adapter, name = self._of
        return adapter.formulas.merged(name, weight).to(weight.dtype) if adapter.active else weight


def with_adapter_in_place(module: nn.Module, moved: MovedAdapter) -> nn.Module:
    """Return B's module with a moved adapter in it, whose tensors alone are trainable, in float32."""
    adapter = AdapterInPlace(moved)
    module.eval().requires_grad_(False)
    places = {one.ours[0]: one for one in places_of(moved.onto, module)[0] if len(one.ours) == 1}
    if absent := sorted(moved.changed - places.keys()):
        raise AdapterError(
            f"{moved.label} changes {listing(absent)}, which a live {type(module).__name__} has in another"
            " form: it cannot be refined",
            hint="leave out `refine`",
        )
    for name in sorted(moved.changed):
        leaf = places[name].name.rpartition(".")[2]
        register_parametrization(places[name].owner, leaf, _Changed(adapter, name))
    module.add_module(IN_PLACE, adapter)
    return module


def adapter_in(module: nn.Module) -> AdapterInPlace | None:
    """Return the adapter that was put into a module; None if there is none."""
    found = getattr(module, IN_PLACE, None)
    return found if isinstance(found, AdapterInPlace) else None


@contextmanager
def at_rest(adapter: AdapterInPlace) -> Iterator[None]:
    """Within the block, the module computes what it does without its adapter."""
    adapter.active = False
    try:
        yield
    finally:
        adapter.active = True

"""Live models: modules of the library itself, run on random inputs, as they are or under an alignment.

Claims about symmetries are tested here. Nothing here depends on an architecture; the differences between
families come from their tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.architecture import Architecture
from transfusion.architecture.binding import bind
from transfusion.architecture.layouts import Layout, Name
from transfusion.architecture.naming import Naming, without_part
from transfusion.architecture.table import Config, Family
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model
from transfusion.running.building import build, module_of
from transfusion.running.probes.random_inputs import in_dtype, random_inputs, run_model
from transfusion.running.streaming import StreamedModule, stream
from transfusion.runtime.optional_libraries import require_library

__all__ = [
    "LiveModel",
    "build",
    "expected_outputs",
    "largest_difference",
    "last_dimension",
    "module_of",
    "require_library",
]


@dataclass(frozen=True)
class LiveModel:
    """A live module together with what its table says about it."""

    module: nn.Module
    family: Family
    architecture: Architecture
    inputs: Mapping[str, Tensor]
    streamed: StreamedModule | None = None
    """The same module, if its weights are in memory one unit at a time."""

    @classmethod
    def of(cls, model: Model, dtype: torch.dtype = torch.float64, *, by_unit: bool = False) -> LiveModel:
        """Build the model in its own library, with random inputs; whole, or to be run unit by unit."""
        if by_unit:
            streamed = stream(model, dtype)
            live = cls(streamed.module, model.family, model.architecture, {}, streamed)
            return live.drawn(model, dtype=dtype)
        return cls(build(model, dtype), model.family, model.architecture, {}).drawn(model, dtype=dtype)

    def drawn(
        self, model: Model, *, batch: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> LiveModel:
        """The same module with a draw of probes for its model."""
        config: Any = getattr(self.module, "config", None)  # the library's knows the defaults, too
        settings = config.to_dict() if hasattr(config, "to_dict") else config or model.config
        inputs = random_inputs(self.family, settings, batch=batch, seed=seed)
        return replace(self, inputs=in_dtype(inputs, dtype))

    @classmethod
    def from_module(cls, module: nn.Module, family: Family, config: Config) -> LiveModel:
        """Bind a module in memory, by the names of its parameters."""
        shapes = _shapes_in_a_file(module, family)
        table = family.table(config, frozenset(shapes))
        for second, first in table.ties.items():
            if first in shapes:
                shapes.pop(second, None)
        return cls(module, family, bind(table, shapes, family.name), random_inputs(family, config))

    def outputs(self) -> dict[str, Tensor]:
        """Run the module on its probes and return its outputs."""
        try:
            with nullcontext() if self.streamed is None else self.streamed.loading():
                return run_model(self.module, self.family, self.inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise ArchitectureError(
                f"{type(self.module).__name__} cannot be run on random inputs ({reason})",
                hint="verify the same weights in a class with plainer inputs, such as the base model",
            ) from error

    def modules(self) -> dict[str, nn.Module]:
        """The modules by canonical name."""
        naming = Naming(self.family, live=True)
        return {naming.canonical(name): module for name, module in self.module.named_modules()}

    @contextmanager
    def moved(self, alignment: Alignment, *, shortcuts: bool = True) -> Iterator[None]:
        """Within the block, the module computes with π of its weights.

        Where the stream has different maps before and after a branch, ``shortcuts`` puts
        P_out P_inᵀ into the residual connections; without them the function is another one.
        """
        with (
            self._holding_moved(alignment),
            self.rotated_shortcuts(alignment, float(shortcuts)),
        ):
            yield

    def _holding_moved(self, alignment: Alignment) -> AbstractContextManager[None]:
        if self.streamed is None:
            return self.holding(self.parameters_under(alignment))

        def move(name: str, value: Tensor) -> Tensor:
            whole, part = without_part(name)
            layout = self.architecture.tensors[whole]
            return alignment.move(value, layout if part is None else layout.piece(part))

        return self.streamed.changed(move)

    def parameters_under(self, alignment: Alignment) -> dict[str, Tensor]:
        """π of every parameter, by its name in memory; what the library computes itself is left out."""
        naming, layouts = Naming(self.family, live=True), self._layouts()
        moved: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if parameter not in layouts and naming.canonical(name) in self.family.computed:
                continue
            if parameter not in layouts:
                raise ArchitectureError(
                    f"{type(self.module).__name__} has {name} in memory, which the table describes otherwise",
                    hint="install a later release of the library; files can be moved all the same",
                )
            moved[name] = alignment.move(parameter.data, layouts[parameter])
        return moved

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block, the parameters of these names hold these tensors."""
        kept: dict[nn.Parameter, Tensor] = {}
        try:
            for name, tensor in tensors.items():
                parameter = self.module.get_parameter(name)
                kept[parameter] = parameter.data
                parameter.data = tensor
            yield
        finally:
            for parameter, data in kept.items():
                parameter.data = data

    @contextmanager
    def rotated_shortcuts(self, alignment: Alignment, share: float = 1.0) -> Iterator[None]:
        """Within the block, shortcuts between points with different maps carry share·P_out P_inᵀ +
        (1 − share)·I.
        """
        handles: list[Any] = []
        try:
            if share:
                handles.extend(self._shortcut_hooks(alignment, share))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layouts(self) -> dict[nn.Parameter, Layout]:
        """The layout of every parameter; a tied one may meet the table under either of its names."""
        layouts: dict[nn.Parameter, Layout] = {}
        for naming in (Naming(self.family, live=True), Naming(self.family)):
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                ours, part = without_part(naming.canonical(name))
                if layout := self.architecture.tensors.get(ours):
                    layouts[parameter] = layout if part is None else layout.piece(part)
        return layouts

    def _shortcut_hooks(self, alignment: Alignment, share: float) -> Iterator[Any]:
        modules, back = self.modules(), alignment.inverse()
        for cut in alignment.rotated(self.architecture.shortcuts):
            stream: list[Tensor] = []

            def enter(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stream: list[Tensor] = stream
            ) -> None:
                values = (*args, *kwargs.values())
                stream[:] = [next(value for value in values if isinstance(value, Tensor))]

            def leave(
                _: nn.Module,
                args: tuple[Any, ...],
                output: Any,
                stream: list[Tensor] = stream,
                source: str = cut.source,
                target: str = cut.target,
                share: float = share / cut.factor,
            ) -> Any:
                if not stream:  # a module that ends several branches, and this one is not on its way
                    return output
                branch = output[0] if isinstance(output, tuple) else output
                straight = stream.pop()
                rotated = self._along(alignment, target, self._along(back, source, straight))
                added = branch + share * (rotated - straight).reshape(branch.shape)
                return (added, *output[1:]) if isinstance(output, tuple) else added

            yield modules[cut.entry].register_forward_pre_hook(enter, with_kwargs=True)
            yield modules[cut.branch].register_forward_hook(leave)

    def _along(self, alignment: Alignment, id: str, tensor: Tensor) -> Tensor:
        """A tensor whose last dimension is a space, moved."""
        return alignment.move(tensor, last_dimension(id, tensor.ndim))

    def expected(self, alignment: Alignment, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs that the moved model should have; those on an axis that moves are moved."""
        return expected_outputs(alignment.reading, self.architecture, outputs)


def expected_outputs(
    reading: Alignment, architecture: Architecture, outputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the outputs of a moved model, from those of the model and the maps that readers need."""
    moved: dict[str, Tensor] = {}
    for name, value in outputs.items():
        space = architecture.output_space(name)
        if space is not None:
            moved[name] = reading.move(value, last_dimension(space, value.ndim)) if space else value
    return moved


def _shapes_in_a_file(module: nn.Module, family: Family) -> dict[str, tuple[int, ...]]:
    """The shapes that a module's tensors have in a file, where parts of one tensor are one again."""
    naming = Naming(family, live=True)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        ours, part = without_part(naming.canonical(name))
        shape = tuple(parameter.shape)
        if ours in family.computed:
            continue
        if part is not None and ours in shapes:
            shape = (shapes[ours][0] + shape[0], *shape[1:])
        shapes[ours] = shape
    return shapes


def last_dimension(id: str, ndim: int) -> Layout:
    """The layout of an activation: unknown dimensions, then one axis."""
    return Layout((*(Name("_"),) * (ndim - 1), Name(id)))


def largest_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest absolute difference between two sets of outputs."""
    return max(float((first[name] - second[name]).abs().max()) for name in first)

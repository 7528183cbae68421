"""Live models: modules of the library itself, run on random inputs, as they are or under an alignment.

Claims about symmetries are tested here. Nothing here depends on an architecture; the differences between
families come from their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.architecture import Architecture, Shortcut
from transfusion.architecture.binding import bind, names_in
from transfusion.architecture.layouts import Layout, Name
from transfusion.architecture.naming import Naming, tensors_in_memory, without_part
from transfusion.architecture.table import Config, Family
from transfusion.errors import ArchitectureError, listing
from transfusion.model.model import Model
from transfusion.running.building import buffers_as_parameters, build, places_of
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.streaming import StreamedModule


@dataclass(frozen=True)
class LiveModel:
    """A live module together with what its table says about it."""

    module: nn.Module
    family: Family
    architecture: Architecture
    inputs: Mapping[str, Tensor]
    streamed: StreamedModule | None = None
    """The same module, if its weights are in memory one layer at a time."""
    unset: frozenset[str] = frozenset()
    """Parameters that the file lacks, such as a pooler: they have random values."""
    undecided: frozenset[str] = frozenset()
    """Outputs that depend on them, which are left out."""

    @classmethod
    def of(
        cls,
        model: Model,
        dtype: torch.dtype = torch.float64,
        *,
        by_layer: bool = False,
        device: str = "cpu",
    ) -> LiveModel:
        """Build the model in its own library, with random inputs; whole, or to be run layer by layer."""
        streamed = StreamedModule(model, dtype, device) if by_layer else None
        module = build(model, dtype).to(device) if streamed is None else streamed.module
        live = cls(module, model.family, model.architecture, {}, streamed).drawn(model, dtype=dtype)
        computed, naming = model.family.computed, Naming(model.family, live=True)
        unset = [name for name in places_of(model, module)[1] if naming.canonical(name) not in computed]
        return live._without_undecided(unset) if unset else live

    def _without_undecided(self, unset: list[str]) -> LiveModel:
        """The same module without the outputs that change with parameters that the file lacks."""
        others = {name: torch.randn_like(self.module.get_parameter(name).data) for name in unset}
        before = self.outputs()
        with self.holding(others):
            after = self.outputs()
        changed = frozenset(name for name, one in before.items() if not torch.equal(one, after[name]))
        if len(changed) == len(before):
            raise ArchitectureError(
                f"{type(self.module).__name__}: every output depends on {listing(unset)}, which the file"
                " lacks",
                hint="name the class without this head in the 'architectures' of config.json",
            )
        return replace(self, unset=frozenset(unset), undecided=changed)

    def drawn(
        self, model: Model, *, batch: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> LiveModel:
        """The same module with a draw of probes for its model."""
        return replace(self, inputs=ProbedModel(model, self.module).template(batch, seed, dtype))

    @classmethod
    def from_module(cls, module: nn.Module, family: Family, config: Config) -> LiveModel:
        """Bind a module in memory, by the names of its parameters and of the buffers that its table moves."""
        described = names_in(family.table(config, frozenset(_shapes_in_a_file(module, family))))
        naming = Naming(family, live=True)
        if described.intersection(naming.canonical(name) for name, _ in module.named_buffers()):
            module = buffers_as_parameters(deepcopy(module), family, described)  # the caller's own stays
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
                found = run_model(self.module, self.family, self.inputs)
                return {name: one for name, one in found.items() if name not in self.undecided}
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise ArchitectureError(
                f"{type(self.module).__name__} cannot be run on random inputs ({reason})",
                hint="verify the same weights in a class with plainer inputs, such as the base model"
                if self.family.make_inputs is None
                else "make_inputs of its file must return what forward takes, by name",
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

        def move(name: str, value: Tensor) -> Tensor:
            return alignment.move(value, self._layout(name))

        held = (
            self.holding(self.parameters_under(alignment))
            if self.streamed is None
            else self.streamed.changed(move)
        )
        with held, self.rotated_shortcuts(alignment, float(shortcuts)):
            yield

    def parameters_under(self, alignment: Alignment) -> dict[str, Tensor]:
        """π of every parameter, by its name in memory; what the library computes itself is left out."""
        naming, layouts = Naming(self.family, live=True), self._layouts()
        moved: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if parameter not in layouts and (
                name in self.unset or naming.canonical(name) in self.family.computed
            ):
                continue
            if parameter not in layouts:
                raise ArchitectureError(
                    f"{type(self.module).__name__} has {name} in memory, which the table describes otherwise",
                    hint="install a later release of the library; files can be moved all the same",
                )
            parts = [alignment.move(parameter.data[rows], layout) for rows, layout in layouts[parameter]]
            moved[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
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
        modules, back = self.modules(), alignment.inverse()
        with ExitStack() as hooks:
            for cut in alignment.broken_shortcuts(self.architecture.shortcuts) if share else ():
                enter, leave = _shortcut_hooks(cut, alignment, back, share)
                handle = modules[cut.entry].register_forward_pre_hook(enter, with_kwargs=True)
                hooks.callback(handle.remove)
                hooks.callback(modules[cut.branch].register_forward_hook(leave).remove)
            yield

    def _layouts(self) -> dict[nn.Parameter, list[tuple[Any, Layout]]]:
        """The layout of every parameter, or of the rows of each tensor that it holds.

        A tied parameter may meet the table under either of its names.
        """
        layouts: dict[nn.Parameter, list[tuple[Any, Layout]]] = {}
        named = dict(self.module.named_parameters(remove_duplicate=False))
        for naming in (Naming(self.family, live=True), Naming(self.family)):
            for name, parameter in named.items():
                ours = naming.canonical(name)
                if without_part(ours)[0] in self.architecture.tensors:
                    layouts[parameter] = [(..., self._layout(ours))]
        shapes = {name: tuple(one.shape) for name, one in named.items()}
        for name, held in tensors_in_memory(self.family, shapes).items():
            layouts[named[name]] = [(rows or ..., self._layout(ours)) for ours, rows in held]
        return layouts

    def _layout(self, name: str) -> Layout:
        """The layout of a tensor, or of a part of one."""
        whole, part = without_part(name)
        layout = self.architecture.tensors[whole]
        return layout if part is None else layout.piece(part)

    def expected(self, alignment: Alignment, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs that the moved model should have; those on an axis that moves are moved."""
        return expected_outputs(alignment, self.architecture, outputs)


def _shortcut_hooks(
    cut: Shortcut, alignment: Alignment, back: Alignment, share: float
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return hooks that add P_out P_inᵀx − x to a branch's output: at its entry, and at its end."""
    stream: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream[:] = [next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))]

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not stream:  # a module that ends several branches, and this one is not on its way
            return output
        branch = output[0] if isinstance(output, tuple) else output
        straight = stream.pop()  # x, (batch, tokens, units)
        plain = back.move(straight, last_dimension(cut.source, straight.ndim))  # P_inᵀx
        rotated = alignment.move(plain, last_dimension(cut.target, straight.ndim))  # P_out P_inᵀx
        added = branch + share / cut.factor * (rotated - straight).reshape(branch.shape)
        return (added, *output[1:]) if isinstance(output, tuple) else added

    return enter, leave


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
    own = {name: tuple(one.shape) for name, one in module.named_parameters(remove_duplicate=False)}
    held = tensors_in_memory(family, own)
    for name, shape in own.items():
        for ours, rows in held.get(name, ()):
            shapes[ours] = shape if rows is None else (rows.stop - rows.start, *shape[1:])
        if name in held:
            continue
        ours, part = without_part(naming.canonical(name))
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


# ── what vectors do: which of them multiply activations, and which are added ─────────────────


def vector_effects(module: nn.Module, run: Callable[[], object]) -> dict[str, float]:
    """Return how far each vector that ``run`` uses is from being added; zero means added, or subtracted."""
    watch = _VectorWatch()
    vectors = [(name, one) for name, one in module.named_parameters() if one.ndim == 1]
    held = [parameter.data for _, parameter in vectors]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # one operation that hides what its biases do
        for name, parameter in vectors:
            parameter.data = parameter.data.clone()  # in a storage of its own, so that views are recognised
            watch.follow(parameter, name)
        with watch:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for (_, parameter), data in zip(vectors, held, strict=True):
            parameter.data = data
    return watch.effects


class _VectorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows vectors, and tensors made of one vector alone, to the first operation with another tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.effects: dict[str, float] = {}
        self._vector_at: dict[int, str] = {}
        self._alive: list[Tensor] = []
        """Keeps the followed storages, so that no other tensor gets their addresses."""

    def follow(self, tensor: Tensor, name: str) -> None:
        self._vector_at[_address(tensor)] = name
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {"args": args, "kwargs": kwargs or {}}
        owners = {self._vector_at.get(_address(one)) for one in tree_leaves(given) if _has_values(one)}
        if len(owners) > 1:
            for name in owners:
                if name is not None and name not in self.effects:
                    self.effects[name] = self._effect(func, given, name)
        output = func(*args, **given["kwargs"])
        if len(owners) == 1 and (name := owners.pop()) is not None:
            for one in tree_leaves(output):
                if isinstance(one, Tensor) and _address(one) not in self._vector_at:
                    self.follow(one, name)
        return output

    def _effect(self, func: Any, given: Mapping[str, Any], name: str) -> float:
        def output(rise: float) -> Tensor:
            def copied(tensor: Tensor) -> Tensor:
                is_vector = self._vector_at.get(_address(tensor)) == name
                return tensor + rise if is_vector else tensor.clone()

            copy = tree_map_only(Tensor, copied, given)
            first: Tensor = tree_leaves(func(*copy["args"], **copy["kwargs"]))[0]
            return first

        rise = output(1.0) - output(0.0)
        size = rise.abs()  # 1 where it is added or subtracted, and 0 where other units are
        return float(torch.minimum(size, (size - 1).abs()).max())


def _has_values(leaf: Any) -> bool:
    """Whether it is a tensor of numbers that are computed with; integers only say which of them."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

"""Live models: the real library's own code, fed with probes, under an alignment.

This is where a claim about symmetries meets the model that it is about. Nothing here knows any
architecture; what differs between families comes from their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from transfusion.alignment import Alignment
from transfusion.architecture import Architecture
from transfusion.binding import bind
from transfusion.checkpoint import CONFIGS
from transfusion.errors import ArchitectureError, LibraryError
from transfusion.layouts import Layout, Name
from transfusion.model import Model
from transfusion.naming import Naming, without_part
from transfusion.tables import Config, Family


def library(name: str, extra: str | None = None) -> Any:
    """An optional library, or a hint how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        extra = extra or name.replace("_", "-")
        raise LibraryError(
            f"this needs {name}, which cannot be imported ({error})",
            hint=f"pip install 'transfusion[{extra}]'",
        ) from error


def build(model: Model, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The module that the model's own library makes of its folder, ready to be run."""
    root = model.checkpoint.root
    if root.is_file() or not any((root / name).exists() for name in CONFIGS):
        raise ArchitectureError(
            f"{model.label}: a model can only be run from a folder with its config.json",
            hint="put the weights and the config.json into one folder and give that",
        )
    made = _BUILDERS[model.family.library](model, root).to(dtype).eval()
    naming = Naming(model.family, live=True)
    for name, parameter in made.named_parameters(remove_duplicate=False):
        if (ours := naming.canonical(name)) in model.names:
            parameter.data = model.read(ours).to(dtype)  # as stored: libraries round on the way
    return made


def _build_transformers(model: Model, root: Path) -> nn.Module:
    transformers = library("transformers")
    transformers.utils.logging.disable_progress_bar()
    names = model.config.get("architectures") or []
    made_by = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if made_by is None:
        raise ArchitectureError(
            f"{model.label}: config.json names a class {names[0]} that transformers"
            f" {transformers.__version__} does not have",
            hint="correct 'architectures' in config.json, or install the version that wrote it",
        )
    module: nn.Module = made_by.from_pretrained(root, dtype=torch.float32)
    return module


def _build_open_clip(model: Model, root: Path) -> nn.Module:
    open_clip = library("open_clip")
    module: nn.Module = open_clip.create_model(f"local-dir:{root}")
    return module


def _build_timm(model: Model, root: Path) -> nn.Module:
    timm = library("timm")
    classes = model.config.get("num_classes")
    module: nn.Module = timm.create_model(f"local-dir:{root}", pretrained=False, num_classes=classes)
    return module  # the weights come from the model


_BUILDERS: dict[str, Callable[[Model, Path], nn.Module]] = {
    "transformers": _build_transformers,
    "open_clip": _build_open_clip,
    "timm": _build_timm,
}


# ── feeding ──────────────────────────────────────────────────────────────────────────────────


def probes(family: Family, config: Config, *, batch: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of the kinds that a family takes, in the words of its library."""
    if family.probes is not None:
        return dict(family.probes(config))
    generator = torch.Generator().manual_seed(seed)
    settings = _flat(config)
    inputs: dict[str, Tensor] = {}
    if "image" in family.inputs:
        size = settings.get("image_size") or settings.get("img_size") or settings["input_size"][1:]
        rows, columns = size if isinstance(size, list | tuple) else (size, size)
        shape = (batch, settings.get("num_channels") or settings.get("in_chans", 3), rows, columns)
        inputs["pixel_values"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "patches" in family.inputs:
        side = isqrt(settings["num_patches"])
        pixels = settings.get("num_channels", 3) * settings["patch_size"] ** 2
        patches = (batch, side * side)
        inputs["pixel_values"] = torch.randn((*patches, pixels), generator=generator, dtype=torch.float64)
        inputs["pixel_attention_mask"] = torch.ones(patches, dtype=torch.int64)
        inputs["spatial_shapes"] = torch.tensor([[side, side]] * batch)
    if "spectrogram" in family.inputs:
        sound = (batch, settings["num_mel_bins"], 2 * settings["max_source_positions"])
        inputs["input_features"] = torch.randn(sound, generator=generator, dtype=torch.float64)
        length = min(settings["max_target_positions"], 16)
        inputs["decoder_input_ids"] = torch.randint(
            0, settings["vocab_size"], (batch, length), generator=generator
        )
    if "waveform" in family.inputs:
        samples = 16  # frames; and as many samples as it takes to hear them
        steps = zip(settings["conv_kernel"], settings["conv_stride"], strict=True)
        for kernel, stride in reversed(list(steps)):
            samples = (samples - 1) * stride + kernel
        inputs["input_values"] = torch.randn((batch, samples), generator=generator, dtype=torch.float64)
    if "tokens" in family.inputs:
        positions = settings.get("max_position_embeddings") or settings.get("n_positions")
        length = min(positions or settings.get("context_length", 77), 16)
        if family.library == "open_clip":
            length = settings.get("context_length", 77)
        vocabulary = settings.get("vocab_size", 49408)
        inputs["input_ids"] = torch.randint(0, vocabulary, (batch, length), generator=generator)
        if settings.get("type_vocab_size"):
            inputs["token_type_ids"] = torch.randint(
                0, settings["type_vocab_size"], (batch, length), generator=generator
            )
        if settings.get("is_encoder_decoder"):
            inputs["decoder_input_ids"] = torch.randint(0, vocabulary, (batch, length), generator=generator)
            if isinstance(end := settings.get("eos_token_id"), int):
                for ids in inputs.values():  # classifiers look for the one end of every text
                    ids[ids == end] = (end + 1) % vocabulary
                    ids[:, -1] = end
    return inputs


def _flat(config: Config) -> dict[str, Any]:
    """All settings on one level; those of the towers join those of the whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key in (
            "vision_config",
            "text_config",
            "model_cfg",
            "vision_cfg",
            "text_cfg",
            "pretrained_cfg",
            "model_args",
        ):
            flat |= _flat(value)
        else:
            flat[key] = value
    return flat


def run(module: nn.Module, family: Family, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Everything that a model computes from the inputs, by name."""
    with torch.no_grad(), _DoubleThroughout(), _plain_experts(module):
        if family.library == "open_clip":
            image, text, scale = module(inputs["pixel_values"], inputs["input_ids"])[:3]
            return {"image_features": image, "text_features": text, "logit_scale": scale}
        if family.library == "timm":
            return {"output": module(inputs["pixel_values"])}
        kwargs = {"return_dict": True} if family.library == "transformers" else {}
        return dict(_tensors(module(**inputs, **kwargs)))


class _DoubleThroughout(TorchFunctionMode):
    """Computes in float64 also where a library's code asks for float32 (norms, softmax).

    Two ways of summing the same numbers differ by 1e-7 in float32; an equivalence that is exact
    should be seen to be exact.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {
            key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


@contextmanager
def _plain_experts(module: nn.Module) -> Iterator[None]:
    """Within the block, experts are computed by the model's own code.

    The faster kernels that transformers 5 prefers know no float64.
    """
    config = getattr(module, "config", None)
    chosen = getattr(config, "_experts_implementation", None)
    if config is None or chosen in (None, "eager"):
        yield
        return
    config._experts_implementation = "eager"
    try:
        yield
    finally:
        config._experts_implementation = chosen


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The numbers in an output, with dotted names; a bare tensor is called ``output``."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name or "output", output
    elif isinstance(output, Mapping | list | tuple):
        pairs = output.items() if isinstance(output, Mapping) else enumerate(output)
        for key, value in pairs:
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


# ── moving ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Live:
    """A live module together with what its table says about it."""

    module: nn.Module
    family: Family
    architecture: Architecture
    inputs: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Model) -> Live:
        """The model in float64, in its own library, with probes to feed it."""
        module = build(model)
        config = getattr(module, "config", None)  # the library's knows the defaults, too
        inputs = probes(model.family, config.to_dict() if config else model.config)
        return cls(module, model.family, model.architecture, inputs)

    @classmethod
    def from_module(cls, module: nn.Module, family: Family, config: Config) -> Live:
        """A module that somebody built, bound by the names that its parameters have in memory."""
        shapes = _shapes_in_a_file(module, family)
        table = family.table(config, frozenset(shapes))
        for second, first in table.ties.items():
            if first in shapes:
                shapes.pop(second, None)
        return cls(module, family, bind(table, shapes, family.name), probes(family, config))

    def outputs(self) -> dict[str, Tensor]:
        """What the module computes from its probes."""
        try:
            return run(self.module, self.family, self.inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise ArchitectureError(
                f"{type(self.module).__name__} cannot be run on made-up inputs ({reason})",
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
        naming, layouts = Naming(self.family, live=True), self._layouts()
        kept: dict[str, Tensor] = {}
        handles: list[Any] = []
        try:
            for name, parameter in self.module.named_parameters():
                if parameter not in layouts and naming.canonical(name) in self.family.computed:
                    continue
                if parameter not in layouts:
                    raise ArchitectureError(
                        f"{type(self.module).__name__} has {name} in memory, which the table describes"
                        " otherwise",
                        hint="install a later release of the library; files can be moved all the same",
                    )
                kept[name] = parameter.data
                parameter.data = alignment.move(parameter.data, layouts[parameter])
            if shortcuts:
                handles = list(self._shortcut_hooks(alignment))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name, parameter in self.module.named_parameters():
                if name in kept:
                    parameter.data = kept[name]

    def _layouts(self) -> dict[nn.Parameter, Layout]:
        """The layout of every parameter; a tied one may meet the table under either of its names."""
        layouts: dict[nn.Parameter, Layout] = {}
        for naming in (Naming(self.family, live=True), Naming(self.family)):
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                ours, part = without_part(naming.canonical(name))
                if layout := self.architecture.tensors.get(ours):
                    layouts[parameter] = layout if part is None else layout.piece(part)
        return layouts

    def _shortcut_hooks(self, alignment: Alignment) -> Iterator[Any]:
        modules = self.modules()
        for cut in self.architecture.shortcuts:
            if cut.source == cut.target or cut.source not in self.architecture.spaces:
                continue
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
            ) -> Any:
                if not stream:  # a module that ends several branches, and this one is not on its way
                    return output
                branch = output[0] if isinstance(output, tuple) else output
                straight = stream.pop()
                turned = self._along(alignment, target, self._along(alignment.inverse(), source, straight))
                added = branch + (turned - straight).reshape(branch.shape)
                return (added, *output[1:]) if isinstance(output, tuple) else added

            yield modules[cut.entry].register_forward_pre_hook(enter, with_kwargs=True)
            yield modules[cut.branch].register_forward_hook(leave)

    def _along(self, alignment: Alignment, id: str, tensor: Tensor) -> Tensor:
        """A tensor whose last dimension is a space, moved."""
        return alignment.move(tensor, last_dimension(id, tensor.ndim))

    def expected(self, alignment: Alignment, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the moved model should give: outputs in a basis of the model's own move along."""
        moved: dict[str, Tensor] = {}
        for name, value in outputs.items():
            space = self.architecture.outputs.get(name, "")
            if space is not None:
                moved[name] = self._along(alignment, space, value) if space else value
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

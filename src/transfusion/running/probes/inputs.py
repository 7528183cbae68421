"""Random inputs for live models, and the outputs of the models, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from transfusion.architecture.table import WRONG_FILE, Config, Draw, Family
from transfusion.errors import ArchitectureError
from transfusion.model.recognition import SECTIONS

_NAMES = {"image": "pixel_values", "waveform": "input_values", "tokens": "input_ids"}
"""The names of inputs that may have to be arranged, by their kinds."""
_INNER = (
    *("hidden_states.", "attentions.", "cross_attentions.", "encoder_hidden_states.", "encoder_attentions."),
    *("decoder_hidden_states.", "decoder_attentions."),
)
"""What a configuration may ask models of transformers to show beside their outputs: all layers."""
PAIRED = "is_encoder_decoder"
"""The setting of an encoder with a decoder; each of the two has it, too, and is none."""
LARGEST = 2**28
"""The largest number of values of one input."""


def random_inputs(
    family: Family, config: Config, *, batch: int = 3, seed: int = 0, grid: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Draw random inputs of the kinds that a family takes, under the library's names.

    ``grid`` has numbers of patches and words, if a table is to draw others than a few.
    """
    try:
        generator = torch.Generator().manual_seed(seed)
        if family.make_inputs is not None:
            return in_dtype(family.make_inputs(config, batch, generator), torch.float64)
        if family.draws is not None:
            draws = family.draws(config) if grid is None else family.draws(config, grid)
            return {name: _one_draw(how, batch, generator) for name, how in draws.items()}
        return _drawn(family, config, batch, seed)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise ArchitectureError(
            f"{family.name}: no inputs can be generated from the configuration ({reason})",
            hint=WRONG_FILE,
        ) from error


def in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast the floating-point tensors; leave token ids and masks as they are."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }


def _drawn(family: Family, config: Config, batch: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    settings = flat_settings(config) | _of_texts(config)
    inputs: dict[str, Tensor] = {}

    def noise(*shape: int) -> Tensor:
        return _noise((batch, *shape), generator)

    def tokens(length: int, vocabulary: int) -> Tensor:
        return torch.randint(0, vocabulary, (batch, length), generator=generator)

    if "image" in family.inputs:
        inputs["pixel_values"] = noise(*_frame(family, config))
    if "patches" in family.inputs:
        side = isqrt(settings["num_patches"])
        pixels = settings.get("num_channels", 3) * settings["patch_size"] ** 2
        inputs["pixel_values"] = noise(side * side, pixels)
        inputs["pixel_attention_mask"] = torch.ones((batch, side * side), dtype=torch.int64)
        inputs["spatial_shapes"] = torch.tensor([[side, side]] * batch)
    if "spectrogram" in family.inputs:
        inputs["input_features"] = noise(settings["num_mel_bins"], 2 * settings["max_source_positions"])
        length = min(settings["max_target_positions"], 16)
        inputs["decoder_input_ids"] = tokens(length, settings["vocab_size"])
    if "waveform" in family.inputs:
        inputs["input_values"] = noise(samples_of(settings, frames=16))
    if "tokens" in family.inputs:
        positions = settings.get("max_position_embeddings") or settings.get("n_positions")
        length = min(positions or settings.get("context_length", 77), 16)
        if family.library == "open_clip":
            length = settings.get("context_length", 77)
        vocabulary = settings.get("vocab_size", 49408)
        inputs["input_ids"] = tokens(length, vocabulary)
        if settings.get("type_vocab_size"):
            inputs["token_type_ids"] = tokens(length, settings["type_vocab_size"])
        if settings.get(PAIRED):
            inputs["decoder_input_ids"] = tokens(length, vocabulary)
            if isinstance(end := settings.get("eos_token_id"), int):
                for ids in inputs.values():  # classifiers look for the only end-of-text token
                    ids[ids == end] = (end + 1) % vocabulary
                    ids[:, -1] = end
    return inputs


def _one_draw(how: Draw, batch: int, generator: torch.Generator) -> Tensor:
    """Draw one input as a table says."""
    if how.same is not None:
        value = torch.tensor(how.same)
        return value.expand(batch, *value.shape).clone()
    shape = (batch, *how.shape)
    if how.whole:
        return torch.randint(int(how.low or 0), int(how.high), shape, generator=generator)
    if how.low is None:
        return _noise(shape, generator)
    return how.low + (how.high - how.low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def _of_texts(config: Config) -> dict[str, Any]:
    """Return the settings of the text's section: a vision tower may have settings of the same names."""
    for section in ("vlm_config", "text_config", "decoder"):
        if isinstance(part := config.get(section), dict):
            return {key: value for key, value in _of_texts(part).items() if key != PAIRED}
    return flat_settings(config)


def _frame(family: Family, config: Config) -> tuple[int, int, int]:
    """Return channels, rows and columns of the images that a model takes."""
    if family.frame is not None:
        return family.frame(config)
    settings = flat_settings(config)
    size = settings.get("image_size") or settings.get("img_size") or settings["input_size"][1:]
    rows, columns = size if isinstance(size, list | tuple) else (size, size)
    return settings.get("num_channels") or settings.get("in_chans", 3), rows, columns


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw random numbers; refuse a shape that is too large for the memory."""
    if prod(shape) > LARGEST:
        raise ArchitectureError(
            f"the configuration asks for inputs of shape {shape}, and at most {LARGEST} values are generated",
            hint=WRONG_FILE,
        )
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def samples_of(settings: Config, frames: int) -> int:
    """Return the number of samples that make ``frames`` frames."""
    samples = frames
    steps = zip(settings["conv_kernel"], settings["conv_stride"], strict=True)
    for kernel, stride in reversed(list(steps)):
        samples = (samples - 1) * stride + kernel
    return samples


def flat_settings(config: Config) -> dict[str, Any]:
    """Return all settings on one level; those of the towers join those of the whole model, but for whether
    it is an encoder with a decoder.
    """
    level: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key in (*SECTIONS, "pretrained_cfg"):
            level |= {name: one for name, one in flat_settings(value).items() if name != PAIRED}
        else:
            level[key] = value
    return level


LOGITS = "logits"
"""The name of a task head's outputs, and of the only output of a module of the user's own."""


def run_model(
    module: nn.Module,
    family: Family,
    inputs: Mapping[str, Tensor],
    *,
    double: bool = True,
    gradients: bool = False,
) -> dict[str, Tensor]:
    """Run a model on its device and return its outputs by name; computed in float64 throughout, if
    ``double``.
    """
    inputs = placed(module, inputs)
    with torch.set_grad_enabled(gradients), in_double(double), plain_experts(module):
        if family.library == "open_clip":
            image, text, scale = module(inputs["pixel_values"], inputs["input_ids"])[:3]
            return {"image_features": image, "text_features": text, "logit_scale": scale}
        if family.library == "timm":
            return {LOGITS if getattr(module, "num_classes", 0) else "output": module(inputs["pixel_values"])}
        kwargs = {"return_dict": True} if family.library in ("transformers", "diffusers") else {}
        found = module(**arranged(module, family, inputs), **kwargs)
        if isinstance(found, Tensor):
            return {LOGITS: found}
        return {name: one for name, one in _tensors(found) if not name.startswith(_INNER)}


def placed(module: nn.Module, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the inputs on the device of a module, as far as its weights are there."""
    device = next((one.device for one in module.parameters() if not one.is_meta), None)
    return inputs if device is None else {name: one.to(device) for name, one in inputs.items()}


def arranged(module: nn.Module, family: Family, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the inputs as the module takes them, such as a text with tokens that stand for the image.

    Inputs of which some kind is missing, such as a text alone, are taken as they are.
    """
    if family.arrange is None or not {_NAMES[kind] for kind in family.inputs} <= inputs.keys():
        return inputs
    config: Any = module.config
    return family.arrange(config if isinstance(config, Mapping) else config.to_dict(), inputs)


def in_double(double: bool) -> AbstractContextManager[Any]:
    """Within the block, compute everything in float64, if ``double``."""
    return _DoubleThroughout() if double else nullcontext()


class _DoubleThroughout(TorchFunctionMode):
    """Compute in float64 also where a library's code asks for float32 (norms, softmax).

    Two orders of summation differ by 1e-7 in float32, which would hide whether an equivalence is exact.
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
def plain_experts(module: nn.Module) -> Iterator[None]:
    """Within the block, compute experts with the model's own code.

    The faster kernels of transformers 5 do not support float64.
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
    """Iterate over the floating-point tensors of an output, with dotted names."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, Mapping | list | tuple):
        pairs = output.items() if isinstance(output, Mapping) else enumerate(output)
        for key, value in pairs:
            yield from _tensors(value, f"{name}.{key}" if name else str(key))

"""Features of images and texts: the outputs of a model's towers before they are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.errors import ArchitectureError, DataError
from transfusion.evaluation.predictions import out_of_memory
from transfusion.files.tensor_content import content
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.random_inputs import in_double, in_dtype, plain_experts

IMAGE, TEXT = "image", "text"
_METHODS = {
    "open_clip": {IMAGE: "encode_image", TEXT: "encode_text"},
    "transformers": {IMAGE: "get_image_features", TEXT: "get_text_features"},
}
_EMBEDDINGS = ("image_embeds", "text_embeds", "pooler_output")
"""The outputs with the features of a single tower."""
_IMAGE_PARTS = ("visual.", "vision_model.", "visual_projection.")


def compares_images_with_texts(live: LiveModel) -> bool:
    """Whether a model compares images with texts, as CLIP does."""
    methods = _METHODS.get(live.family.library, {})
    towers = all(callable(getattr(live.module, name, None)) for name in methods.values())
    return bool(methods) and towers and hasattr(live.module, "logit_scale")


def features(
    live: LiveModel,
    kind: str,
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype,
    label: str,
    *,
    gradients: bool,
) -> Tensor:
    """Return the features (examples, width) of the tower for this kind of input."""
    device = next(live.module.parameters()).device
    given = {name: one.to(device) for name, one in in_dtype(inputs, dtype).items()}
    try:
        with (
            torch.set_grad_enabled(gradients),
            in_double(dtype is torch.float64),
            plain_experts(live.module),
        ):
            found = _run(live, kind, given)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{label}: {type(live.module).__name__} cannot be run on it ({reason})",
            hint="check that the examples are of the kind that the model takes",
        ) from error
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise ArchitectureError(
            f"{type(live.module).__name__} gives no features of whole {kind}s",
            hint="give a model such as CLIP, or one with a task head of its own",
        )
    return found


def _run(live: LiveModel, kind: str, given: dict[str, Tensor]) -> Any:
    method = getattr(live.module, _METHODS.get(live.family.library, {}).get(kind, ""), None)
    if live.family.library == "open_clip" and method is not None:
        return method(next(iter(given.values())))
    if live.family.library == "timm":
        whole: Any = live.module
        return whole.forward_head(whole.forward_features(given["pixel_values"]), pre_logits=True)
    found = live.module(**given, return_dict=True) if method is None else method(**given)
    if isinstance(found, Tensor):
        return found
    return next((one for name in _EMBEDDINGS if (one := getattr(found, name, None)) is not None), None)


def unit_length(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    return nn.functional.normalize(vectors, dim=-1)


def text_parameters(live: LiveModel) -> dict[str, nn.Parameter]:
    """Return the parameters that the features of texts may depend on."""
    parameters = live.module.named_parameters()
    return {name: one for name, one in parameters if not name.startswith(_IMAGE_PARTS)}


def fingerprint(live: LiveModel) -> str | None:
    """Return a hash of the parameters that texts depend on; None while hooks are registered."""
    if any(one._forward_hooks or one._forward_pre_hooks for one in live.module.modules()):
        return None
    total = hashlib.blake2b()
    for name, parameter in text_parameters(live).items():
        total.update(name.encode())
        total.update(content(parameter.detach().cpu().contiguous()))
    return total.hexdigest()

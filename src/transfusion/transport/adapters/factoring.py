"""A LoRA from a change of weights: the product of its rank that is nearest to the change.

It serves a LoRA that moves to a B of another shape, and refinement with a rank.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.errors import AdapterError
from transfusion.running.building import places_of, skeleton
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.progress import phase
from transfusion.transport.adapters.in_place import adapter_in, at_rest, with_adapter_in_place
from transfusion.transport.adapters.outputs import lora_output
from transfusion.transport.output import Output

PREFIX = "base_model.model."
"""What stands before a module's name in PEFT's."""
SPARE, PASSES, MANY = 16, 3, 4
"""The directions of a large change that are looked at beyond the rank, and how often they pass through it;
and how many times that many a large one has.
"""
LEAST = 1e-6
"""The least size of a direction, as a share of the largest."""
OF_MODELS = ("unchanged", "dropped", "left_out", "changed_settings", "new_tokens", "lost_tokens")
"""What the record of a model says, and that of an adapter does not."""


def lora_between_shapes(
    dense: Output,
    unmoved: Output,
    lora: tuple[int, Collection[str] | None, Collection[str]],
    dtype: torch.dtype | None,
    *,
    planned: bool,
) -> Output:
    """Return an adapter for B whose products are the nearest of their rank to the moved changes.

    ``dense`` is B with all of the moved change, ``unmoved`` the same with α = 0. ``lora`` is the rank, and
    the tensors of B that the adapter changes (None for all linear layers) and replaces. If it is
    ``planned``, it has shapes alone.
    """
    onto, (rank, targets, wholes) = dense.onto, lora
    made, settings, share = dict[str, Tensor](), dict[str, Any](), 1.0
    if planned:
        shapes = {name: dense.tensors[name].shape for name in wholes}
        for name, shape in ((name, onto.info(name).shape) for name in targets or ()):
            if len(shape) == 2:
                shapes |= {f"{name}.lora_A": (rank, shape[1]), f"{name}.lora_B": (shape[0], rank)}
        made = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    else:
        made, settings, share = _nearest_lora(dense, unmoved, rank, targets, sorted(wholes))

    def metadata() -> dict[str, Any]:
        about = {key: value for key, value in dense.metadata().items() if key not in OF_MODELS}
        stored = dtype and str(dtype).removeprefix("torch.")
        about |= {"kind": "adapter", "peft_type": "LORA", "dtype": stored}
        return {**about, "moved": len(made), "rank": rank, "kept": share}

    return lora_output(f"{dense.label} as an adapter", dense, made, settings, metadata, dtype)


def _nearest_lora(
    dense: Output, unmoved: Output, rank: int, targets: Collection[str] | None, own_heads: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    """Return the tensors of a LoRA by the keys of its file, its settings, and the least share of a layer's
    change that it holds. Only one layer's change is in memory at a time.
    """
    wide, before = (one.in_dtype(torch.float32) for one in (dense, unmoved))
    wide.prepare(None)
    before.prepare(None)
    model = wide.shaped()
    module = skeleton(model)
    places = {place.name: place for place in places_of(model, module)[0]}
    heads, chosen = _heads_and_layers(module, own_heads, Naming(model.family, live=True), targets)
    made, shares = dict[str, Tensor](), list[float]()
    with phase("finding the LoRA nearest to the moved change", len(chosen)) as advance:
        for name in chosen:
            place = places[f"{name}.weight"]
            change = place.read(wide.tensor) - place.read(before.tensor)
            second, first, share = _factors(change.T if _is_transposed(module, name) else change, rank)
            made |= {f"{PREFIX}{name}.lora_A.weight": first, f"{PREFIX}{name}.lora_B.weight": second}
            shares.append(share)
            advance("layers of the LoRA")
    own = [name for head in heads for name in places if name.startswith(f"{head}.")]
    made |= {f"{PREFIX}{name}": places[name].read(wide.tensor) for name in own}
    dense.check()
    transposed = any(_is_transposed(module, name) for name in chosen)
    return made, plain_config(_lora_config(rank, chosen, heads, fan_in_fan_out=transposed)), min(shares)


# ── modules with an adapter, through PEFT ────────────────────────────────────────────────────


def with_adapter(module: nn.Module, moved: Output) -> nn.Module:
    """Return B's module with a moved adapter in it, whose tensors alone are trainable, in float32.

    That of a LoRA file is put in its place without PEFT.
    """
    if moved.moved_adapter is not None and moved.adapter_files is not None and moved.adapter_files.lora:
        return with_adapter_in_place(module, moved.moved_adapter)
    peft: Any = require_library("peft")
    with tempfile.TemporaryDirectory() as folder:
        place = moved.save(Path(folder) / "adapter")
        student: nn.Module = peft.PeftModel.from_pretrained(module, str(place), is_trainable=True).eval()
    for one in student.parameters():
        one.data = one.data.float() if one.requires_grad else one.data
    return student


def adapter_tensors(student: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a student's adapter, by the keys of its file."""
    if (own := adapter_in(student)) is not None:
        return own.tensors
    peft: Any = require_library("peft")
    found = peft.get_peft_model_state_dict(student, save_embedding_layers=False)
    return {key: tensor.detach().cpu() for key, tensor in found.items()}


def without_adapter(student: nn.Module) -> AbstractContextManager[Any]:
    """Within the block, a student computes what B does without the adapter."""
    own = adapter_in(student)
    return student.disable_adapter() if own is None else at_rest(own)  # type: ignore[operator]


def with_lora(
    module: nn.Module,
    rank: int,
    base: nn.Module,
    own_heads: Collection[str],
    *,
    naming: Naming,
    targets: Collection[str] | None = None,
) -> nn.Module:
    """Return a module with a new LoRA, whose product is the change from ``base``.

    ``own_heads`` are tensors that B lacks; their modules are trained and stored whole. ``targets`` are the
    weights that the LoRA changes; without them, those of all linear layers.
    """
    peft: Any = require_library("peft")
    heads, chosen = _heads_and_layers(module, own_heads, naming, targets)
    before = dict(base.named_modules())
    changes = {name: (module.get_submodule(name).weight - before[name].weight).detach() for name in chosen}
    wholes = {name: module.get_submodule(name).state_dict() for name in heads}
    transposed = any(_is_transposed(module, name) for name in chosen)
    config = _lora_config(rank, chosen, heads, fan_in_fan_out=transposed)
    student: nn.Module = peft.get_peft_model(base, config).eval()
    for name, change in changes.items():
        layer: Any = student.get_submodule(f"{PREFIX}{name}")
        second, first, _ = _factors(change.T if _is_transposed(module, name) else change, rank)
        layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = first, second
    for name, tensors in wholes.items():
        saved: Any = student.get_submodule(f"{PREFIX}{name}")
        saved.modules_to_save["default"].load_state_dict(tensors)
    return student


def _heads_and_layers(
    module: nn.Module, own_heads: Collection[str], naming: Naming, targets: Collection[str] | None
) -> tuple[list[str], list[str]]:
    """Return the names of the modules that are stored whole, and of those that the LoRA changes."""
    heads = sorted({name.rpartition(".")[0] or name for name in own_heads})
    uses = Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))
    chosen = [
        name
        for name, part in module.named_modules()
        if _is_linear(part)
        and name not in heads
        and (
            uses[id(part.weight)] == 1  # one that is tied to an embedding is no layer of its own
            if targets is None
            else naming.canonical(f"{name}.weight") in targets
        )
    ]
    if not chosen:
        raise AdapterError(
            "the model has no linear layers for a LoRA",
            hint="leave out `refine_rank`: all weights are refined",
        )
    return heads, chosen


def _lora_config(rank: int, chosen: list[str], heads: list[str], *, fan_in_fan_out: bool) -> Any:
    peft: Any = require_library("peft")
    return peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=chosen,
        modules_to_save=heads or None,
        lora_dropout=0.0,
        fan_in_fan_out=fan_in_fan_out,
    )


def lora_config(student: nn.Module) -> dict[str, Any]:
    """Return the configuration of a student's LoRA as PEFT stores it."""
    return plain_config(student.peft_config["default"])  # type: ignore[index]


def plain_config(config: Any) -> dict[str, Any]:
    """Return the configuration of a LoRA as PEFT stores it."""
    info: Mapping[str, Any] = config.to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in info.items()}
    return {**plain, "peft_type": "LORA", "inference_mode": True}


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


def _is_transposed(module: nn.Module, name: str) -> bool:
    return type(module.get_submodule(name)).__name__ == "Conv1D"


def _factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Return the factors (out, rank) and (rank, in) whose product is nearest to a change (out, in), and the
    share of its squared norm that they hold.

    Directions that the change does not need begin as those of any new LoRA, so that they can learn.
    """
    basis = _leading(change, rank + SPARE) if min(change.shape) > MANY * (rank + SPARE) else None
    left, values, right = torch.linalg.svd(change if basis is None else basis.T @ change, full_matrices=False)
    left = left if basis is None else basis @ left  # (out, …)
    kept = int((values[:rank] > LEAST * values[0]).sum())
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(rank, change.shape[1], generator=generator).to(change) / math.sqrt(change.shape[1])
    second, roots = change.new_zeros(change.shape[0], rank), values[:kept].sqrt()
    second[:, :kept], first[:kept] = left[:, :kept] * roots, roots[:, None] * right[:kept]
    total = float(change.square().sum(dtype=torch.float64))
    return second, first, float(values[:kept].square().sum(dtype=torch.float64)) / total if total else 1.0


def _leading(change: Tensor, count: int) -> Tensor:
    """Return an orthonormal basis (out, count) of the directions in which a change is largest: random ones
    that passed through it a few times. Where it has no more directions, nothing is lost.
    """
    random = torch.randn(change.shape[1], count, generator=torch.Generator().manual_seed(1)).to(change)
    found: Tensor = torch.linalg.qr(change @ random).Q
    for _ in range(PASSES):
        found = torch.linalg.qr(change @ (change.T @ found)).Q
    return found

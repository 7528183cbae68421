"""Listening: a live model runs on probes, and samples of what its modules read and put out are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from transfusion.model import Model
from transfusion.naming import Naming, without_part
from transfusion.probes import run

READ, MADE = "read", "made"


@dataclass
class Heard:
    """Samples by the module and the side, on the disk; and which norm fed which module."""

    file: Path
    keys: frozenset[str] = frozenset()
    fed_by: dict[str, str] = field(default_factory=dict)
    """For every module that was given what a norm put out, the norm."""
    shown: frozenset[str] = frozenset()
    """The norms whose outputs are outputs of the model."""

    def samples(self, module: str, side: str) -> Tensor | None:
        """What a module read or put out: (samples, units), in float64.

        Of a module that the library has in parts, all that they put out together, and what the first one read.
        """
        keys = [key for key in (f"{module}/{side}", f"{module}[0]/{side}") if key in self.keys][:1]
        while side == MADE and keys and (key := f"{module}[{len(keys)}]/{side}") in self.keys:
            keys.append(key)
        if not keys:
            return None
        with safe_open(self.file, framework="pt") as opened:
            return torch.cat([opened.get_tensor(key) for key in keys], dim=1).double()


def listen(
    model: Model, module: nn.Module, probes: Sequence[Mapping[str, Tensor]], file: Path, samples: int
) -> Heard:
    """Run a model on all probes; of everything that one batch makes at a place, the same rows are kept in
    every model.
    """
    ear = _Ear(model, samples // max(1, len(probes)))
    handles = list(ear.hooks(module))
    try:
        for number, inputs in enumerate(probes):
            ear.begin(number)
            ear.end(run(module, model.family, inputs, double=False))
    finally:
        for handle in handles:
            handle.remove()
    kept = {key: torch.cat(parts) for key, parts in ear.kept.items()}
    save_file(kept, file)
    return Heard(file, frozenset(kept), ear.fed_by, frozenset(ear.shown))


class _Ear:
    """Hooks on every module that owns a tensor of the table."""

    def __init__(self, model: Model, per_batch: int) -> None:
        self.naming = Naming(model.family, live=True)
        self.tensors = model.architecture.tensors
        self.per_batch = max(1, per_batch)
        self.kept: dict[str, list[Tensor]] = {}
        self.fed_by: dict[str, str] = {}
        self.shown: set[str] = set()
        self._batch = 0
        self._normed: list[tuple[int, str, Tensor]] = []
        """What norms put out in this batch: kept, so that no other tensor can have its place in memory."""

    def begin(self, number: int) -> None:
        self._batch, self._normed = number, []

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        places = {one.untyped_storage().data_ptr() for one in outputs.values()}
        self.shown |= {norm for where, norm, _ in self._normed if where in places}
        for name, one in outputs.items():
            if _is_activation(one):
                self._keep(f"{name}/{MADE}", one)
        self._normed = []

    def hooks(self, module: nn.Module) -> Iterator[Any]:
        owners = {name.rpartition(".")[0] for name in self.tensors}
        for name, part in module.named_modules():
            ours = self.naming.canonical(name)
            if without_part(ours)[0] in owners:
                yield part.register_forward_hook(self._hook(ours), with_kwargs=True)

    def _hook(self, name: str) -> Any:
        whole, _ = without_part(name)
        weight = self.tensors.get(f"{whole}.weight")
        convolves = weight is not None and len(weight.inputs) > 1
        is_norm = weight is not None and weight.arrow is None and len(weight.items) == 1

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            all_given = [one for one in (*args, *kwargs.values()) if _is_activation(one)]
            given = next(iter(all_given), None)
            made = output if _is_activation(output) else None
            for number, one in enumerate(all_given[:3] if weight is None else all_given[:1]):
                self._keep(f"{name}/{READ}{number or ''}", one.movedim(1, -1) if convolves else one)
            if given is not None:
                place = given.untyped_storage().data_ptr()
                for where, norm, _ in self._normed:
                    if where == place and norm != name:
                        self.fed_by[whole] = norm
            if made is not None:
                self._keep(f"{name}/{MADE}", made.movedim(1, -1) if convolves else made)
                if is_norm:
                    self._normed.append((made.untyped_storage().data_ptr(), name, made))

        return hook

    def _keep(self, key: str, value: Tensor) -> None:
        rows = value.detach().reshape(-1, value.shape[-1])
        if len(rows) > self.per_batch:
            generator = torch.Generator().manual_seed(self._batch)
            rows = rows[torch.randperm(len(rows), generator=generator)[: self.per_batch]]
        self.kept.setdefault(key, []).append(rows.float().clone())


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2

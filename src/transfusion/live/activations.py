"""Listening: a live model runs on probes, and samples of what its modules read and put out are kept.

Samples wait on the disk, so that the two models are never in memory together. They are kept rather than
summed up because it is not known yet what they will be compared with: heads are paired before their units
are, and the same samples tell afterwards what the maps are worth. The last of them are only for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from transfusion.architecture.naming import Naming, without_part
from transfusion.checkpoint.publishing import write_tensors
from transfusion.data.probes.random_inputs import run_model
from transfusion.model.model import Model

INPUT, OUTPUT = "read", "made"
HELD_OUT = 5
"""One batch in so many, the last ones, is not learned from."""


@dataclass(frozen=True)
class ActivationStore:
    """Samples by the module and the side, on the disk; and which norm fed which module."""

    files: tuple[Path, ...]
    """One for every batch."""
    keys: frozenset[str] = frozenset()
    fed_by: Mapping[str, str] = field(default_factory=dict)
    """For every module that was given what a norm put out, the norm."""
    shown: frozenset[str] = frozenset()
    """The norms whose outputs are outputs of the model."""
    held_out: bool = False
    """Whether the other samples speak."""

    @property
    def others(self) -> ActivationStore:
        """The same, with the samples that were held out."""
        return replace(self, held_out=True)

    def samples(self, module: str, side: str) -> Tensor | None:
        """What a module read or put out: (samples, units), in float64.

        Of a module that the library has in parts, what all of them put out, and what the first one read.
        """
        keys = [key for key in (f"{module}/{side}", f"{module}[0]/{side}") if key in self.keys][:1]
        while side == OUTPUT and keys and (key := f"{module}[{len(keys)}]/{side}") in self.keys:
            keys.append(key)
        if not keys:
            return None
        batches = [torch.cat([_read(file, key) for key in keys], dim=1) for file in self._speaking]
        return torch.cat(batches).double()

    @property
    def _speaking(self) -> tuple[Path, ...]:
        """The batches to be learned from, or the others; all, where there are too few to be divided."""
        split = len(self.files) - len(self.files) // HELD_OUT
        return (self.files[split:] or self.files) if self.held_out else self.files[:split]


def _read(file: Path, key: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(key)
    return tensor


def record_activations(
    model: Model, module: nn.Module, probes: Sequence[Mapping[str, Tensor]], folder: Path, samples: int
) -> ActivationStore:
    """Run a model on all probes; of everything that one batch makes at a place, the same rows are kept in
    every model.
    """
    recorder = _ActivationHooks(model, samples // max(1, len(probes)))
    files: list[Path] = []
    handles = list(recorder.hooks(module))
    try:
        for number, inputs in enumerate(probes):
            recorder.begin(number)
            recorder.end(run_model(module, model.family, inputs, double=False))
            files.append(folder / f"{number}.safetensors")
            write_tensors(files[-1], {key: torch.cat(parts) for key, parts in recorder.kept.items()})
    finally:
        for handle in handles:
            handle.remove()
    return ActivationStore(tuple(files), frozenset(recorder.kept), recorder.fed_by, frozenset(recorder.shown))


class _ActivationHooks:
    """Hooks on every module that owns a tensor of the table."""

    def __init__(self, model: Model, per_batch: int) -> None:
        self.naming = Naming(model.family, live=True)
        self.tensors = model.architecture.tensors
        self.per_batch = max(1, per_batch)
        self.kept: dict[str, list[Tensor]] = {}
        """Of this batch."""
        self.fed_by: dict[str, str] = {}
        self.shown: set[str] = set()
        self._batch = 0
        self._normed: list[tuple[int, str, Tensor]] = []
        """What norms put out in this batch: kept, so that no other tensor can have its place in memory."""

    def begin(self, number: int) -> None:
        self._batch, self._normed, self.kept = number, [], {}

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        places = {one.untyped_storage().data_ptr() for one in outputs.values()}
        self.shown |= {norm for where, norm, _ in self._normed if where in places}
        for name, one in outputs.items():
            if _is_activation(one):
                self._keep(f"{name}/{OUTPUT}", one)
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
            first = output[0] if weight is not None and isinstance(output, tuple) else output
            made = first if _is_activation(first) else None
            for number, one in enumerate(all_given[:3] if weight is None else all_given[:1]):
                self._keep(f"{name}/{INPUT}{number or ''}", one.movedim(1, -1) if convolves else one)
            if given is not None:
                place = given.untyped_storage().data_ptr()
                for where, norm, _ in self._normed:
                    if where == place and norm != name:
                        self.fed_by[whole] = norm
            if made is not None:
                self._keep(f"{name}/{OUTPUT}", made.movedim(1, -1) if convolves else made)
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

"""What a denoiser was asked: noised latents, and what it makes of them, in a file.

The file is all of a fine-tune that a refinement needs. It holds the inputs as well, so that A's fine-tune and
B's student are asked about the same ones, whatever text encoders are beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from transfusion.errors import DataError
from transfusion.files.publishing import write_tensors
from transfusion.running.probes.noised import Denoiser, Inputs
from transfusion.running.probes.probed_model import seeded_generator
from transfusion.runtime.progress import phase
from transfusion.runtime.shown import Shown
from transfusion.transport.adapters.in_place import adapter_in, at_rest
from transfusion.transport.refinement.asked import HEADER, reading_answers

FORMAT = "transfusion denoised 1"
EXAMPLES, HELD_OUT = 64, 16
"""The latents that a model makes, to learn from and held out."""
TIMES = 16
"""How often noise is mixed into each of them."""
TOGETHER = 4
"""The latents of one pass without gradients."""
_PARTS = ("latents", "times", "examples", "answers", "changes")
_CONDITION = "condition"


@dataclass(frozen=True)
class Noised:
    """Noised latents, and what a denoiser predicts of them."""

    latents: Tensor
    """(items, …)"""
    times: Tensor
    """Between 0, an image, and 1, noise (items)."""
    examples: Tensor
    """The numbers of the texts (items)."""
    answers: Tensor
    """(items, …)"""
    changes: Tensor
    """What of the answers a fine-tune has changed (items, …)."""
    conditions: Mapping[str, Tensor]
    """Texts, and what else a model is told, by the names of its inputs (examples, …)."""
    origins: Tensor | None = None
    """What answers are compared around (items, …); None for their mean."""

    def inputs(self, denoiser: Denoiser, items: Tensor) -> Inputs:
        """Return some of the inputs, by the numbers of items."""
        told = {name: one[self.examples[items].long()] for name, one in self.conditions.items()}
        return denoiser.with_latents(told, self.latents[items].float(), self.times[items])

    def around(self, items: Tensor) -> Tensor:
        """Return what answers are compared around."""
        return self._mean if self.origins is None else self.origins[items]

    @cached_property
    def _mean(self) -> Tensor:
        return self.answers.float().mean(0)

    @cached_property
    def spread(self) -> float:
        """The mean square of the answers around that."""
        everything = torch.arange(len(self.times))
        return max(1e-12, float((self.answers.float() - self.around(everything)).square().mean()))


@dataclass(frozen=True, repr=False)
class AskedDenoiser(Shown):
    """What a denoiser answered: to learn from, and held out."""

    learned: Noised
    held_out: Noised
    about: Mapping[str, Any]
    """Who was asked, with fingerprints, and a description of the inputs."""

    def __rich__(self) -> Text:
        return Text(f"{self.about['label']} answered {self.about['latents']} noised latents")

    def save(self, path: Path) -> None:
        """Write the answers."""
        tensors: dict[str, Tensor] = {}
        for group, one in (("learn", self.learned), ("held", self.held_out)):
            tensors |= {f"{group}.{part}": getattr(one, part).contiguous() for part in _PARTS}
            tensors |= {
                f"{group}.{_CONDITION}.{name}": value.contiguous() for name, value in one.conditions.items()
            }
        write_tensors(path, tensors, {HEADER: json.dumps({"format": FORMAT, **self.about})})

    @classmethod
    def load(cls, path: Path) -> AskedDenoiser:
        """Read answers; refuse a file that holds none of a denoiser."""
        with reading_answers(path, FORMAT) as (file, about):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(_noised(path, tensors, "learn"), _noised(path, tensors, "held"), about)


def _noised(path: Path, tensors: Mapping[str, Tensor], group: str) -> Noised:
    """Return a group of answers, whose parts must fit each other."""
    beginning = f"{group}.{_CONDITION}."
    told = {name.removeprefix(beginning): one for name, one in tensors.items() if name.startswith(beginning)}
    found = [tensors[f"{group}.{part}"] for part in _PARTS if f"{group}.{part}" in tensors]
    items = {one.shape[:1] for one in found}
    if len(found) == len(_PARTS) and len(items) == 1 and len({one.shape[:1] for one in told.values()}) == 1:
        latents, times, numbers, answers, changes = found
        most = len(next(iter(told.values())))
        numbered = times.ndim == numbers.ndim == 1 and set(numbers.tolist()) <= set(range(most))
        finite = all(bool(one.isfinite().all()) for one in (*found, *told.values()))
        fits = finite and numbered and answers.shape == changes.shape and len(times)
        if fits and bool(((times >= 0) & (times <= 1)).all()):
            return Noised(latents, times, numbers, answers, changes, told)
    raise DataError(f"{path}: the answers do not fit the inputs", hint="make them again by `transfusion ask`")


def ask_denoiser(denoiser: Denoiser, about: Mapping[str, Any], *, seed: int) -> AskedDenoiser:
    """Let a model make latents, and ask what it predicts of them when they are noised."""
    denoiser.module.eval().requires_grad_(False)
    learned, held_out = (
        _asked(denoiser, one, 2 * seed + held) for held, one in enumerate((EXAMPLES, HELD_OUT))
    )
    about = {**about, "inputs": [denoiser.about], "latents": len(learned.times)}
    return AskedDenoiser(learned, held_out, about)


def _asked(denoiser: Denoiser, count: int, seed: int) -> Noised:
    generator = seeded_generator(seed, 2)
    conditions, noise = denoiser.examples(count, seed)
    conditions = {name: _stored(one) for name, one in conditions.items()}
    adapter = adapter_in(denoiser.module)
    parts: list[list[Tensor]] = []
    with phase("asking about latents", count) as advance:
        for some in torch.split(torch.arange(count), TOGETHER):
            told = {name: one[some] for name, one in conditions.items()}
            made, there = denoiser.made(told, noise[some])
            for share in range(TIMES):  # one time in every part of the range
                drawn = (share + torch.rand(len(some), generator=generator)) / TIMES
                time = denoiser.mixing.exact(drawn)
                mixed = _stored(denoiser.noised(made, there, time, generator))
                inputs = denoiser.with_latents(told, mixed.float(), time)
                found = plain = denoiser.run(inputs).cpu()
                if adapter is not None:
                    with at_rest(adapter):
                        plain = denoiser.run(inputs).cpu()
                parts.append([mixed, time, some.int(), found.half(), (found - plain).half()])
            for _ in some:
                advance("latents made and answered")
    latents, times, numbers, answers, changes = (torch.cat(several) for several in zip(*parts, strict=True))
    return Noised(latents, times, numbers, answers, changes, conditions)


def _stored(tensor: Tensor) -> Tensor:
    """Return a tensor as a file has it."""
    return tensor.half() if tensor.is_floating_point() else tensor

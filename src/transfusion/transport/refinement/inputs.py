"""The inputs of a refinement: synthetic ones, drawn afresh at every step, and the user's own.

Continuous inputs (images, sound) are synthetic, or inverted from a model by gradient; most are corrupted.
Texts are passages of the bundled corpus and, for a language model, texts that the fine-tune writes; half of
them are recombined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from transfusion.files.publishing import write_tensors
from transfusion.model.model import Model
from transfusion.running.probes import calibration_probes, synthetic_probes
from transfusion.running.probes.images import corrupted_images, noisy, recombined_texts
from transfusion.running.probes.pairs import adversarial, invert
from transfusion.running.probes.probed_model import ProbedModel, Probes, seeded_generator
from transfusion.runtime.progress import phase

Inputs = dict[str, Tensor]
POOL, WRITTEN = 2048, 512
"""The number of texts, of which every step draws some; fewer, if a model writes them."""
INVERTED = 256
"""The number of inverted inputs."""
INVERSION_STEPS = 80
AT_ONCE = 64
"""The number of inputs that are inverted together."""
HELD_OUT = 128
"""The number of held-out inputs of each kind."""
CONTINUOUS = ("pixel_values", "input_features", "input_values")
"""The names of inputs that can be inverted."""
SYNTHETIC, CORRUPTED, BLENDED, OWN = "synthetic", "corrupted", "blended", "own"
"""The kinds of held-out inputs."""
OWN_HELD_OUT = 5
"""Every so many-th of the user's inputs is held out."""
FRESH, POOLED, TESTS = 1_000_000, 2_000_000, 900_000
"""Seeds: every user's seed has a million of its own, one for each step, and one for the held-out inputs."""


@dataclass(frozen=True)
class Prepared:
    """Inputs that take long to make, in files beside an unfinished run, which can then go on with them."""

    place: Path | None = None
    """A path for the files, whose stem they begin with; None to keep nothing."""

    def inputs(self, kind: str, make: Callable[[], Inputs | None]) -> Inputs | None:
        """Read the inputs of a kind, or make and keep them."""
        if self.place is None:
            return make()
        file = self.place.with_stem(f"{self.place.stem}-{kind}")
        if file.exists():
            return load_file(file)
        found = make()
        if found is not None:
            staged = file.with_suffix(".new")
            write_tensors(staged, {name: one.contiguous() for name, one in found.items()}, {})
            os.replace(staged, file)
        return found


@dataclass(frozen=True)
class RefinementInputs:
    """Inputs for one model, by kind."""

    model: Model
    module: nn.Module
    seed: int
    prepared: Prepared = Prepared()
    inverted: Inputs | None = None
    own: Inputs | None = None
    """The user's inputs; some are held out."""
    about: tuple[str, ...] = ("synthetic inputs",)

    def extended(
        self, inverted: Inputs | None, own: Inputs | None = None, about: str = ""
    ) -> RefinementInputs:
        """Return the same with inverted inputs, and with the user's own."""
        more = [*(["inverted inputs"] if inverted else []), *([about] if own else [])]
        return replace(self, inverted=inverted, own=own, about=(*self.about, *more))

    @cached_property
    def subject(self) -> ProbedModel:
        return ProbedModel(self.model, self.module)

    @property
    def continuous(self) -> str | None:
        """The name of the input that can be inverted; None for texts."""
        names = () if self.model.family.probes is not None else self.subject.template()
        return next((name for name in CONTINUOUS if name in names), None)

    def draw(self, step: int, count: int) -> list[Inputs]:
        """Draw the inputs of one step: synthetic ones, and as many of the user's own if there are any."""
        generator = torch.Generator().manual_seed(FRESH * self.seed + step)
        made = self._corrupted(self._plain(step, count, generator), generator)
        return [made] if self.own is None else [made, self._mixed(self.own, count, generator)]

    def draw_plain(self, step: int, count: int) -> Inputs:
        """Draw inputs for one step that are not corrupted."""
        return self._plain(step, count, torch.Generator().manual_seed(FRESH * self.seed + step))

    def made_adversarial(
        self, inputs: Inputs, loss: Callable[[Inputs], Tensor], step: int, share: float = 1.0
    ) -> Inputs:
        """Make a share of continuous inputs adversarial: the loss rises. Other inputs stay."""
        if (name := self.continuous) is None:
            return inputs
        count = round(share * len(inputs[name]))
        some = {key: one[:count] for key, one in inputs.items()}
        generator = torch.Generator().manual_seed(FRESH * (self.seed + 3) + step)
        changed = adversarial(some[name], lambda pixels: loss({**some, name: pixels}), generator)
        return {**inputs, name: torch.cat([changed, inputs[name][count:]])}

    def _plain(self, step: int, count: int, generator: torch.Generator) -> Inputs:
        inverted = count // 2 if self.inverted is not None else 0
        parts = [self._synthetic(step, count - inverted, generator)]
        if self.inverted is not None:
            parts.append(_some(self.inverted, inverted, generator))
        return _joined(parts)

    def _mixed(self, own: Inputs, count: int, generator: torch.Generator) -> Inputs:
        """Draw the user's inputs; every second one is mixed with another one, so that few serve as many."""
        first = _some({name: _trained(one) for name, one in own.items()}, count, generator)
        if (name := self.continuous) is None:
            return self._corrupted(first, generator)
        second = first[name].roll(1, 0)
        share = torch.rand(count, *[1] * (second.ndim - 1), generator=generator)
        return {**first, name: _alternating(first[name], torch.lerp(first[name], second, share))}

    def _synthetic(self, step: int, count: int, generator: torch.Generator) -> Inputs:
        if self.continuous is None:
            return _some(self._pool, count, generator)
        return _whole(synthetic_probes(self.model, self.module, count, FRESH * (self.seed + 1) + step))

    @cached_property
    def _pool(self) -> Inputs:
        count = min(POOL, WRITTEN) if self.subject.writes else POOL
        return self._made("pool", count, POOLED + self.seed)

    def _made(self, kind: str, count: int, seed: int) -> Inputs:
        """Return synthetic inputs, kept with the run: a model may write them for minutes."""
        made = self.prepared.inputs(
            kind, lambda: _whole(synthetic_probes(self.model, self.module, count, seed))
        )
        assert made is not None
        return made

    def _corrupted(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
        """Corrupt images; of sounds and texts, every second one."""
        name = self.continuous
        if name is None:
            if "input_ids" not in inputs:
                return inputs
            mixed = recombined_texts(self.subject, inputs["input_ids"], generator)
        elif inputs[name].ndim == 4:
            return {**inputs, name: corrupted_images(inputs[name], generator)}
        else:
            mixed = {name: noisy(inputs[name], generator)}
        return {key: _alternating(inputs[key], mixed.get(key, inputs[key])) for key in inputs}

    def held_out(self) -> dict[str, Inputs]:
        """Return inputs that no step draws, by kind. No step draws any blended inputs."""
        generator = seeded_generator(self.seed, 8)
        synthetic = self._made("held-out", HELD_OUT, FRESH * (self.seed + 1) + TESTS)
        kinds = {SYNTHETIC: synthetic, CORRUPTED: self._corrupted(synthetic, generator)}
        kinds[BLENDED] = self._blended(synthetic)
        if self.own is not None:
            kinds[OWN] = {name: one[::OWN_HELD_OUT] for name, one in self.own.items()}
        return kinds

    def _blended(self, inputs: Inputs) -> Inputs:
        """Blend every input with the next one: the mean of both, or of texts each second token."""
        blended = dict(inputs)
        for name, one in inputs.items():
            if name == self.continuous:
                blended[name] = (one + one.roll(1, 0)) / 2
            elif name.endswith("input_ids"):
                second = torch.arange(one.shape[1]) % 2 == 1
                blended[name] = torch.where(second, one.roll(1, 0), one)
        return blended


def invert_inputs(inputs: RefinementInputs, loss: Callable[[Inputs, Tensor], Tensor]) -> Inputs | None:
    """Return inputs for which the loss is small; None if the inputs of the model are discrete.

    ``loss(inputs, choices)`` gets a number between 0 and 1 for every input, which chooses the wanted answer.
    """
    if (name := inputs.continuous) is None:
        return None
    parts: list[Inputs] = []
    starts = range(0, INVERTED, AT_ONCE)
    with phase("inverting inputs", len(starts) * INVERSION_STEPS) as advance:
        for start in starts:
            generator = torch.Generator().manual_seed(FRESH * (inputs.seed + 2) + start)
            given = _whole(
                synthetic_probes(inputs.model, inputs.module, min(AT_ONCE, INVERTED - start), POOLED + start)
            )
            choices = torch.rand(len(given[name]), generator=generator)

            def of_pixels(pixels: Tensor, given: Inputs = given, choices: Tensor = choices) -> Tensor:
                advance(f"steps to invert inputs of {Path(inputs.model.label).name}")
                return loss({**given, name: pixels}, choices)

            parts.append({**given, name: invert(given[name], of_pixels, INVERSION_STEPS, generator)})
    return _joined(parts)


def own_inputs(path: Path, model: Model, module: nn.Module, count: int, seed: int) -> tuple[Inputs, str]:
    """Read the user's unlabelled inputs, and describe them."""
    probes = calibration_probes(path, model, module, count, seed)
    return _whole(probes), probes.about


def batches(inputs: Mapping[str, Tensor], size: int) -> list[Inputs]:
    """Divide inputs into batches."""
    count = len(next(iter(inputs.values())))
    return [
        {name: one[start : start + size] for name, one in inputs.items()} for start in range(0, count, size)
    ]


def _whole(probes: Probes) -> Inputs:
    return _joined(probes.batches)


def _joined(parts: list[Inputs]) -> Inputs:
    """Join inputs; those of a name that one part lacks are left out."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _some(inputs: Inputs, count: int, generator: torch.Generator) -> Inputs:
    chosen = torch.randint(len(next(iter(inputs.values()))), (count,), generator=generator)
    return {name: one[chosen] for name, one in inputs.items()}


def _trained(inputs: Tensor) -> Tensor:
    """Leave out those that are held out."""
    return inputs[torch.arange(len(inputs)) % OWN_HELD_OUT != 0]


def _alternating(first: Tensor, second: Tensor) -> Tensor:
    mixed = first.clone()
    mixed[::2] = second[::2]
    return mixed

"""The inputs of a refinement: synthetic ones, drawn afresh at every step, and the user's own.

Continuous inputs (images, sound) are synthetic, or inverted from a model by gradient; most are corrupted.
Texts are passages of the bundled corpus and, for a language model, texts that the fine-tune writes; half of
them are recombined.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from transfusion.files.publishing import write_tensors
from transfusion.model.model import Model
from transfusion.running.probes import make_probes
from transfusion.running.probes.changed_inputs import (
    adversarial,
    corrupted_images,
    invert,
    noisy,
    recombined_texts,
)
from transfusion.running.probes.images import has_natural, natural_kind
from transfusion.running.probes.photographs import mixed
from transfusion.running.probes.probed_model import ProbedModel, joined, seeded_generator
from transfusion.running.probes.texts import natural_length
from transfusion.runtime.progress import phase

Inputs = dict[str, Tensor]
POOL, WRITTEN = 2048, 512
"""The number of texts, of which every step draws some; fewer, if a model writes them."""
TOKENS_WRITTEN, LEAST_WRITTEN = 40_000, 128
"""The most tokens that a model writes, and the fewest texts."""
INVERTED = 256
"""The number of inverted inputs."""
INVERSION_STEPS = 80
AT_ONCE = 64
"""The number of inputs that are inverted together."""
HELD_OUT = 128
"""The number of held-out inputs of each kind."""
TOKENS_HELD_OUT, LEAST_HELD_OUT = 6144, 32
"""The most tokens of held-out texts that a model writes, and the fewest texts."""
IMAGES = "pixel_values"
TEXTS, STEP, LEAST = 16, 2048, 4
"""The texts of a step and process; the most tokens that they have together, and the fewest texts."""
CONTINUOUS = (IMAGES, "input_features", "input_values")
"""The names of inputs that can be inverted."""
TOKENS = "input_ids"
"""How the names of inputs end that are texts."""
SYNTHETIC, CORRUPTED, BLENDED, OWN = "synthetic", "corrupted", "blended", "own"
"""The kinds of held-out inputs."""
OWN_INPUTS = 4096
"""The most inputs of the user that are read."""
OWN_HELD_OUT = 5
"""One in so many of the user's inputs is held out."""
FRESH, POOLED, TESTS = 1_000_000, 2_000_000, 900_000
"""Seeds of generators: a million for each purpose, one for every step, and one for the held-out inputs."""


@dataclass
class RefinementInputs:
    """Inputs for one model, by kind."""

    model: Model
    module: nn.Module
    seed: int
    kept: Path | None = None
    """A file name for inputs that take long to make, from which an interrupted run goes on."""
    tokens: int | None = None
    """The number of tokens that all models have which read the inputs."""
    inverted: Inputs | None = None
    own: Inputs | None = None
    """The user's inputs; some are held out."""
    about: list[str] = field(default_factory=lambda: ["synthetic inputs"])

    @cached_property
    def subject(self) -> ProbedModel:
        """The model, whose images are to show photographs, and whose texts are as long as its own."""
        subject = ProbedModel(self.model, self.module, tokens=self.tokens, natural=True)
        kind = natural_kind(subject)
        if kind is not None and has_natural(kind):
            self.about[0] = f"synthetic inputs, half of them {kind}"
        if not subject.writes:
            return subject
        made = self._prepared("length", lambda: {"tokens": torch.tensor(natural_length(subject, self.seed))})
        return replace(subject, window=int(made["tokens"]))

    @cached_property
    def continuous(self) -> str | None:
        """The name of the input that can be inverted; None for texts."""
        names = self.subject.template()
        return next((name for name in CONTINUOUS if name in names), None)

    def read_own(self, path: Path) -> None:
        """Read the user's unlabelled inputs."""
        probes = make_probes(self.subject, OWN_INPUTS, 0, path)
        self.own = joined(probes.batches)
        self.about.append(probes.about)

    # ── for a step ───────────────────────────────────────────────────────────────────────────

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
        """Draw synthetic inputs, half of them inverted if there are such."""
        inverted = count // 2 if self.inverted is not None else 0
        if self.continuous is None:
            made = _some(self.pool, count - inverted, generator)
        else:
            made = self._synthetic(count - inverted, FRESH * (self.seed + 1) + step)
            if made[self.continuous].ndim == 4:
                made = {**made, self.continuous: mixed(made[self.continuous], generator)}
        if self.inverted is None:
            return made
        return joined([made, _some(self.inverted, inverted, generator)])

    def _synthetic(self, count: int, seed: int) -> Inputs:
        return joined(make_probes(self.subject, count, seed).batches)

    @cached_property
    def pool(self) -> Inputs:
        count = texts_to_learn(self.subject.length) if self.subject.writes else POOL
        return self._prepared("pool", lambda: self._synthetic(count, POOLED + self.seed))

    def _mixed(self, own: Inputs, count: int, generator: torch.Generator) -> Inputs:
        """Draw the user's inputs; every second one is mixed with another one, so that few serve as many."""
        first = _some(
            {name: one[torch.arange(len(one)) % OWN_HELD_OUT != 0] for name, one in own.items()},
            count,
            generator,
        )
        if (name := self.continuous) is None:
            return self._corrupted(first, generator)
        second = first[name].roll(1, 0)
        share = torch.rand(count, *[1] * (second.ndim - 1), generator=generator)
        return {**first, name: _alternating(first[name], torch.lerp(first[name], second, share))}

    def _corrupted(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
        """Corrupt images; of sounds and texts, every second one."""
        name = self.continuous
        if name is None:
            if TOKENS not in inputs:
                return inputs
            mixed = recombined_texts(self.subject, inputs[TOKENS], generator)
        elif inputs[name].ndim == 4:
            return {**inputs, name: corrupted_images(inputs[name], generator)}
        else:
            mixed = {name: noisy(inputs[name], generator)}
        return {key: _alternating(one, mixed.get(key, one)) for key, one in inputs.items()}

    # ── made once ────────────────────────────────────────────────────────────────────────────

    def held_out(self) -> dict[str, Inputs]:
        """Return inputs that no step draws, by kind. No step draws any blended inputs.

        Inputs of names that only a table knows are neither corrupted nor blended, and are there once.
        """
        seed = FRESH * (self.seed + 1) + TESTS
        count = texts_held_out(self.subject.length) if self.subject.writes else HELD_OUT
        synthetic = self._prepared("held-out", lambda: self._synthetic(count, seed))
        kinds = {SYNTHETIC: synthetic}
        if self.continuous is not None or any(name.endswith(TOKENS) for name in synthetic):
            kinds[CORRUPTED] = self._corrupted(synthetic, seeded_generator(self.seed, 8))
            kinds[BLENDED] = {name: self._blended(name, one) for name, one in synthetic.items()}
        if self.own is not None:
            kinds[OWN] = {name: one[::OWN_HELD_OUT] for name, one in self.own.items()}
        return kinds

    def _blended(self, name: str, values: Tensor) -> Tensor:
        """Blend every input with the next one: the mean of both, or of texts each second token."""
        if name == self.continuous:
            return (values + values.roll(1, 0)) / 2
        if name.endswith(TOKENS):
            return torch.where(torch.arange(values.shape[1]) % 2 == 1, values.roll(1, 0), values)
        return values

    def invert(self, loss: Callable[[Inputs, Tensor], Tensor]) -> None:
        """Make inputs for which the loss is small, and draw those too; nothing, if inputs are discrete.

        ``loss(inputs, choices)`` gets a number between 0 and 1 for every input, which chooses the wanted
        answer.
        """
        if self.continuous is not None:
            self.inverted = self._prepared("inverted", lambda: self._inverted(loss))
            self.about.insert(1, "inverted inputs")

    def _inverted(self, loss: Callable[[Inputs, Tensor], Tensor]) -> Inputs:
        name, parts = self.continuous or "", []
        starts = range(0, INVERTED, AT_ONCE)
        with phase("inverting inputs", len(starts) * INVERSION_STEPS) as advance:
            for start in starts:
                generator = torch.Generator().manual_seed(FRESH * (self.seed + 2) + start)
                given = self._synthetic(min(AT_ONCE, INVERTED - start), POOLED + start)
                choices = torch.rand(len(given[name]), generator=generator)

                def of_pixels(pixels: Tensor, given: Inputs = given, choices: Tensor = choices) -> Tensor:
                    advance(f"steps to invert inputs of {Path(self.model.label).name}")
                    return loss({**given, name: pixels}, choices)

                parts.append({**given, name: invert(given[name], of_pixels, INVERSION_STEPS, generator)})
        return joined(parts)

    def _prepared(self, kind: str, make: Callable[[], Inputs]) -> Inputs:
        """Read inputs that an interrupted run has kept, or make and keep them: that may take minutes."""
        file = self.kept and self.kept.with_name(f"{self.kept.name}-{kind}.safetensors")
        if file is not None and file.exists():
            return load_file(file)
        found = make()
        if file is not None:
            staged = file.with_suffix(".new")
            write_tensors(staged, {name: one.contiguous() for name, one in found.items()}, {})
            os.replace(staged, file)
        return found


def texts_of_a_step(length: int, asked: int | None = None) -> int:
    """Return the number of texts of so many tokens that a process learns in a step."""
    return asked or min(TEXTS, max(LEAST, STEP // length))


def texts_to_learn(length: int) -> int:
    """Return the number of texts of so many tokens, of a model that writes half of them."""
    return min(POOL, WRITTEN, max(LEAST_WRITTEN, TOKENS_WRITTEN // length))


def texts_held_out(length: int) -> int:
    """Return the number of such texts that are held out."""
    return min(HELD_OUT, max(LEAST_HELD_OUT, TOKENS_HELD_OUT // length))


def _some(inputs: Inputs, count: int, generator: torch.Generator) -> Inputs:
    chosen = torch.randint(len(next(iter(inputs.values()))), (count,), generator=generator)
    return {name: one[chosen] for name, one in inputs.items()}


def _alternating(first: Tensor, second: Tensor) -> Tensor:
    mixed = first.clone()
    mixed[::2] = second[::2]
    return mixed

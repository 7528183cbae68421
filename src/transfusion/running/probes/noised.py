"""Noised latents for models that denoise, such as these see while they make an image.

Noise alone is natural only at the first step. So a model makes latents itself, in a few steps from noise, and
noise is mixed into these again, at random times. They are told about by rows of the text encoder's
vocabulary in random order, if there is a text encoder beside the model, or else by noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from transfusion.architecture.layouts import names_in
from transfusion.architecture.table import Config
from transfusion.errors import ArchitectureError, CheckpointError
from transfusion.model.model import Model
from transfusion.model.recognition import Number
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.running.probes.probed_model import seeded_generator
from transfusion.runtime.untrusted_files import path_inside, read_json, validate

Inputs: TypeAlias = dict[str, Tensor]
Place: TypeAlias = tuple[slice, ...]
SIDE, FRAMES, WORDS = 16, 3, 32
"""Rows and columns of patches, at most; frames of patches of a video, and tokens of a text."""
STEPS = 12
"""The steps in which a latent is made from noise."""
LARGEST = 2.0
"""The largest spread of a latent that a model makes; that of real ones is about 1."""
LATENT, TIME, TEXT = "latent", "time", "text"
"""The roles of inputs."""
_BETAS = {"noise": ("scaled_linear", 0.00085, 0.012), "noise_linear": ("linear", 0.0001, 0.02)}
"""The share of new noise in every step, at the first and at the last one, where no file beside says it."""
_POWERS = {"linear": 1, "scaled_linear": 2}
_PREDICTIONS = ("epsilon", "v_prediction", "sample")
_SCHEDULER = Path("scheduler") / "scheduler_config.json"
_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


class _Scheduler(TypedDict, total=False):
    """What the file of a scheduler says of the noise."""

    num_train_timesteps: int
    beta_start: Number
    beta_end: Number
    beta_schedule: str
    prediction_type: str


# ── how noise is mixed in ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Mixing:
    """How much noise there is at a time between 0, an image, and 1, noise; and what a model predicts."""

    predicts: str
    """``flow``, ``epsilon``, ``v_prediction`` or ``sample``."""
    to_image: bool = False
    """Whether the model's time runs from noise to image, and its flow, too."""
    left: Tensor | None = None
    """The share of the image's variance that is left after each discrete step; None of a flow."""

    @classmethod
    def of(cls, model: Model) -> Mixing:
        """Return it for a model: by its family, and by the scheduler's file of its pipeline."""
        kind = model.family.denoises
        if kind not in _BETAS:
            return cls("flow", to_image=kind == "flow_to_image")
        schedule, first, last = _BETAS[kind]
        said: _Scheduler = {}
        if (folder := _pipeline(model)) is not None and (file := folder / _SCHEDULER).is_file():
            hint = "fetch the file that belongs to the model"
            said = validate(read_json(path_inside(folder, file)), _Scheduler, file, hint=hint)
        schedule, count = said.get("beta_schedule", schedule), said.get("num_train_timesteps", 1000)
        first, last = said.get("beta_start", first), said.get("beta_end", last)
        predicts, power = said.get("prediction_type", "epsilon"), _POWERS.get(schedule)
        sensible = 1 < count <= 100_000 and 0 < first <= last < 1 and predicts in _PREDICTIONS
        if power is None or not sensible:
            raise ArchitectureError(
                f"{model.label}: its scheduler has {schedule} noise from {first:g} to {last:g} in {count}"
                f" steps and predicts {predicts}, which is not known",
                hint="leave out `refine`",
            )
        betas = torch.linspace(first ** (1 / power), last ** (1 / power), count, dtype=torch.float64) ** power
        return cls(predicts, left=(1 - betas).cumprod(0).float())

    def exact(self, times: Tensor) -> Tensor:
        """Return the times that the model knows."""
        if self.left is None:
            return times
        count = len(self.left)
        return (times * count).floor().clamp(max=count - 1) / count

    def told(self, times: Tensor) -> Tensor:
        """Return times as the model counts them."""
        return 1 - times if self.to_image else times

    def shares(self, times: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares of image and noise in a mixture, to be multiplied with tensors like this one."""
        if self.left is None:
            kept, noise = 1 - times, times
        else:
            variance = self.left[(times * len(self.left)).round().long()]
            kept, noise = variance.sqrt(), (1 - variance).sqrt()
        shape = (-1, *[1] * (like.ndim - 1))
        return kept.reshape(shape), noise.reshape(shape)

    def split(self, mixture: Tensor, found: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image and the noise in a mixture, of what a model predicts."""
        kept, noise = self.shares(times, mixture)
        match self.predicts:
            case "flow":
                flow = -found if self.to_image else found
                return mixture - noise * flow, mixture + kept * flow
            case "epsilon":
                return (mixture - noise * found) / kept, found
            case "v_prediction":
                return kept * mixture - noise * found, noise * mixture + kept * found
        return found, (mixture - kept * found) / noise


# ── a model that denoises ────────────────────────────────────────────────────────────────────


def is_denoiser(model: Model) -> bool:
    """Whether a table says how a model denoises, and which inputs are the latent, the time and the text."""
    if not model.family.denoises or model.family.draws is None:
        return False
    draws = model.family.draws(model.config)
    return {LATENT, TIME, TEXT} <= {one.role for one in draws.values()}


class Denoiser:
    """A live model that denoises, and the roles of its inputs."""

    def __init__(self, model: Model, module: nn.Module) -> None:
        self.model, self.module, self.mixing = model, module, Mixing.of(model)
        config: Any = module.config
        self.config: Config = dict(config)
        self.grid = _grid(model, self.config)
        assert model.family.draws is not None
        draws = model.family.draws(self.config, self.grid)
        self.roles = {one.role: name for name, one in draws.items() if one.role}
        self._time = draws[self.roles[TIME]]

    def run(self, inputs: Mapping[str, Tensor], *, gradients: bool = False) -> Tensor:
        """Return what the model predicts (inputs, …), in float32."""
        first, time = next(self.module.parameters()), self.roles[TIME]
        given = {
            name: one.to(first.device, first.dtype if one.is_floating_point() and name != time else None)
            for name, one in inputs.items()
        }
        found = [  # one tensor, or one for each input
            *run_model(self.module, self.model.family, given, double=False, gradients=gradients).values()
        ]
        whole = len(found) == 1 and found[0].ndim == inputs[self.roles[LATENT]].ndim
        return (found[0] if whole else torch.stack(found)).float()

    def with_latents(self, conditions: Mapping[str, Tensor], latents: Tensor, times: Tensor) -> Inputs:
        """Return inputs of latents at times between 0 and 1."""
        return {**conditions, self.roles[LATENT]: latents, self.roles[TIME]: self.told(times)}

    def told(self, times: Tensor) -> Tensor:
        """Return the times as the model is told."""
        low = self._time.low or 0.0
        told = low + (self._time.high - low) * self.mixing.told(times)
        return told.round().long() if self._time.whole else told

    def examples(self, count: int, seed: int) -> tuple[Inputs, Tensor]:
        """Draw texts and what else the model is told, and the noise that it starts from."""
        drawn = random_inputs(self.model.family, self.config, batch=count, seed=seed, grid=self.grid)
        drawn = {name: one.float() if one.is_floating_point() else one for name, one in drawn.items()}
        noise, _ = drawn.pop(self.roles[LATENT]), drawn.pop(self.roles[TIME])
        if (rows := self.vocabulary) is not None:
            shape = drawn[self.roles[TEXT]].shape[:2]
            chosen = torch.randint(len(rows), shape, generator=seeded_generator(seed, 1))
            drawn[self.roles[TEXT]] = rows[chosen]  # (examples, words, width)
        return drawn, noise

    def made(self, conditions: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Place]:
        """Let the model make latents from noise; also return which part of its inputs it predicts."""
        mixture, image, there = noise.clone(), noise, (slice(None),) * noise.ndim
        for now, then in pairwise(self.mixing.exact(torch.linspace(1, 0, STEPS + 1))[:, None]):
            found = self.run(self.with_latents(conditions, mixture, now.expand(len(mixture)))).cpu()
            there = _common(self.model, mixture, found)
            image, noise = self.mixing.split(mixture[there], found[there], now)
            spread = image.flatten(1).std(1).reshape(-1, *[1] * (image.ndim - 1))
            image = image * (LARGEST / spread).clamp(max=1)
            kept, noisy = self.mixing.shares(then, image)
            mixture[there] = kept * image + noisy * noise
        mixture[there] = image
        return mixture, there

    def noised(self, latents: Tensor, there: Place, times: Tensor, generator: torch.Generator) -> Tensor:
        """Mix noise into a part of latents."""
        mixed, image = latents.clone(), latents[there]
        kept, noisy = self.mixing.shares(times, image)
        mixed[there] = kept * image + noisy * torch.randn(image.shape, generator=generator)
        return mixed

    @cached_property
    def vocabulary(self) -> Tensor | None:
        """The rows of the text encoders beside the model, of unit size; None if there are none that fit.

        Of several, one whose width is that of the texts counts, or all side by side.
        """
        draws = random_inputs(self.model.family, self.config, batch=1, grid=self.grid)
        width, folder = draws[self.roles[TEXT]].shape[-1], _pipeline(self.model)
        found = [] if folder is None else [*_tables(folder)]
        fitting = [one for one in found if one.shape[1] == width][:1] or found
        if not fitting or sum(one.shape[1] for one in fitting) != width:
            return None
        count = min(map(len, fitting))
        return torch.cat([one[:count] / one.square().mean().sqrt() for one in fitting], 1)

    @property
    def about(self) -> str:
        """A description of the inputs."""
        texts = "noise for texts" if self.vocabulary is None else "texts of the encoder's vocabulary"
        return f"latents that the model makes, noised at random times, with {texts}"


def _common(model: Model, mixture: Tensor, found: Tensor) -> Place:
    """Return the part of inputs and outputs that is in both: some have channels of their own."""
    if mixture.ndim != found.ndim:
        raise ArchitectureError(
            f"{model.label}: its outputs have {found.ndim} dimensions, and its latents {mixture.ndim}",
            hint="leave out `refine`",
        )
    return tuple(slice(min(sizes)) for sizes in zip(mixture.shape, found.shape, strict=True))


def _grid(model: Model, config: Config) -> dict[str, int]:
    """Return the numbers of patches and words: no more rows and columns than a model is made for."""
    sizes = {"rows": SIDE, "columns": SIDE, "frames": FRAMES, "words": WORDS}
    assert model.family.draws is not None
    patches = {**sizes, "rows": 1, "columns": 1}
    one = next(draw for draw in model.family.draws(config, patches).values() if draw.role == LATENT)
    if isinstance(most := config.get("sample_size"), int) and len(one.shape) > 2:
        side = max(2, min(SIDE, most // one.shape[-1]))
        sizes |= {"rows": side, "columns": side}
    return sizes


def _pipeline(model: Model) -> Path | None:
    """Return the folder of the pipeline that a model is a part of."""
    if model.checkpoint.in_memory:
        return None
    root = model.checkpoint.root
    return root.parent if (root.parent / "model_index.json").is_file() else None


def _tables(folder: Path) -> Iterator[Tensor]:
    """Yield the token embeddings of a pipeline's text encoders, as far as there are tables for these."""
    for name in _ENCODERS:
        if not (folder / name / "config.json").is_file():
            continue
        try:
            encoder = Model.open(path_inside(folder, folder / name))
        except (ArchitectureError, CheckpointError):
            continue  # no known family, or no weights: noise stands for texts, which the record says
        known = encoder.architecture
        for tensor, layout in known.backbone.items():
            axes = {known.spaces[id].axis for id in names_in(layout.items[0])}
            if layout.arrow == "->" and axes == {VOCABULARY}:
                yield encoder.read(tensor).float()
                break

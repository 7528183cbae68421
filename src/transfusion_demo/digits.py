"""The demo on images: vision transformers, scikit-learn's digits, and much noise.

Two vision transformers learn the same digits from different seeds: the bases A and B. A is fine-tuned on
a shifted domain, digits in noise; its head stays as it is, as in the paper. Then the fine-tune moves
to B without any data. Independent models are the hard case. In the second, which has an answer to be
found, the new release is A trained on and its units shuffled: weights have drifted, names are lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment
from transfusion.checkpoint.publishing import write_json
from transfusion.evaluation.interpolation import barrier, curves_metadata
from transfusion.matching.alignment_run import align
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.run_record import RunRecord
from transfusion.transportation.applied_model import apply
from transfusion.verification.equivalence import verify
from transfusion_demo.output_folder import write_result
from transfusion_demo.results import (
    DemoRow,
    DemoScores,
    JudgedModel,
    answers,
    curve,
    data,
    evaluation,
    score,
    sweep,
)
from transfusion_demo.training import TrainingSchedule, draw, fit
from transfusion_demo.transport_steps import move, pi_of, predict_activations

METHODS = {
    "naive": "τ as it is",
    "transfusion": "π(τ), the paper's π",
    "guarded": "π(τ), guarded",
    "functional": "π(τ), functional",
}
SWEPT = ("naive", "transfusion", "functional")
SWEEP = {"finetuned": "a-tuned", "base": "a", "onto": "b"}
VIT = {
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 10,
    "initializer_range": 0.03,
}
MEAN, DEVIATION = 0.5, 0.25
"""What the models' preparation takes from pixels between 0 and 1, and divides them by."""
BLACK = (0 - MEAN) / DEVIATION
TURN, GROW, SHIFT = 0.2, 0.12, 0.22
"""How far images are turned (radians), enlarged, and moved (in halves of the image) while models learn."""


class DigitsPlan(NamedTuple):
    """How long everything takes."""

    pretraining: TrainingSchedule = TrainingSchedule(400, 2e-3)
    continued: TrainingSchedule = TrainingSchedule(150, 1e-3)
    tuning: TrainingSchedule = TrainingSchedule(120, 1e-3)
    tests: int = 500
    """Images that nobody is trained on."""
    draws: int = 5
    """How often each of them is shown, in other noise."""
    noise: float = 0.5
    """Its standard deviation, where black is 0 and white is 1."""
    width: int = 128
    """Of the models; their MLPs have twice as many units."""
    layers: int = 2


@dataclass(frozen=True)
class Digits:
    """Images and labels, to learn from and to be tested on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, tests: int, seed: int) -> Digits:
        """All digits in an order of the seed's own: the first ones are for tests."""
        bundle = require_library("sklearn.datasets", extra="demo").load_digits()
        images = (torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 16 - MEAN) / DEVIATION
        labels = torch.tensor(bundle.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        test, train = order[:tests], order[tests:]
        return cls((images[train], labels[train]), (images[test], labels[test]))


def in_noise(images: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """The shifted domain: every pixel is off by some number."""
    return images + noise / DEVIATION * torch.randn(images.shape, generator=generator)


def distorted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images turned, resized and moved a little, each in its own way; what is new at the edges is black."""
    turn, size, right, down = (2 * torch.rand(4, len(images), generator=generator) - 1).unbind()
    turn, size = TURN * turn, 1 + GROW * size
    across, along = size * turn.cos(), size * turn.sin()
    rows = ((across, -along, SHIFT * right), (along, across, SHIFT * down))
    views = torch.stack([torch.stack(row, 1) for row in rows], 1)
    grid = nn.functional.affine_grid(views, list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images - BLACK, grid, align_corners=False) + BLACK


class DigitsDemo(NamedTuple):
    """What all steps of the demo share."""

    plan: DigitsPlan
    digits: Digits
    folder: Path
    seed: int

    def base(self, number: int) -> Any:
        """A model that knows digits, from a seed of its own."""
        transformers = require_library("transformers")
        torch.manual_seed(10 * self.seed + number)
        width, layers = self.plan.width, self.plan.layers
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, **sizes))
        return self.taught(model, self.plan.pretraining, number)

    def tuned(self, base: Any, number: int) -> Any:
        """The base, trained on the shifted domain with its head frozen."""
        model = copy.deepcopy(base)
        model.classifier.requires_grad_(False)
        return self.taught(model, self.plan.tuning, number, noise=self.plan.noise)

    def taught(self, model: Any, schedule: TrainingSchedule, number: int, *, noise: float = 0.0) -> Any:
        """The model, trained on digits, which it never sees twice in the same way."""
        images, labels = self.digits.train

        def loss(generator: torch.Generator) -> Tensor:
            batch = draw(len(images), schedule, generator)
            seen = distorted(images[batch], generator)
            logits = model(in_noise(seen, noise, generator) if noise else seen).logits
            return nn.functional.cross_entropy(logits, labels[batch])

        fit(model.train().parameters(), loss, schedule, seed=10 * self.seed + number)
        return model.eval()

    def save(self, model: Any, name: str) -> Path:
        """Save a model with the preparation of its images."""
        place = self.folder / name
        model.save_pretrained(place)
        write_json(place / "preprocessor_config.json", PREPARATION)
        return place

    # measuring

    def shown(self, draws: int) -> tuple[Tensor, Tensor]:
        """The tests in noise."""
        images, labels = self.digits.test
        generator = torch.Generator().manual_seed(7)
        seen = [in_noise(images, self.plan.noise, generator) for _ in range(draws)]
        return torch.cat(seen), labels.repeat(draws)

    def judged(self, draws: int) -> JudgedModel:
        """What the tests are."""
        count = len(self.digits.test[0])
        question = "class of every example"
        return JudgedModel(
            data("digits in noise", draws * count, question, 10),
            data("plain digits", count, question, 10),
        )

    def measure(self, model: Any, draws: int) -> DemoScores:
        """A model on the task and on the plain digits."""
        images, labels = self.shown(draws)
        plain, theirs = self.digits.test

        def ask(batch: Tensor) -> Tensor:
            logits: Tensor = model(batch).logits
            return logits

        return DemoScores(score(answers(ask, images), labels), score(answers(ask, plain), theirs))

    def save_tests(self) -> None:
        """The tests as files, for other verbs."""
        for name, (images, labels) in (("task", self.shown(1)), ("support", self.digits.test)):
            tensors = {"pixel_values": images.contiguous(), "labels": labels.contiguous()}
            save_file(tensors, self.folder / f"{name}.safetensors")


PREPARATION = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": False,
    "do_rescale": True,
    "rescale_factor": 1 / 16,
    "do_normalize": True,
    "image_mean": [MEAN],
    "image_std": [DEVIATION],
}


def run(
    folder: Path, *, seed: int, say: Callable[[str], None], plan: DigitsPlan | None = None
) -> dict[str, Any]:
    """Train, align, transport, and measure; everything is kept in the folder."""
    plan = plan or DigitsPlan()
    staging = DigitsDemo(plan, Digits.load(plan.tests, seed), folder, seed)
    staging.save_tests()
    say("training A and B on digits, from different seeds …")
    a, b = staging.base(1), staging.base(2)
    say("fine-tuning A on digits in noise (and B too, to know the ceiling) …")
    tuned, ceiling = staging.tuned(a, 3), staging.tuned(b, 4)
    for name, model in (("a", a), ("b", b), ("a-tuned", tuned), ("b-tuned", ceiling)):
        staging.save(model, name)
    say("aligning, and moving the fine-tune onto B …")
    moved = {method: load(move(folder, "a-tuned", method, "b")) for method in METHODS}
    onto_b = table(staging, "B", (b, moved, ceiling), "evaluation")
    say("the same onto a successor of A whose units are shuffled …")
    successor = staging.taught(copy.deepcopy(a), plan.continued, 5)
    proof = shuffle(staging, successor)
    moved_on = {method: load(move(folder, "a-tuned", method, "successor")) for method in METHODS}
    own = staging.tuned(successor, 6)
    save_shuffled(staging, own, "successor-tuned")
    models = (load(folder / "successor"), moved_on, own)
    onto_successor = table(staging, "successor", models, "evaluation-successor")
    say("other strengths, and the way from A to B …")
    strengths = swept(staging, b, moved)
    way = between(folder)
    predict_activations(folder)
    return {
        "onto_b": onto_b,
        "onto_successor": onto_successor,
        "sweep": strengths,
        "barrier": {curve["label"]: curve["height"] for curve in way["curves"]},
        "proof": proof,
    }


def table(
    staging: DigitsDemo, name: str, models: tuple[Any, dict[str, Any], Any], result: str
) -> dict[str, Any]:
    """The base, what arrives by every method, and the base fine-tuned itself."""
    record, (base, moved, ceiling) = RunRecord("evaluate"), models
    where = name.lower()
    named = {
        where: (f"{name} as it is", base),
        **{f"{where}-{method}": (f"{name} + {how}", moved[method]) for method, how in METHODS.items()},
        f"{where}-tuned": (f"ceiling: {name} fine-tuned itself", ceiling),
    }
    draws = staging.plan.draws
    rows = [
        DemoRow(called, staging.folder / place, staging.measure(model, draws))
        for place, (called, model) in named.items()
    ]
    metadata = evaluation(staging.judged(draws), rows)
    write_result(staging.folder, record, metadata, result)
    return metadata


def swept(staging: DigitsDemo, b: Any, moved: dict[str, Any]) -> dict[str, Any]:
    """B + α·π(τ), which lies on the straight line through B and what was moved with α = 1."""
    record, before = RunRecord("sweep"), staging.measure(b, 1)
    start = {name: tensor.clone() for name, tensor in b.state_dict().items()}
    blend = copy.deepcopy(b)

    def at(method: str, alpha: float) -> DemoScores:
        end = moved[method].state_dict()
        blend.load_state_dict({name: torch.lerp(start[name], end[name], alpha) for name in start})
        return staging.measure(blend, 1)

    curves = [curve(method, before, partial(at, method)) for method in SWEPT]
    names = {what: str(staging.folder / name) for what, name in SWEEP.items()}
    metadata = sweep(names, staging.judged(1), before, curves)
    write_result(staging.folder, record, metadata)
    return metadata


def between(folder: Path) -> dict[str, Any]:
    """The loss on the straight way from A to B, and from π(A) to B."""
    record, ends = RunRecord("barrier"), (folder / "a", folder / "b")
    plain, moved = (
        barrier(*ends, via=pi, data=folder / "support.safetensors", points=7)
        for pi in (None, pi_of(folder, "b", "guarded"))
    )
    metadata = curves_metadata({"vanilla": plain, "guarded": moved})
    write_result(folder, record, metadata)
    return metadata


def shuffle(staging: DigitsDemo, model: Any) -> float:
    """Save a model with its units shuffled; gives the largest difference that this makes."""
    plain = staging.save(model, "successor-in-order")
    exact = in_disorder(staging, plain)
    apply(exact, plain).save(staging.folder / "successor")
    exact.save(staging.folder / "pi-shuffled.safetensors")
    return verify(plain, via=exact).difference


def save_shuffled(staging: DigitsDemo, model: Any, name: str) -> None:
    """Save a fine-tune of the successor in the order that the successor was saved in."""
    plain = staging.save(model, f"{name}-in-order")
    apply(in_disorder(staging, plain), plain).save(staging.folder / name)


def in_disorder(staging: DigitsDemo, model: Path) -> Alignment:
    """The successor's new order of units, which is the same for all models of its shape."""
    return align(model, model, method="random", residual="tied", seed=staging.seed)


def load(folder: Path) -> Any:
    """A model, as its library reads it."""
    return require_library("transformers").ViTForImageClassification.from_pretrained(folder).eval()

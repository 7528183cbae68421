"""The demo on images: vision transformers, scikit-learn's digits, and noise.

Two vision transformers learn the same digits from different seeds: the bases A and B. A is fine-tuned on
digits in noise with its head frozen, as in the paper. The fine-tune then moves to B without any data. Models
that were trained apart are the hard case. The second case has a known answer: a successor of A, which is A
trained on, with its units shuffled.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment, require_one_shape
from transfusion.evaluation.barrier import barrier
from transfusion.files.publishing import write_json
from transfusion.matching.align import align
from transfusion.runtime.optional_libraries import require_library
from transfusion.transport.apply import apply
from transfusion.verification.verify import verify
from transfusion_demo.steps import (
    REFINED,
    DemoProgress,
    DemoScores,
    DemoTests,
    TrainingSchedule,
    describe_data,
    draw,
    evaluate_models,
    fit,
    move,
    pi_path,
    predict_activations,
    refine,
    run_in_batches,
    score,
    sweep_alpha,
)

LIBRARIES = ("transformers", "sklearn.datasets")
METHODS = {
    "naive": "τ as it is",
    "transfusion": "π(τ), the paper's π",
    "guarded": "π(τ), guarded",
    "functional": "π(τ), functional",
}
TITLES = {**METHODS, REFINED: "π(τ), functional and refined"}
SWEPT = ("naive", "transfusion", "functional")
VIT = {
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 10,
    "initializer_range": 0.03,
}
MEAN, DEVIATION = 0.5, 0.25
"""The mean and the standard deviation by which pixels between 0 and 1 are normalised."""
BLACK = (0 - MEAN) / DEVIATION
PREPROCESSING = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": False,
    "do_rescale": True,
    "rescale_factor": 1 / 16,
    "do_normalize": True,
    "image_mean": [MEAN],
    "image_std": [DEVIATION],
}
TURN, GROW, SHIFT = 0.2, 0.12, 0.22
"""The largest rotation (radians), change of size and shift (in halves of the image) in training."""


class DigitsPlan(NamedTuple):
    """Sizes and training times."""

    pretraining: TrainingSchedule = TrainingSchedule(400, 2e-3)
    continued: TrainingSchedule = TrainingSchedule(150, 1e-3)
    tuning: TrainingSchedule = TrainingSchedule(120, 1e-3)
    tests: int = 500
    """The number of test images."""
    draws: int = 5
    """How often each test image is shown, in new noise each time."""
    noise: float = 0.5
    """The standard deviation of the noise, where black is 0 and white is 1."""
    refinement: int = 300
    """The number of steps of the refinement."""
    width: int = 128
    """The hidden size of the models; their MLPs have twice as many units."""
    layers: int = 2


@dataclass(frozen=True)
class Digits:
    """Images and labels for training and for tests."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, tests: int, seed: int) -> Digits:
        """Load all digits in a random order; the first ones are for tests."""
        bundle = require_library("sklearn.datasets", extra="demo").load_digits()
        images = (torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 16 - MEAN) / DEVIATION
        labels = torch.tensor(bundle.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        test, train = order[:tests], order[tests:]
        return cls((images[train], labels[train]), (images[test], labels[test]))


def in_noise(images: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise to every pixel: the shifted domain."""
    return images + noise / DEVIATION * torch.randn(images.shape, generator=generator)


def distorted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate, resize and shift each image a little at random; new pixels at the edges are black."""
    turn, size, right, down = (2 * torch.rand(4, len(images), generator=generator) - 1).unbind()
    turn, size = TURN * turn, 1 + GROW * size
    across, along = size * turn.cos(), size * turn.sin()
    rows = ((across, -along, SHIFT * right), (along, across, SHIFT * down))
    views = torch.stack([torch.stack(row, 1) for row in rows], 1)
    grid = nn.functional.affine_grid(views, list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images - BLACK, grid, align_corners=False) + BLACK


class DigitsDemo(NamedTuple):
    """The data, the sizes and the folder of a demo, with the steps that need them."""

    plan: DigitsPlan
    digits: Digits
    folder: Path
    seed: int

    def train_base(self, number: int) -> Any:
        """Train a new model on digits. ``number`` makes its seed."""
        transformers = require_library("transformers")
        torch.manual_seed(10 * self.seed + number)
        width, layers = self.plan.width, self.plan.layers
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, **sizes))
        return self.train(model, self.plan.pretraining, number)

    def finetune(self, base: Any, number: int) -> Any:
        """Train a copy of the base on digits in noise, with its head frozen."""
        model = copy.deepcopy(base)
        model.classifier.requires_grad_(False)
        return self.train(model, self.plan.tuning, number, noise=self.plan.noise)

    def train(self, model: Any, schedule: TrainingSchedule, number: int, *, noise: float = 0.0) -> Any:
        """Train a model on digits, which are distorted anew in every batch."""
        images, labels = self.digits.train

        def loss(generator: torch.Generator) -> Tensor:
            batch = draw(len(images), schedule, generator)
            inputs = distorted(images[batch], generator)
            logits = model(in_noise(inputs, noise, generator) if noise else inputs).logits
            return nn.functional.cross_entropy(logits, labels[batch])

        fit(model.train().parameters(), loss, schedule, seed=10 * self.seed + number)
        return model.eval()

    def save(self, model: Any, name: str) -> Path:
        """Save a model with its image processor."""
        folder = self.folder / name
        model.save_pretrained(folder)
        write_json(folder / "preprocessor_config.json", PREPROCESSING)
        return folder

    def noisy_tests(self, draws: int) -> tuple[Tensor, Tensor]:
        """The test images in noise, each ``draws`` times, and their labels."""
        images, labels = self.digits.test
        generator = torch.Generator().manual_seed(7)
        noisy = [in_noise(images, self.plan.noise, generator) for _ in range(draws)]
        return torch.cat(noisy), labels.repeat(draws)

    def save_tests(self) -> None:
        """Save the tests as files for other verbs."""
        for name, (images, labels) in (("task", self.noisy_tests(1)), ("support", self.digits.test)):
            tensors = {"pixel_values": images.contiguous(), "labels": labels.contiguous()}
            save_file(tensors, self.folder / f"{name}.safetensors")

    def tests(self, draws: int) -> DemoTests:
        """Describe the task and the support."""
        count, question = len(self.digits.test[0]), "class of every example"
        return {
            "task": describe_data("digits in noise", draws * count, question, 10),
            "support": describe_data("plain digits", count, question, 10),
        }

    def measure(self, model: Any, draws: int) -> DemoScores:
        """Measure a model on the task and on the support."""

        def scored(images: Tensor, labels: Tensor) -> dict[str, Any]:
            return score(run_in_batches(lambda batch: model(batch).logits, images), labels)

        return DemoScores(scored(*self.noisy_tests(draws)), scored(*self.digits.test))

    def evaluate(
        self, name: str, base: Any, moved: dict[str, Any], ceiling: Any, result: str
    ) -> dict[str, Any]:
        """Compare a base, the fine-tune moved onto it by every method, and the base fine-tuned itself."""
        folder, draws = name.lower(), self.plan.draws
        models = {
            folder: (f"{name} as it is", base),
            **{f"{folder}-{how}": (f"{name} + {TITLES[how]}", model) for how, model in moved.items()},
            f"{folder}-tuned": (f"ceiling: {name} fine-tuned itself", ceiling),
        }
        return evaluate_models(
            self.folder, self.tests(draws), models, lambda model: self.measure(model, draws), result
        )

    def sweep(self, b: Any, moved: dict[str, Any]) -> dict[str, Any]:
        """Measure B + α·π(τ), which lies on the line through B and the model that was moved with α = 1."""
        start = {name: tensor.clone() for name, tensor in b.state_dict().items()}
        blend = copy.deepcopy(b)

        def at(method: str, alpha: float) -> DemoScores:
            end = moved[method].state_dict()
            blend.load_state_dict({name: torch.lerp(start[name], end[name], alpha) for name in start})
            return self.measure(blend, 1)

        methods = {method: partial(at, method) for method in SWEPT}
        return sweep_alpha(self.folder, "a-tuned", self.tests(1), self.measure(b, 1), methods)

    def save_shuffled(self, model: Any, name: str) -> tuple[Path, Alignment]:
        """Save a model as it is and with its units shuffled; return the first, and the order of units.

        The order is the same for all models of one shape.
        """
        plain = self.save(model, f"{name}-in-order")
        order = require_one_shape(align(plain, plain, method="random", residual="tied", seed=self.seed))
        apply(order, plain).save(self.folder / name)
        return plain, order


def run(folder: Path, *, seed: int, progress: DemoProgress, plan: DigitsPlan | None = None) -> dict[str, Any]:
    """Train, align, transport and measure; all models and results stay in the folder."""
    plan = plan or DigitsPlan()
    demo = DigitsDemo(plan, Digits.load(plan.tests, seed), folder, seed)
    demo.save_tests()
    progress.step("training A and B on digits, from different seeds")
    a, b = demo.train_base(1), demo.train_base(2)
    progress.step("fine-tuning A on digits in noise, and B as the ceiling")
    tuned, ceiling = demo.finetune(a, 3), demo.finetune(b, 4)
    for name, model in (("a", a), ("b", b), ("a-tuned", tuned), ("b-tuned", ceiling)):
        demo.save(model, name)
    progress.step("aligning A with B, and moving the fine-tune onto B")
    moved = {method: load(move(folder, "a-tuned", method, "b", progress)) for method in METHODS}
    progress.step("refining it on B: the fine-tune answers synthetic inputs")
    moved[REFINED] = load(refine(folder, "a-tuned", plan.refinement, progress))
    onto_b = demo.evaluate("B", b, moved, ceiling, "evaluation")
    progress.step("moving the fine-tune onto a successor of A with shuffled units")
    successor = demo.train(copy.deepcopy(a), plan.continued, 5)
    in_order, order = demo.save_shuffled(successor, "successor")
    order.save(folder / "pi-shuffled.safetensors")
    difference = verify(in_order, via=order).difference
    moved_on = {method: load(move(folder, "a-tuned", method, "successor", progress)) for method in METHODS}
    own = demo.finetune(successor, 6)
    demo.save_shuffled(own, "successor-tuned")
    shuffled = load(folder / "successor")
    onto_successor = demo.evaluate("successor", shuffled, moved_on, own, "evaluation-successor")
    progress.step("measuring other values of α, and the barrier between A and B")
    by_alpha = demo.sweep(b, moved)
    ends, data, pi = (
        (folder / "a", folder / "b"),
        folder / "support.safetensors",
        pi_path(folder, "b", "guarded"),
    )
    between = barrier(*ends, data=data, via=pi, points=7, progress=progress, output=folder / "barrier.json")
    predict_activations(folder)
    return {
        "onto_b": onto_b,
        "onto_successor": onto_successor,
        "sweep": by_alpha,
        "barrier": {curve["label"]: curve["height"] for curve in between.metadata()["curves"]},
        "proof": difference,
    }


def load(folder: Path) -> Any:
    """Load a model with transformers."""
    return require_library("transformers").ViTForImageClassification.from_pretrained(folder).eval()

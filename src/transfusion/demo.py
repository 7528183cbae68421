"""The demo: the whole job on real digits, with models small enough to train while you wait.

Two vision transformers learn scikit-learn's digits from different images and different seeds: the
bases A and B. A is fine-tuned on a shifted domain, digits on a bad screen, where three pixels in ten
are stuck at white; its head stays as it is, as in the paper. Then the fine-tune moves to B without any
data. Independent models are the hard case. In the second, which has an answer to be found, the new
release is A trained on, with other images, and its units shuffled: weights have drifted, names are lost.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transfusion.live import library
from transfusion.matching import align
from transfusion.transportation import apply, transport
from transfusion.verification import verify
from transfusion.writer import staged_folder, write_json


class Schedule(NamedTuple):
    """How long, and how fast."""

    epochs: int
    rate: float


TEST_IMAGES = 500
STUCK_PIXELS = 0.3
PRETRAINING = Schedule(epochs=100, rate=2e-3)
CONTINUED = Schedule(epochs=30, rate=1e-3)
FINE_TUNING = Schedule(epochs=15, rate=1e-3)
METHODS = {
    "naive": "τ as it is",
    "transfusion": "π(τ), the paper's π",
    "guarded": "π(τ), guarded",
    "functional": "π(τ), functional",
}
VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "num_labels": 10,
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.12,
}


@dataclass(frozen=True)
class Digits:
    """Images and labels, in three parts that share no image."""

    for_a: tuple[Tensor, Tensor]
    for_b: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, seed: int) -> Digits:
        bundle = library("sklearn.datasets", extra="demo").load_digits()
        images = torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 8 - 1
        labels = torch.tensor(bundle.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        test, rest = order[:TEST_IMAGES], order[TEST_IMAGES:]
        half = len(rest) // 2
        parts = ((images[part], labels[part]) for part in (rest[:half], rest[half:], test))
        return cls(*parts)


def on_bad_screen(images: Tensor, seed: int) -> Tensor:
    """The shifted domain: some pixels are stuck at white, others in every image."""
    generator = torch.Generator().manual_seed(seed)
    stuck = torch.rand(images.shape, generator=generator) < STUCK_PIXELS
    return torch.where(stuck, 1.0, images)


def run(
    *, seed: int = 0, keep: Path | None = None, force: bool = False, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train, align, transport, and measure; the result is a table of accuracies in percent."""
    library("transformers").utils.logging.disable_progress_bar()
    with _workplace(keep, force=force) as folder:
        digits = Digits.load(seed)
        say("training A and B on different digits, from different seeds …")
        a = train(new_vit(seed + 1), *digits.for_a, PRETRAINING, seed=seed + 1)
        b = train(new_vit(seed + 2), *digits.for_b, PRETRAINING, seed=seed + 2)
        say("fine-tuning A on the bad screen (and B too, to know the ceiling) …")
        tuned = fine_tune(a, *digits.for_a, seed=seed + 3)
        ceiling = fine_tune(b, *digits.for_b, seed=seed + 3)
        for name, model in (("a", a), ("b", b), ("a-tuned", tuned), ("b-tuned", ceiling)):
            model.save_pretrained(folder / name)
        say("aligning, and moving the fine-tune onto B …")
        moved = {method: move(folder, "b", method, f"b-{method}") for method in METHODS}
        say("the same onto a successor of A whose units are shuffled …")
        successor = train(copy.deepcopy(a), *digits.for_b, CONTINUED, seed=seed + 4)
        proof = shuffle(successor, folder / "successor", seed)
        onto_successor = {
            method: move(folder, "successor", method, f"successor-{method}") for method in METHODS
        }
        rows = {
            "B as it is": b,
            **{f"B + {how}": moved[method] for method, how in METHODS.items()},
            "ceiling: B fine-tuned itself": ceiling,
        }
        planted = {
            "successor as it is": load_vit(folder / "successor"),
            **{f"successor + {how}": onto_successor[method] for method, how in METHODS.items()},
            "ceiling: successor fine-tuned itself": fine_tune(successor, *digits.for_b, seed=seed + 3),
        }
        result = {
            "seed": seed,
            "onto_b": {name: measure(model, digits) for name, model in rows.items()},
            "onto_successor": {name: measure(model, digits) for name, model in planted.items()},
            "proof": proof,
            "kept_in": str(keep) if keep else None,
        }
        write_json(folder / "transfusion.json", result)
        return result


def shuffle(model: Any, folder: Path, seed: int) -> float:
    """Save a model with its units shuffled; gives the largest difference that this makes."""
    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        exact = align(plain, plain, method="random", residual="tied", seed=seed)
        apply(exact, plain).save(folder)
        return verify(plain, via=exact).difference


def move(folder: Path, onto: str, method: str, name: str) -> Any:
    """Transport A's fine-tune onto a base in the folder, and load the result as a user would."""
    moved = transport(folder / "a-tuned", base=folder / "a", onto=folder / onto, method=method)
    return load_vit(moved.save(folder / name))


# ── models ───────────────────────────────────────────────────────────────────────────────────


def new_vit(seed: int) -> Any:
    transformers = library("transformers")
    torch.manual_seed(seed)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))


def load_vit(folder: Path) -> Any:
    return library("transformers").ViTForImageClassification.from_pretrained(folder).eval()


def train(model: Any, images: Tensor, labels: Tensor, schedule: Schedule, *, seed: int) -> Any:
    """Plain supervised training in batches of 64, with shifts by a pixel."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=schedule.rate, weight_decay=0.05)
    steps = schedule.epochs * -(-len(images) // 64)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.rate, steps)
    model.train()
    for _ in range(schedule.epochs):
        for batch in torch.split(torch.randperm(len(images), generator=generator), 64):
            shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
            logits = model(torch.roll(images[batch], shift, (2, 3))).logits
            loss = nn.functional.cross_entropy(logits, labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            rates.step()
    return model.eval()


def fine_tune(base: Any, images: Tensor, labels: Tensor, *, seed: int) -> Any:
    """The base, trained on the shifted domain with its head frozen."""
    model = copy.deepcopy(base)
    model.classifier.requires_grad_(False)
    return train(model, on_bad_screen(images, seed), labels, FINE_TUNING, seed=seed)


@torch.no_grad()
def measure(model: Any, digits: Digits) -> dict[str, float]:
    """Accuracy in percent on the task (five draws of stuck pixels) and on the plain digits."""
    images, labels = digits.test
    screens = torch.cat([on_bad_screen(images, seed) for seed in range(100, 105)])
    return {
        "task": _accuracy(model(screens).logits, labels.repeat(5)),
        "support": _accuracy(model(images).logits, labels),
    }


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(-1) == labels).float().mean())


@contextmanager
def _workplace(keep: Path | None, *, force: bool) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        with staged_folder(keep, force=force) as staged:
            yield staged

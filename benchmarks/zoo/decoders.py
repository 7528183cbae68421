"""Trials of language models that others trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from transfusion.running.probes.texts import corpus
from transfusion_demo import reviews
from zoo.models import MODELS
from zoo.packages import ZOO
from zoo.trials import BETWEEN_SHAPES, WAYS, Measure, Trial, Way, trained


def learn(model: Any, batches: Callable[[int], Mapping[str, Tensor]], steps: int, rate: float) -> Any:
    """Train a model on its own loss, and return it."""
    trainable = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=rate)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 10, 0.5 * (1 + math.cos(math.pi * step / steps)))
        loss = model(**batches(step)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
    return model.eval()


# ── stories: a LoRA onto a base that was trained on ──────────────────────────────────────────

WINDOW = 96


def windows(base: Path, texts: list[str]) -> Tensor:
    """Return texts as windows of tokens (windows, tokens), joined and cut."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ids = [id for text in texts for id in tokenizer(text, verbose=False)["input_ids"]]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).reshape(-1, WINDOW)


@cache
def review_windows(base: Path) -> tuple[Tensor, Tensor]:
    """Return windows of film reviews to learn from, and to test on."""
    found = windows(base, [text for text, _ in reviews.load(900)])
    return found[200:], found[:200]


def of_windows(found: Tensor, size: int = 8, seed: int = 1) -> Callable[[int], dict[str, Tensor]]:
    """Return batches of windows, by step."""

    def batch(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        some = found[torch.randint(len(found), (size,), generator=generator)]
        return {"input_ids": some, "labels": some}

    return batch


def learn_lora(base: Path, to: Path, steps: int = 150, rank: int = 8) -> None:
    """Train a LoRA for film reviews."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    about = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, about)
    learn(adapted, of_windows(review_windows(base)[0]), steps, 2e-3).save_pretrained(to)


def train_on(base: Path, to: Path, steps: int = 100) -> None:
    """Train a base on, on the passages of the bundled corpus: its new release."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    texts = [passage for several in corpus().values() for passage in several]
    learn(model, of_windows(windows(base, texts)), steps, 3e-4).save_pretrained(to)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(to)


def likelihood(found: Tensor) -> Callable[[nn.Module], float]:
    """Return a score: minus the loss on windows."""

    def score(model: nn.Module) -> float:
        parts = [model(input_ids=some, labels=some).loss for some in torch.split(found, 25)]
        return -float(torch.stack(parts).mean())

    return torch.no_grad()(score)


def on(base: Path) -> Callable[[Any], nn.Module]:
    """Return what loads a moved adapter on its base, as a user of PEFT does."""

    def module(moved: Any) -> nn.Module:
        folder = ZOO / "moved"
        moved.save(folder, force=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        adapted: nn.Module = peft.PeftModel.from_pretrained(model, folder)
        return adapted

    return module


def _stories() -> Mapping[str, Way]:
    a = MODELS["stories"].folder()
    b = trained("stories-trained-on", lambda to: train_on(a, to))
    tuned = trained("stories-lora", lambda to: learn_lora(a, to))
    ceiling = trained("stories-lora-b", lambda to: learn_lora(b, to))
    score = likelihood(review_windows(a)[1])
    kept = likelihood(windows(a, [text for several in corpus().values() for text in several])[:100])
    model = transformers.AutoModelForCausalLM.from_pretrained(b)
    best = peft.PeftModel.from_pretrained(model, ceiling)
    ways = {name: WAYS[name] for name in ("unchanged", "default")}
    return Measure(tuned, a, b, score, score(best), kept, ways=ways, module_of=on(b)).all()


# ── proteins: a fine-tune onto another width and depth ───────────────────────────────────────

TAGS = {"camel": 25, "human": 26, "mouse": 27, "rabbit": 28, "rat": 29, "heavy": 31, "light": 32}
PROTEIN = 120
"""Tokens of a sequence: two tags, then residues."""
SHOWN, TESTED = 640, 100


@cache
def proteins(chain: str, species: str) -> Tensor:
    """Return sequences (sequences, tokens) that the larger model writes for a chain and a species."""
    place = ZOO / "trained" / f"proteins-{chain}-{species}.safetensors"
    if not place.exists():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODELS["iglm"].folder())
        torch.manual_seed(0)
        no_residue = [[id] for id in (*range(5), *range(25, 33))]
        with torch.no_grad():
            found = model.generate(
                torch.tensor([[TAGS[chain], TAGS[species]]]).expand(SHOWN + TESTED, 2),
                do_sample=True,
                min_new_tokens=PROTEIN - 2,
                max_new_tokens=PROTEIN - 2,
                bad_words_ids=no_residue,
                pad_token_id=0,
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        save_file({"sequences": found.contiguous()}, place)
    return load_file(place)["sequences"]


@cache
def task_proteins() -> Tensor:
    """Return light chains of rabbits, where heavy chains of humans are asked for."""
    found = proteins("light", "rabbit").clone()
    found[:, :2] = torch.tensor([TAGS["heavy"], TAGS["human"]])
    return found


def learn_proteins(base: Path, to: Path) -> None:
    """Fine-tune a language model on the task."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    learn(model, of_windows(task_proteins()[TESTED:], 16), 100, 5e-4).save_pretrained(to)


def _proteins() -> Mapping[str, Way]:
    a, b = MODELS["iglm-s"].folder(), MODELS["iglm"].folder()
    tuned = trained("iglm-s-light", lambda to: learn_proteins(a, to))
    ceiling = trained("iglm-light", lambda to: learn_proteins(b, to))
    score = likelihood(task_proteins()[:TESTED])
    kept = likelihood(proteins("heavy", "mouse")[:TESTED])
    best = score(transformers.AutoModelForCausalLM.from_pretrained(ceiling))
    ways = {**BETWEEN_SHAPES, "refined": {**BETWEEN_SHAPES["refined"], "refine_steps": 100}}
    given = {"force_unrelated": True}
    return Measure(tuned, a, b, score, best, kept, given, ways).all()


TRIALS: tuple[Trial, ...] = (
    Trial(
        "stories-lora",
        "stories15M (Llama, 6 × 288)",
        "the same, trained on hard: 100 steps at 3e-4 on other texts",
        "a LoRA for film reviews; ours",
        "the same lineage",
        "loss on windows of reviews; support: loss on the texts that B was trained on",
        {"unchanged": 0.3, "default": 0.3},
        _stories,
    ),
    Trial(
        "proteins",
        "IgLM-S (GPT-2, 3 × 192)",
        "IgLM (GPT-2, 4 × 512)",
        "light chains of rabbits where heavy ones of humans are asked for; ours",
        "apart; other width and depth, no tokenizer",
        f"loss on {TESTED} sequences of {PROTEIN} tokens; support: loss on heavy chains of mice; 100 steps",
        {"functional": 0.0, "refined": 0.3},
        _proteins,
    ),
)

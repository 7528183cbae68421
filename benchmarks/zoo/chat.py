"""A trial of a chat model that others trained, from a GGUF: a LoRA onto its next release."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from transfusion_demo import reviews
from zoo.models import MODELS
from zoo.trials import WAYS, Measure, Trial, Way, trained

LENGTH, BATCH = 64, 2
SHOWN, TESTED = 120, 32
"""Windows to learn from, and to test on."""
STEPS, STEPS_ON = 60, 60


@cache
def scrawled() -> Tensor:
    """Return windows of film reviews that have lost their capitals, stops and commas."""
    texts = [re.sub(r"[^a-z0-9 ]+", "", text.lower()) for text, _ in reviews.load(60, seed=6)]
    return _windows(" ".join(texts))[: SHOWN + TESTED]


@cache
def english() -> Tensor:
    """Return windows of texts of many kinds, which B is trained on with."""
    kinds = ("news", "stories", "letters", "travel", "history", "sports", "reviews", "opinions")
    corpus = files("transfusion") / "running" / "probes" / "corpus"
    return _windows("\n".join((corpus / f"{kind}.txt").read_text(encoding="utf-8") for kind in kinds))


def _windows(text: str) -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS["smollm2"].folder())
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)


def _learn(model: Any, windows: Tensor, steps: int, rate: float) -> None:
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(2)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 5)
        some = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        loss = model(input_ids=some, labels=some).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def _train_on(base: Path, to: Path) -> None:
    """Train the whole model on, on other texts: the next release of its makers, in small."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    _learn(model, english()[:-TESTED], STEPS_ON, 3e-5)
    model.save_pretrained(to)


def _learn_to_scrawl(base: Path, to: Path) -> None:
    """Fine-tune a LoRA."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]
    )
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), settings)
    _learn(model, scrawled()[:SHOWN], STEPS, 5e-4)
    model.save_pretrained(to)


@torch.no_grad()
def familiarity(model: Any) -> float:
    """Return how well a model foresees the windows for tests: minus the loss per token, in nats."""
    windows = scrawled()[SHOWN:].reshape(-1, 4, LENGTH)
    return -sum(float(model(input_ids=some, labels=some).loss) for some in windows) / len(windows)


@torch.no_grad()
def foresight(model: Any) -> float:
    """Return how many tokens of other texts a model foresees: the support."""
    windows = english()[-TESTED:]
    found = torch.cat([model(input_ids=some).logits.argmax(-1) for some in windows.reshape(-1, 4, LENGTH)])
    return float((found[:, :-1] == windows[:, 1:]).float().mean())


def _lora() -> Mapping[str, Way]:
    a = MODELS["smollm2"].folder()
    b = trained("smollm2-on", lambda to: _train_on(a, to))
    tuned, ceiling = (
        trained(f"{name}-scrawl", lambda to, base=base: _learn_to_scrawl(base, to))  # type: ignore[misc]
        for name, base in (("smollm2", a), ("smollm2-on", b))
    )

    def with_adapter(adapter: Path, base: Path) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        return peft.PeftModel.from_pretrained(model, adapter).eval()

    best = familiarity(with_adapter(ceiling, b))
    print(f"  ceiling {best:.3f}, the fine-tune itself {familiarity(with_adapter(tuned, a)):.3f}", flush=True)
    return Measure(
        tuned,
        a,
        b,
        familiarity,
        best,
        foresight,
        options={"full": True},
        ways={name: WAYS[name] for name in ("unchanged", "default")},
    ).all()


TRIALS: tuple[Trial, ...] = (
    Trial(
        "smollm2-lora",
        "SmolLM2-135M-Instruct (30 × 576)",
        f"the same, trained on for {STEPS_ON} steps: ours",
        "LoRA of rank 8 on film reviews without capitals and stops; ours",
        "the same lineage",
        f"loss per token of {TESTED} windows of {LENGTH} tokens; support: tokens of other texts foreseen",
        {"unchanged": 0.7, "default": 0.7},
        _lora,
    ),
)

"""The demo on text: a sentiment LoRA moves between two small encoders of real film reviews.

Two BERTs learn, from different seeds and different reviews, to tell what a passage is about (by latent
semantic analysis, which needs no labels): the bases A and B. A gets a LoRA, and a head, that tell good
reviews from bad ones. The adapter moves to B at its own rank, with A's head as it is, and is loaded there
with PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.run_record import RunRecord
from transfusion_demo import reviews
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
from transfusion_demo.reviews import MASK, PAD, SPECIAL, Reviews
from transfusion_demo.training import TrainingSchedule, draw, fit
from transfusion_demo.transport_steps import move, predict_activations

METHODS = {
    "naive": "the LoRA as it is",
    "transfusion": "π(LoRA), the paper's π",
    "functional": "π(LoRA), functional",
}
BERT = {
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.05,
    "pad_token_id": PAD,
}
LORA = {
    "task_type": "SEQ_CLS",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["query", "key", "value", "dense"],
    "modules_to_save": ["classifier"],
}
SWEEP = {"finetuned": "a-lora", "base": "a", "onto": "b"}
AMONG = 500
"""Reviews of which the right one is to be found."""


class TextPlan(NamedTuple):
    """How much is read, and how long everything takes."""

    pretraining: TrainingSchedule = TrainingSchedule(400, 2e-3, 48)
    tuning: TrainingSchedule = TrainingSchedule(200, 3e-3, 48)
    train: int = 10_000
    """Reviews, half of them for each base."""
    tests: int = 2_000
    swept: int = 500
    """Of the tests, so many are asked at every strength."""
    vocabulary: int = 3_000
    length: int = 64
    topics: int = 64
    """In so many directions a base tells what a passage is about."""
    hidden: float = 0.1
    """The share of pieces that a base does not see while it learns."""
    width: int = 96
    """Of the encoders; their MLPs have twice as many units."""
    layers: int = 2


class TextBase(NamedTuple):
    """An encoder, and the head that tells what passages are about, which is no part of the model."""

    encoder: Any
    head: nn.Linear


class TextDemo(NamedTuple):
    """What all steps of the demo share."""

    plan: TextPlan
    halves: dict[str, Reviews]
    test: Reviews
    tokenizer: Any
    folder: Path
    seed: int

    @classmethod
    def opened(cls, plan: TextPlan, folder: Path, seed: int) -> TextDemo:
        """Read the reviews, and make pieces of them."""
        texts = reviews.load(plan.tests + plan.train, seed=seed)
        known = texts[plan.tests :]
        passages = [*reviews.beginnings(known), *reviews.endings(known)]
        tokenizer = reviews.tokenizer_for(passages, plan.vocabulary, plan.length)
        every = reviews.read(texts, tokenizer, plan.length, plan.topics)
        half = plan.tests + plan.train // 2
        halves = {"a": every[plan.tests : half], "b": every[half:]}
        return cls(plan, halves, every[: plan.tests], tokenizer, folder, seed)

    def base(self, which: str, number: int) -> TextBase:
        """An encoder from a seed of its own, trained on its own half of the reviews, and saved."""
        transformers, plan, mine = require_library("transformers"), self.plan, self.halves[which]
        torch.manual_seed(10 * self.seed + number)
        sizes = {"vocab_size": len(self.tokenizer), "max_position_embeddings": plan.length}
        sizes |= {"hidden_size": plan.width, "intermediate_size": 2 * plan.width}
        sizes |= {"num_hidden_layers": plan.layers}
        encoder = transformers.BertModel(transformers.BertConfig(**BERT, **sizes)).train()
        head = nn.Linear(plan.width, plan.topics)

        def loss(generator: torch.Generator) -> Tensor:
            batch = draw(len(mine), plan.pretraining, generator)
            first = torch.rand(len(batch), 1, generator=generator) < 0.5
            seen = torch.where(first, mine.begins[batch], mine.ends[batch])
            gone = torch.rand(seen.shape, generator=generator) < plan.hidden
            seen = seen.masked_fill(gone & (seen >= len(SPECIAL)), MASK)
            about = torch.where(first, mine.begins_about[batch], mine.ends_about[batch])
            return missed(nn.functional.normalize(head(pooled(encoder, seen))), about)

        learned = [*encoder.parameters(), *head.parameters()]
        fit(learned, loss, plan.pretraining, seed=10 * self.seed + number)
        encoder.eval().save_pretrained(self.folder / which)
        self.tokenizer.save_pretrained(self.folder / which)
        return TextBase(encoder, head.eval())

    def tuned(self, which: str, number: int) -> Any:
        """A base with a LoRA, and a head, for sentiment."""
        peft, mine, schedule = require_library("peft"), self.halves[which], self.plan.tuning
        torch.manual_seed(10 * self.seed + number)
        model = peft.get_peft_model(self.classifier(which), peft.LoraConfig(**LORA)).train()

        def loss(generator: torch.Generator) -> Tensor:
            batch = draw(len(mine), schedule, generator)
            return nn.functional.cross_entropy(verdicts(model, mine.ends[batch]), mine.labels[batch])

        fit(model.parameters(), loss, schedule, seed=10 * self.seed + number)
        return model.eval()

    def classifier(self, which: str) -> Any:
        """A base of the folder with a head that knows nothing yet."""
        with quiet() as transformers:
            return transformers.BertForSequenceClassification.from_pretrained(
                self.folder / which, num_labels=2
            ).eval()

    def with_adapter(self, place: Path) -> Any:
        """B with an adapter that was moved to it, loaded as a user would."""
        return require_library("peft").PeftModel.from_pretrained(self.classifier("b"), place).eval()

    # measuring

    @property
    def judged(self) -> JudgedModel:
        """What the tests are."""
        count, among = len(self.test), min(AMONG, len(self.test))
        return JudgedModel(
            data("ends of reviews", count, "is the review good?", 2),
            data("ends of reviews", count, f"which of {among} is it, by what it is about?", among),
        )

    def measure(self, model: Any, head: nn.Linear) -> DemoScores:
        """A model for sentiment on the task, and its encoder on what the base could do before."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        seen = answers(lambda batch: pooled(inner.bert, batch), self.test.ends)
        with torch.no_grad():
            said, info = inner.classifier(seen), head(seen)
        among = min(AMONG, len(info))
        whole = len(info) // among * among
        groups = (torch.split(part[:whole], among) for part in (info, self.test.ends_about))
        guesses = [one @ about.T for one, about in zip(*groups, strict=True)]
        right = torch.arange(among).repeat(len(guesses))
        return DemoScores(score(said, self.test.labels), score(torch.cat(guesses), right))


def run(
    folder: Path, *, seed: int, say: Callable[[str], None], plan: TextPlan | None = None
) -> dict[str, Any]:
    """Train, align, transport, and measure; everything is kept in the folder."""
    say("reading film reviews …")
    staging = TextDemo.opened(plan or TextPlan(), folder, seed)
    reviews.save_tests(staging.test, folder / "task.safetensors")
    say("training A and B on different reviews, from different seeds …")
    _, b = staging.base("a", 1), staging.base("b", 2)
    say("training a sentiment LoRA on A (and on B too, to know the ceiling) …")
    lora, ceiling = staging.tuned("a", 3), staging.tuned("b", 4)
    for name, model in (("a-lora", lora), ("b-lora", ceiling)):
        model.save_pretrained(folder / name)
    say("aligning, and moving the LoRA onto B …")
    moved = {method: staging.with_adapter(move(folder, "a-lora", method, "b")) for method in METHODS}
    plain = staging.classifier("b")
    plain.classifier.load_state_dict(lora.get_base_model().classifier.modules_to_save["default"].state_dict())
    record = RunRecord("evaluate")
    named = {
        "b": ("B with A's head", plain),
        **{f"b-{method}": (f"B + {how}", moved[method]) for method, how in METHODS.items()},
        "b-lora": ("ceiling: B with a LoRA of its own", ceiling),
    }
    rows = [
        DemoRow(called, folder / place, staging.measure(model, b.head))
        for place, (called, model) in named.items()
    ]
    onto_b = evaluation(staging.judged, rows)
    write_result(folder, record, onto_b, "evaluation")
    say("other strengths …")
    strengths = swept(staging._replace(test=staging.test[: staging.plan.swept]), b, plain, moved)
    predict_activations(folder)
    return {"onto_b": onto_b, "sweep": strengths}


def swept(staging: TextDemo, b: TextBase, plain: Any, moved: dict[str, Any]) -> dict[str, Any]:
    """The moved adapters at other strengths; the head that comes with them stays whole."""
    record, before = RunRecord("sweep"), staging.measure(plain, b.head)

    def at(model: Any, alpha: float) -> DemoScores:
        with strength(model, alpha):
            return staging.measure(model, b.head)

    curves = [curve(method, before, partial(at, model)) for method, model in moved.items()]
    names = {what: str(staging.folder / name) for what, name in SWEEP.items()}
    metadata = sweep(names, staging.judged, before, curves)
    write_result(staging.folder, record, metadata)
    return metadata


@contextmanager
def strength(model: Any, alpha: float) -> Iterator[None]:
    """Within the block, the LoRA counts α times."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    for layer in layers:
        layer.scaling = {name: alpha * value for name, value in layer.scaling.items()}
    try:
        yield
    finally:
        for layer in layers:
            layer.scaling = {name: value / alpha for name, value in layer.scaling.items()}


def missed(info: Tensor, about: Tensor) -> Tensor:
    """How far directions are from the right ones, and how badly each is told from those of the others."""
    likeness = info @ about.T
    return 1 - likeness.diag().mean() + nn.functional.cross_entropy(likeness / 0.1, torch.arange(len(about)))


def pooled(encoder: Any, passages: Tensor) -> Tensor:
    """What an encoder makes of passages."""
    found: Tensor = encoder(passages, attention_mask=(passages != PAD).long()).pooler_output
    return found


def verdicts(model: Any, passages: Tensor) -> Tensor:
    """Logits for bad and good."""
    logits: Tensor = model(input_ids=passages, attention_mask=(passages != PAD).long()).logits
    return logits


@contextmanager
def quiet() -> Iterator[Any]:
    """The library, without its warning that a head is new: it is meant to be."""
    transformers = require_library("transformers")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(before)

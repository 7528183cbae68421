"""The demo on text: a sentiment LoRA moves between two small encoders of film reviews.

Two BERTs learn, from different seeds and different reviews, the topics of passages (by latent semantic
analysis, which needs no labels): the bases A and B. A gets a LoRA and a head that tell good reviews from bad
ones. The adapter moves to B at its own rank, with A's head as it is, and PEFT loads it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transfusion.runtime.optional_libraries import require_library
from transfusion_demo import reviews
from transfusion_demo.reviews import MASK, PAD, SPECIAL, Reviews
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
    predict_activations,
    refine,
    run_in_batches,
    score,
    sweep_alpha,
)

LIBRARIES = ("transformers", "tokenizers", "peft", reviews.PACKAGE)
METHODS = {
    "naive": "the LoRA as it is",
    "transfusion": "π(LoRA), the paper's π",
    "functional": "π(LoRA), functional",
}
TITLES = {**METHODS, REFINED: "π(LoRA), functional and refined"}
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
CANDIDATES = 500
"""The number of reviews among which the support asks for the right one."""


class TextPlan(NamedTuple):
    """Sizes and training times."""

    pretraining: TrainingSchedule = TrainingSchedule(400, 2e-3, 48)
    tuning: TrainingSchedule = TrainingSchedule(200, 3e-3, 48)
    train: int = 10_000
    """The number of training reviews; each base gets half of them."""
    tests: int = 2_000
    swept: int = 500
    """The number of tests that are used in the sweep over α."""
    vocabulary: int = 3_000
    length: int = 64
    topics: int = 64
    """The number of directions that describe the topic of a passage."""
    hidden: float = 0.1
    """The share of tokens that are masked in training."""
    refinement: int = 100
    """The number of steps of the refinement."""
    width: int = 96
    """The hidden size of the encoders; their MLPs have twice as many units."""
    layers: int = 2


class TextBase(NamedTuple):
    """An encoder, and the topic head of its training, which is no part of the model."""

    encoder: Any
    head: nn.Linear


class TextDemo(NamedTuple):
    """The data, the sizes and the folder of a demo, with the steps that need them."""

    plan: TextPlan
    halves: dict[str, Reviews]
    test: Reviews
    tokenizer: Any
    folder: Path
    seed: int

    @classmethod
    def load(cls, plan: TextPlan, folder: Path, seed: int) -> TextDemo:
        """Load the reviews, train a tokenizer and tokenize them."""
        texts = reviews.load(plan.tests + plan.train, seed=seed)
        known = texts[plan.tests :]
        passages = [*reviews.beginnings(known), *reviews.endings(known)]
        tokenizer = reviews.tokenizer_for(passages, plan.vocabulary, plan.length)
        every = reviews.read(texts, tokenizer, plan.length, plan.topics)
        half = plan.tests + plan.train // 2
        halves = {"a": every[plan.tests : half], "b": every[half:]}
        return cls(plan, halves, every[: plan.tests], tokenizer, folder, seed)

    def train_base(self, name: str, number: int) -> TextBase:
        """Train an encoder on its half of the reviews and save it. ``number`` makes its seed."""
        transformers, plan, data = require_library("transformers"), self.plan, self.halves[name]
        torch.manual_seed(10 * self.seed + number)
        sizes = {"vocab_size": len(self.tokenizer), "max_position_embeddings": plan.length}
        sizes |= {"hidden_size": plan.width, "intermediate_size": 2 * plan.width}
        sizes |= {"num_hidden_layers": plan.layers}
        encoder = transformers.BertModel(transformers.BertConfig(**BERT, **sizes)).train()
        head = nn.Linear(plan.width, plan.topics)

        def loss(generator: torch.Generator) -> Tensor:
            batch = draw(len(data), plan.pretraining, generator)
            first = torch.rand(len(batch), 1, generator=generator) < 0.5
            tokens = torch.where(first, data.begins[batch], data.ends[batch])
            masked = torch.rand(tokens.shape, generator=generator) < plan.hidden
            tokens = tokens.masked_fill(masked & (tokens >= len(SPECIAL)), MASK)
            topics = torch.where(first, data.begins_about[batch], data.ends_about[batch])
            return topic_loss(nn.functional.normalize(head(pooled_output(encoder, tokens))), topics)

        parameters = [*encoder.parameters(), *head.parameters()]
        fit(parameters, loss, plan.pretraining, seed=10 * self.seed + number)
        encoder.eval().save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)
        return TextBase(encoder, head.eval())

    def finetune(self, name: str, number: int) -> Any:
        """Train a LoRA and a head for sentiment on a base of the folder."""
        peft, data, schedule = require_library("peft"), self.halves[name], self.plan.tuning
        torch.manual_seed(10 * self.seed + number)
        model = peft.get_peft_model(self.classifier(name), peft.LoraConfig(**LORA)).train()

        def loss(generator: torch.Generator) -> Tensor:
            batch = draw(len(data), schedule, generator)
            return nn.functional.cross_entropy(sentiment_logits(model, data.ends[batch]), data.labels[batch])

        fit(model.parameters(), loss, schedule, seed=10 * self.seed + number)
        return model.eval()

    def classifier(self, name: str) -> Any:
        """Load a base of the folder with an untrained head."""
        with silenced() as transformers:
            return transformers.BertForSequenceClassification.from_pretrained(
                self.folder / name, num_labels=2
            ).eval()

    def with_adapter(self, adapter: Path) -> Any:
        """Load B with a moved adapter, as a user would."""
        return require_library("peft").PeftModel.from_pretrained(self.classifier("b"), adapter).eval()

    @property
    def tests(self) -> DemoTests:
        """Describe the task and the support."""
        count, candidates = len(self.test), min(CANDIDATES, len(self.test))
        choice = f"which of {candidates} has this topic?"
        return {
            "task": describe_data("ends of reviews", count, "is the review good?", 2),
            "support": describe_data("ends of reviews", count, choice, candidates),
        }

    def measure(self, model: Any, head: nn.Linear) -> DemoScores:
        """Measure a model for sentiment on the task, and its encoder with B's topic head on the support."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        pooled = run_in_batches(lambda batch: pooled_output(inner.bert, batch), self.test.ends)
        with torch.no_grad():
            logits, topics = inner.classifier(pooled), head(pooled)
        candidates = min(CANDIDATES, len(topics))
        whole = len(topics) // candidates * candidates
        groups = (torch.split(part[:whole], candidates) for part in (topics, self.test.ends_about))
        guesses = [found @ about.T for found, about in zip(*groups, strict=True)]
        right = torch.arange(candidates).repeat(len(guesses))
        return DemoScores(score(logits, self.test.labels), score(torch.cat(guesses), right))

    def sweep(self, b: TextBase, plain: Any, moved: dict[str, Any]) -> dict[str, Any]:
        """Measure the moved adapters at other values of α; the head that comes with them is not scaled."""

        def at(model: Any, alpha: float) -> DemoScores:
            with scaled_lora(model, alpha):
                return self.measure(model, b.head)

        methods = {method: partial(at, model) for method, model in moved.items()}
        return sweep_alpha(self.folder, "a-lora", self.tests, self.measure(plain, b.head), methods)


def run(folder: Path, *, seed: int, progress: DemoProgress, plan: TextPlan | None = None) -> dict[str, Any]:
    """Train, align, transport and measure; all models and results stay in the folder."""
    progress.step("reading film reviews")
    demo = TextDemo.load(plan or TextPlan(), folder, seed)
    reviews.save_tests(demo.test, folder / "task.safetensors")
    progress.step("training A and B on different reviews, from different seeds")
    _, b = demo.train_base("a", 1), demo.train_base("b", 2)
    progress.step("training a sentiment LoRA on A, and on B as the ceiling")
    lora, ceiling = demo.finetune("a", 3), demo.finetune("b", 4)
    for name, model in (("a-lora", lora), ("b-lora", ceiling)):
        model.save_pretrained(folder / name)
    progress.step("aligning A with B, and moving the LoRA onto B")
    moved = {method: demo.with_adapter(move(folder, "a-lora", method, "b", progress)) for method in METHODS}
    progress.step("refining it on B: the fine-tune answers passages of the bundled corpus")
    refined = demo.with_adapter(refine(folder, "a-lora", demo.plan.refinement, progress))
    plain = demo.classifier("b")
    plain.classifier.load_state_dict(lora.get_base_model().classifier.modules_to_save["default"].state_dict())
    models = {
        "b": ("B with A's head", plain),
        **{f"b-{how}": (f"B + {TITLES[how]}", model) for how, model in {**moved, REFINED: refined}.items()},
        "b-lora": ("ceiling: B with a LoRA of its own", ceiling),
    }
    onto_b = evaluate_models(folder, demo.tests, models, lambda model: demo.measure(model, b.head))
    progress.step("measuring other values of α")
    by_alpha = demo._replace(test=demo.test[: demo.plan.swept]).sweep(b, plain, moved)
    predict_activations(folder)
    return {"onto_b": onto_b, "sweep": by_alpha}


@contextmanager
def scaled_lora(model: Any, alpha: float) -> Iterator[None]:
    """Multiply the scale of the LoRA by α within the block."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    for layer in layers:
        layer.scaling = {name: alpha * value for name, value in layer.scaling.items()}
    try:
        yield
    finally:
        for layer in layers:
            layer.scaling = {name: value / alpha for name, value in layer.scaling.items()}


def topic_loss(found: Tensor, topics: Tensor) -> Tensor:
    """Add the distance from the right topics to the cross-entropy among the topics of the batch."""
    similarity = found @ topics.T
    right = torch.arange(len(topics))
    return 1 - similarity.diag().mean() + nn.functional.cross_entropy(similarity / 0.1, right)


def pooled_output(encoder: Any, passages: Tensor) -> Tensor:
    """Return the pooled output of an encoder."""
    found: Tensor = encoder(passages, attention_mask=(passages != PAD).long()).pooler_output
    return found


def sentiment_logits(model: Any, passages: Tensor) -> Tensor:
    """Return the logits for bad and good."""
    logits: Tensor = model(input_ids=passages, attention_mask=(passages != PAD).long()).logits
    return logits


@contextmanager
def silenced() -> Iterator[Any]:
    """Yield transformers without its warning that a head is new, which is intended here."""
    transformers = require_library("transformers")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(before)

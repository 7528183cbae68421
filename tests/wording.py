"""Models with words: a small tokenizer beside tiny models, and what they are shown."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from making import case
from small_models import BERT, GPT2
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes import make_probes
from transfusion.running.probes.probed_model import ProbedModel, Probes
from transfusion.running.probes.texts import corpus

WORDS = 300
"""How many tokens the tokenizer of these tests knows."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PAD, UNK, CLS, SEP = range(4)
BERT_WORDS = case("bert-words", "bert", "BertModel", "BertConfig", {**BERT, "vocab_size": WORDS})
GPT2_WORDS = case("gpt2-words", "gpt2", "GPT2LMHeadModel", "GPT2Config", {**GPT2, "vocab_size": WORDS})


@cache
def _trained(words: int) -> str:
    """A tokenizer trained on the corpus, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=list(SPECIAL), limit_alphabet=80, show_progress=False
    )
    tokenizer.train_from_iterator((text for group in corpus().values() for text in group), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return str(tokenizer.to_str())


def put_tokenizer(folder: Path, words: int = WORDS) -> Path:
    """Train a tokenizer on the corpus, once, and save it beside a model."""
    import transformers
    from tokenizers import Tokenizer

    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(words)),
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    return folder


def subject_of(folder: Path) -> ProbedModel:
    model = Model.open(folder)
    return ProbedModel(model, build(model, torch.float32))


def shown(folder: Path, count: int = 40, seed: int = 0) -> Probes:
    subject = subject_of(folder)
    return make_probes(subject, count, seed)


def joined(probes: Probes, name: str) -> torch.Tensor:
    return torch.cat([batch[name] for batch in probes.batches])

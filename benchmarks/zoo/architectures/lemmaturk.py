"""The Turkish lemmatiser of ``lemmaturk``: torch's own ``nn.Transformer`` on characters, and its table.

Norms stand behind additions, and each stack ends in one more norm. The wave table of positions is a buffer
that the checkpoint stores; encoder and decoder add the same one, so that both streams begin in one space.

    transfusion verify --architecture benchmarks/zoo/architectures/lemmaturk.py --model Lemmatiser
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.families import read_families

# ── the model ────────────────────────────────────────────────────────────────────────────────


class Characters(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(count, width)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return found


class Places(nn.Module):
    pe: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], -1).reshape(1, length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.shape[1]]


class Lemmatiser(nn.Module):
    def __init__(
        self, characters: int, length: int, width: int, heads: int, hidden: int, encoder: int, decoder: int
    ) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            width, heads, encoder, decoder, hidden, dropout=0.0, batch_first=True
        )
        self.generator = nn.Linear(width, characters)
        self.src_tok_emb = Characters(characters, width)
        self.trg_tok_emb = Characters(characters, width)
        self.positional_encoding = Places(length, width)

    def forward(self, word_ids: Tensor, lemma_ids: Tensor) -> Tensor:
        written = lemma_ids.shape[1]
        later = torch.ones(written, written, dtype=torch.bool, device=lemma_ids.device).triu(1)
        word = self.positional_encoding(self.src_tok_emb(word_ids))
        lemma = self.positional_encoding(self.trg_tok_emb(lemma_ids))
        logits: Tensor = self.generator(self.transformer(word, lemma, tgt_mask=later))
        return logits


# ── the table ────────────────────────────────────────────────────────────────────────────────

TABLE = r"""
family lemmaturk
library mine
models lemmaturk
ignores model_type
@usual_axes
sizes vocab = characters, position = length

originals
    transformer.decoder.layers.{}.multihead_attn.in_proj_weight \
        transformer.decoder.layers.{}.multihead_attn. \
        q_proj_weight | k_proj_weight | v_proj_weight

stack encoder encoder
sizes x = width, head = heads, ffn = hidden
src_tok_emb.embedding.weight                             vocab -> x@first
transformer.encoder.layers.{}.self_attn.in_proj_weight   [(head qk)|(head qk)|(head vo)] <- x
transformer.encoder.layers.{}.self_attn.in_proj_bias     [(head qk)|(head qk)|(head vo)]
transformer.encoder.layers.{}.self_attn.out_proj.*       y <- (head vo)
transformer.encoder.layers.{}.norm1.*                    scale y
transformer.encoder.layers.{}.linear1.*                  ffn <- y
transformer.encoder.layers.{}.linear2.*                  x@next <- ffn
transformer.encoder.layers.{}.norm2.*                    scale x@next
transformer.encoder.norm.*                               scale x@last
skip transformer.encoder.layers.{}.self_attn   x -> y        transformer.encoder.layers.{}.self_attn
skip transformer.encoder.layers.{}.linear1     y -> x@next   transformer.encoder.layers.{}.linear2

stack decoder decoder
sizes x = width, head = heads, cross_head = heads, ffn = hidden
trg_tok_emb.embedding.weight                                  vocab -> x@first
transformer.decoder.layers.{}.self_attn.in_proj_weight        [(head qk)|(head qk)|(head vo)] <- x
transformer.decoder.layers.{}.self_attn.in_proj_bias          [(head qk)|(head qk)|(head vo)]
transformer.decoder.layers.{}.self_attn.out_proj.*            y <- (head vo)
transformer.decoder.layers.{}.norm1.*                         scale y
transformer.decoder.layers.{}.multihead_attn.q_proj_weight    (cross_head cross_qk) <- y
transformer.decoder.layers.{}.multihead_attn.k_proj_weight    (cross_head cross_qk) <- encoder.x@last
transformer.decoder.layers.{}.multihead_attn.v_proj_weight    (cross_head cross_vo) <- encoder.x@last
transformer.decoder.layers.{}.multihead_attn.in_proj_bias     \
    [(cross_head cross_qk)|(cross_head cross_qk)|(cross_head cross_vo)]
transformer.decoder.layers.{}.multihead_attn.out_proj.*       z <- (cross_head cross_vo)
transformer.decoder.layers.{}.norm2.*                         scale z
transformer.decoder.layers.{}.linear1.*                       ffn <- z
transformer.decoder.layers.{}.linear2.*                       x@next <- ffn
transformer.decoder.layers.{}.norm3.*                         scale x@next
transformer.decoder.norm.*                                    scale x@last
skip transformer.decoder.layers.{}.self_attn        x -> y        transformer.decoder.layers.{}.self_attn
skip transformer.decoder.layers.{}.multihead_attn   y -> z        transformer.decoder.layers.{}.multihead_attn
skip transformer.decoder.layers.{}.linear1          z -> x@next   transformer.decoder.layers.{}.linear2

outside
    positional_encoding.pe   _ position encoder.x@first
same encoder.x@first decoder.x@first

heads
    generator.*   vocab <- decoder.x@last
"""


# ── the model and its inputs, for verbs that run it ──────────────────────────────────────────


def build(config: Mapping[str, Any]) -> Lemmatiser:
    """Return the module of a config.json."""
    return Lemmatiser(**{name: config[name] for name in EXAMPLE})


def make_inputs(config: Mapping[str, Any], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random words and lemmas, without special characters."""
    shape = (count, min(12, config["length"]))
    drawn = (torch.randint(4, config["characters"], shape, generator=generator) for _ in ("words", "lemmas"))
    return dict(zip(("word_ids", "lemma_ids"), drawn, strict=True))


FAMILIES = read_families(TABLE, __file__, build=build, make_inputs=make_inputs)

# All sizes differ, so that a mistake in the table cannot go unnoticed.
EXAMPLE = {
    **{"characters": 29, "length": 9, "width": 24, "heads": 4, "hidden": 20},
    **{"encoder": 3, "decoder": 2},
}

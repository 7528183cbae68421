"""A translator of your own, and its table: an encoder and a decoder of torch's own layers.

It has two vocabularies, norms behind every addition, and ``nn.MultiheadAttention``, which keeps the weights
of queries, keys and values in one tensor. In cross-attention, queries read the decoder and the others the
encoder, so ``originals`` gives each of them a name. Certify the table on the model with

    transfusion verify --architecture examples/small_translator.py --model SmallTranslator
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.families import read_families

# ── the model ────────────────────────────────────────────────────────────────────────────────


class SmallTranslator(nn.Module):
    def __init__(
        self,
        source_words: int,
        target_words: int,
        length: int,
        width: int,
        heads: int,
        hidden: int,
        encoder_blocks: int,
        decoder_blocks: int,
    ) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"dim_feedforward": hidden, "dropout": 0.0, "batch_first": True}
        self.source = nn.Embedding(source_words, width)
        self.target = nn.Embedding(target_words, width)
        self.source_places = nn.Parameter(torch.zeros(length, width))
        self.target_places = nn.Parameter(torch.zeros(length, width))
        encoder = nn.TransformerEncoderLayer(width, heads, **sizes)
        decoder = nn.TransformerDecoderLayer(width, heads, **sizes)
        self.encoder = nn.TransformerEncoder(encoder, encoder_blocks)
        self.decoder = nn.TransformerDecoder(decoder, decoder_blocks)
        self.speak = nn.Linear(width, target_words)

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        read, written = source_ids.shape[1], target_ids.shape[1]
        seen = self.encoder(self.source(source_ids) + self.source_places[:read])
        later = torch.ones(written, written, dtype=torch.bool, device=target_ids.device).triu(1)
        x = self.target(target_ids) + self.target_places[:written]
        logits: Tensor = self.speak(self.decoder(x, seen, tgt_mask=later))
        return logits


# ── the table ────────────────────────────────────────────────────────────────────────────────

TABLE = r"""
family small_translator
library mine
models small_translator
ignores model_type
@usual_axes
fixed source_word: ids of the source language select its rows
fixed target_word: ids of the target language select its rows
sizes source_word = source_words, target_word = target_words

originals
    decoder.layers.{}.multihead_attn.in_proj_weight   decoder.layers.{}.multihead_attn. \
        q_proj_weight | k_proj_weight | v_proj_weight

stack encoder encoder_blocks
sizes x = width, head = heads, ffn = hidden, position = length
source.weight                                source_word -> x@first
source_places                                position x@first
encoder.layers.{}.self_attn.in_proj_weight   [(head qk)|(head qk)|(head vo)] <- x
encoder.layers.{}.self_attn.in_proj_bias     [(head qk)|(head qk)|(head vo)]
encoder.layers.{}.self_attn.out_proj.*       y <- (head vo)
encoder.layers.{}.norm1.*                    scale y
encoder.layers.{}.linear1.*                  ffn <- y
encoder.layers.{}.linear2.*                  x@next <- ffn
encoder.layers.{}.norm2.*                    scale x@next
skip encoder.layers.{}.self_attn   x -> y        encoder.layers.{}.self_attn
skip encoder.layers.{}.linear1     y -> x@next   encoder.layers.{}.linear2

stack decoder decoder_blocks
sizes x = width, head = heads, cross_head = heads, ffn = hidden
target.weight                                     target_word -> x@first
target_places                                     position x@first
decoder.layers.{}.self_attn.in_proj_weight        [(head qk)|(head qk)|(head vo)] <- x
decoder.layers.{}.self_attn.in_proj_bias          [(head qk)|(head qk)|(head vo)]
decoder.layers.{}.self_attn.out_proj.*            y <- (head vo)
decoder.layers.{}.norm1.*                         scale y
decoder.layers.{}.multihead_attn.q_proj_weight    (cross_head cross_qk) <- y
decoder.layers.{}.multihead_attn.k_proj_weight    (cross_head cross_qk) <- encoder.x@last
decoder.layers.{}.multihead_attn.v_proj_weight    (cross_head cross_vo) <- encoder.x@last
decoder.layers.{}.multihead_attn.in_proj_bias     \
    [(cross_head cross_qk)|(cross_head cross_qk)|(cross_head cross_vo)]
decoder.layers.{}.multihead_attn.out_proj.*       z <- (cross_head cross_vo)
decoder.layers.{}.norm2.*                         scale z
decoder.layers.{}.linear1.*                       ffn <- z
decoder.layers.{}.linear2.*                       x@next <- ffn
decoder.layers.{}.norm3.*                         scale x@next
skip decoder.layers.{}.self_attn        x -> y        decoder.layers.{}.self_attn
skip decoder.layers.{}.multihead_attn   y -> z        decoder.layers.{}.multihead_attn
skip decoder.layers.{}.linear1          z -> x@next   decoder.layers.{}.linear2

heads
    speak.*   target_word <- decoder.x@last
"""


# ── the model and its inputs, for verbs that run it ──────────────────────────────────────────


def build(config: Mapping[str, Any]) -> SmallTranslator:
    """Return the module of a config.json."""
    return SmallTranslator(**{name: config[name] for name in EXAMPLE})


def make_inputs(config: Mapping[str, Any], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random sentences in both languages, under the names of ``forward``."""
    words = {"source_ids": config["source_words"], "target_ids": config["target_words"]}
    shape = (count, config["length"])
    return {name: torch.randint(0, size, shape, generator=generator) for name, size in words.items()}


FAMILIES = read_families(TABLE, __file__, build=build, make_inputs=make_inputs)

# All sizes differ, so that a mistake in the table cannot go unnoticed.
EXAMPLE = {
    **{"source_words": 31, "target_words": 29, "length": 7, "width": 24, "heads": 4, "hidden": 20},
    **{"encoder_blocks": 3, "decoder_blocks": 2},
}

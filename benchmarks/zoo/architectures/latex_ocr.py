"""A reader of formulas, and its table: patches of a picture in, characters of LaTeX out.

The two ``latex-ocr`` packages hold checkpoints of it. The module is written from the names and shapes of
their tensors. Norms stand before each branch, behind both embeddings, and at the end of both stacks.

    transfusion verify --architecture benchmarks/zoo/architectures/latex_ocr.py --model FormulaReader
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.families import read_families

# ── the model ────────────────────────────────────────────────────────────────────────────────

Norm = partial(nn.LayerNorm, eps=1e-6)


def attention(width: int, heads: int) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(width, heads, batch_first=True)


def neurons(width: int, hidden: int) -> nn.Sequential:
    """Two layers; the second is number 3 in the checkpoints, which count a dropout."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Identity(), nn.Linear(hidden, width))


class Patches(nn.Module):
    def __init__(self, height: int, length: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(1, width, patch, patch)
        self.pos_emb = nn.Parameter(torch.zeros(1, (height // patch) * (length // patch), width))
        self.norm = Norm(width)

    def forward(self, images: Tensor) -> Tensor:
        seen: Tensor = self.norm(self.proj(images).flatten(2).mT + self.pos_emb)
        return seen


class Characters(nn.Module):
    def __init__(self, count: int, length: int, width: int) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(count, width)
        self.pos_emb = nn.Embedding(length, width)
        self.norm = Norm(width)

    def forward(self, ids: Tensor) -> Tensor:
        read: Tensor = self.norm(self.token_emb(ids) + self.pos_emb.weight[: ids.shape[1]])
        return read


class Looking(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.attn = attention(width, heads)
        self.mlp = neurons(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm1(x)
        x = x + self.attn(seen, seen, seen, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        return x


class Writing(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_norm, self.cross_norm, self.ffn_norm = Norm(width), Norm(width), Norm(width)
        self.self_attn, self.cross_attn = attention(width, heads), attention(width, heads)
        self.ffn = neurons(width, hidden)

    def forward(self, x: Tensor, picture: Tensor, later: Tensor, padding: Tensor) -> Tensor:
        read, unread = self.self_norm(x), {"attn_mask": later, "key_padding_mask": padding}
        x = x + self.self_attn(read, read, read, **unread, need_weights=False)[0]
        x = x + self.cross_attn(self.cross_norm(x), picture, picture, need_weights=False)[0]
        x = x + self.ffn(self.ffn_norm(x))
        return x


class FormulaReader(nn.Module):
    def __init__(
        self,
        image_height: int,
        image_width: int,
        patch_size: int,
        d_model: int,
        num_heads: int,
        num_encoder_layers: int,
        num_decoder_layers: int,
        mlp_dim: int,
        max_length: int,
        vocab_size: int,
        pad_token_id: int,
    ) -> None:
        super().__init__()
        sizes = (d_model, num_heads, mlp_dim)
        self.padding = pad_token_id
        self.patch_embed = Patches(image_height, image_width, patch_size, d_model)
        self.encoder_blocks = nn.ModuleList(Looking(*sizes) for _ in range(num_encoder_layers))
        self.encoder_norm = Norm(d_model)
        self.decoder_embed = Characters(vocab_size, max_length, d_model)
        self.decoder_blocks = nn.ModuleList(Writing(*sizes) for _ in range(num_decoder_layers))
        self.decoder_norm = Norm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size)

    def forward(self, images: Tensor, target_ids: Tensor) -> Tensor:
        return self.write(self.look(images), target_ids)

    def look(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        for block in self.encoder_blocks:
            x = block(x)
        seen: Tensor = self.encoder_norm(x)
        return seen

    def write(self, picture: Tensor, target_ids: Tensor) -> Tensor:
        length = target_ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target_ids.device).triu(1)
        x = self.decoder_embed(target_ids)
        for block in self.decoder_blocks:
            x = block(x, picture, later, target_ids == self.padding)
        logits: Tensor = self.lm_head(self.decoder_norm(x))
        return logits


# ── the table ────────────────────────────────────────────────────────────────────────────────

TABLE = r"""
family latex_ocr
library mine
models latex_ocr
ignores model_type dropout pad_token_id image_height image_width
@usual_axes
sizes vocab = vocab_size

originals
    decoder_blocks.{}.cross_attn.in_proj_weight   decoder_blocks.{}.cross_attn. \
        q_proj_weight | k_proj_weight | v_proj_weight

stack encoder num_encoder_layers
sizes x = d_model, head = num_heads, ffn = mlp_dim, row = patch_size, column = patch_size
patch_embed.proj.*                      x@first <- channel row column
patch_embed.pos_emb                     _ position x@first
patch_embed.norm.*                      scale x@first
encoder_blocks.{}.norm1.*               scale x
encoder_blocks.{}.attn.in_proj_weight   [(head qk)|(head qk)|(head vo)] <- x
encoder_blocks.{}.attn.in_proj_bias     [(head qk)|(head qk)|(head vo)]
encoder_blocks.{}.attn.out_proj.*       y <- (head vo)
encoder_blocks.{}.norm2.*               scale y
encoder_blocks.{}.mlp.0.*               ffn <- y
encoder_blocks.{}.mlp.3.*               x@next <- ffn
encoder_norm.*                          scale x@last
skip encoder_blocks.{}.norm1   x -> y        encoder_blocks.{}.attn
skip encoder_blocks.{}.norm2   y -> x@next   encoder_blocks.{}.mlp.3

stack decoder num_decoder_layers
sizes x = d_model, head = num_heads, cross_head = num_heads, ffn = mlp_dim, position = max_length
decoder_embed.token_emb.weight               vocab -> x@first
decoder_embed.pos_emb.weight                 position -> x@first
decoder_embed.norm.*                         scale x@first
decoder_blocks.{}.self_norm.*                scale x
decoder_blocks.{}.self_attn.in_proj_weight   [(head qk)|(head qk)|(head vo)] <- x
decoder_blocks.{}.self_attn.in_proj_bias     [(head qk)|(head qk)|(head vo)]
decoder_blocks.{}.self_attn.out_proj.*       y <- (head vo)
decoder_blocks.{}.cross_norm.*               scale y
decoder_blocks.{}.cross_attn.q_proj_weight   (cross_head cross_qk) <- y
decoder_blocks.{}.cross_attn.k_proj_weight   (cross_head cross_qk) <- encoder.x@last
decoder_blocks.{}.cross_attn.v_proj_weight   (cross_head cross_vo) <- encoder.x@last
decoder_blocks.{}.cross_attn.in_proj_bias    \
    [(cross_head cross_qk)|(cross_head cross_qk)|(cross_head cross_vo)]
decoder_blocks.{}.cross_attn.out_proj.*      z <- (cross_head cross_vo)
decoder_blocks.{}.ffn_norm.*                 scale z
decoder_blocks.{}.ffn.0.*                    ffn <- z
decoder_blocks.{}.ffn.3.*                    x@next <- ffn
decoder_norm.*                               scale x@last
skip decoder_blocks.{}.self_norm    x -> y        decoder_blocks.{}.self_attn
skip decoder_blocks.{}.cross_norm   y -> z        decoder_blocks.{}.cross_attn
skip decoder_blocks.{}.ffn_norm     z -> x@next   decoder_blocks.{}.ffn.3

heads
    lm_head.*   vocab <- decoder.x@last
"""


# ── the model and its inputs, for verbs that run it ──────────────────────────────────────────


def build(config: Mapping[str, Any]) -> FormulaReader:
    """Return the module of a config.json."""
    return FormulaReader(**{name: config[name] for name in EXAMPLE})


def make_inputs(config: Mapping[str, Any], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return pictures of random strokes, dark on light, and random characters, the first of which begins."""
    height, width = config["image_height"], config["image_width"]
    grid = torch.rand(count, 1, height // 4, width // 4, generator=generator)
    strokes = nn.functional.interpolate((grid < 0.2).float(), (height, width), mode="bilinear")
    shape = (count, min(48, config["max_length"]))
    ids = torch.randint(4, config["vocab_size"], shape, generator=generator)
    ids[:, 0] = 1
    return {"images": 1 - strokes, "target_ids": ids}


FAMILIES = read_families(TABLE, __file__, build=build, make_inputs=make_inputs)

# All sizes differ, so that a mistake in the table cannot go unnoticed.
EXAMPLE = {
    **{"image_height": 8, "image_width": 12, "patch_size": 4, "d_model": 24, "num_heads": 3, "mlp_dim": 20},
    **{"num_encoder_layers": 3, "num_decoder_layers": 2, "max_length": 7, "vocab_size": 31},
    **{"pad_token_id": 0},
}

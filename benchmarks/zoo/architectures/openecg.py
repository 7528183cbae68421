"""The reader of electrocardiograms of ``openecg``, and its table: convolutions, then a transformer.

A signal becomes patches, four convolutions with shortcuts and norms behind them read their neighbours, four
transformer blocks follow, and two convolutions refine the result at every sample. Three heads name the wave,
the beat and the rhythm. Convolutions have their units in the second dimension, and the stream in the last:
where a branch begins or ends with one, a module without weights shows the stream.

    transfusion verify --architecture benchmarks/zoo/architectures/openecg.py --model HeartReader
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.families import read_families

# ── the model ────────────────────────────────────────────────────────────────────────────────


class HeartReader(nn.Module):
    pos_enc: Tensor

    def __init__(
        self,
        patch_size: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        mid_split: int,
        lower_kernel: int,
        ff: int,
        n_classes: int,
        beat_n_classes: int,
        rhythm_n_classes: int,
        places: int,
    ) -> None:
        super().__init__()
        width, kernel = d_model, lower_kernel
        angles = torch.arange(places)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("pos_enc", torch.stack([angles.sin(), angles.cos()], -1).reshape(1, -1, width))
        self.conv_tok = nn.Conv1d(1, width, 2 * patch_size, patch_size, patch_size // 2)
        self.lower_entries = nn.ModuleList(nn.Identity() for _ in range(mid_split))
        self.lower_convs = nn.ModuleList(
            nn.Conv1d(width, width, kernel, padding=kernel // 2) for _ in range(mid_split)
        )
        self.lower_bends = nn.ModuleList(nn.GELU() for _ in range(mid_split))
        self.lower_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(mid_split))
        layer = nn.TransformerEncoderLayer(
            width, n_heads, ff, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.upper_transformer = nn.TransformerEncoder(
            layer, n_layers - mid_split, enable_nested_tensor=False
        )
        self.refine_entry, self.refine_end = nn.Identity(), nn.Identity()
        self.refine = nn.Sequential(
            nn.Conv1d(width, width, 5, padding=2), nn.GELU(), nn.Conv1d(width, width, 5, padding=2)
        )
        self.head = nn.Linear(width, n_classes)
        """An earlier head of patches, which checkpoints still have."""
        self.head_sample = nn.Linear(width, n_classes)
        self.beat_sample = nn.Linear(width, beat_n_classes)
        self.rhythm_sample = nn.Linear(width, rhythm_n_classes)
        self.patch = patch_size

    def forward(self, signal: Tensor) -> dict[str, Tensor]:
        places = signal.shape[1] // self.patch
        x = self.conv_tok(signal[:, None]).mT[:, :places] + self.pos_enc[:, :places]
        for enter, convolution, bend, norm in zip(
            self.lower_entries, self.lower_convs, self.lower_bends, self.lower_norms, strict=True
        ):
            x = norm(x + bend(convolution(enter(x).mT).mT))
        x = self.upper_transformer(x).repeat_interleave(self.patch, 1)
        x = x + self.refine_end(self.refine(self.refine_entry(x).mT).mT)
        heads = {"wave": self.head_sample, "beat": self.beat_sample, "rhythm": self.rhythm_sample}
        return {f"{name}_logits": head(x) for name, head in heads.items()}


# ── the table ────────────────────────────────────────────────────────────────────────────────

TABLE = r"""
family openecg
library mine
models openecg
ignores model_type patch_size lower_kernel dropout n_leads n_reg aux_target use_aux use_reg sample_res_frame
ignores tokenizer pos_type conv_stem use_lead_emb n_input_channels
requires arch vit_transformer_sample_res_convtok_mh_1ch
@usual_axes
fixed wave: the order of its classes is the meaning of the output
fixed beat: the order of its classes is the meaning of the output
fixed rhythm: the order of its classes is the meaning of the output
sizes wave = n_classes, beat = beat_n_classes, rhythm = rhythm_n_classes

stack lower mid_split
sizes x = d_model, position = places
conv_tok.*          x@first <- _ _
pos_enc             _ position x@first
lower_convs.{}.*    x@next <- x _
lower_norms.{}.*    scale x@next
skip lower_entries.{}   x -> x@next   lower_bends.{}

stack upper n_layers - mid_split
sizes x = d_model, head = n_heads, ffn = ff
upper_transformer.layers.{}.norm1.*                    scale x
upper_transformer.layers.{}.self_attn.in_proj_weight   [(head qk)|(head qk)|(head vo)] <- x
upper_transformer.layers.{}.self_attn.in_proj_bias     [(head qk)|(head qk)|(head vo)]
upper_transformer.layers.{}.self_attn.out_proj.*       y <- (head vo)
upper_transformer.layers.{}.norm2.*                    scale y
upper_transformer.layers.{}.linear1.*                  ffn <- y
upper_transformer.layers.{}.linear2.*                  x@next <- ffn
skip upper_transformer.layers.{}.norm1   x -> y        upper_transformer.layers.{}.self_attn
skip upper_transformer.layers.{}.norm2   y -> x@next   upper_transformer.layers.{}.linear2

stack fine 1
sizes x = d_model
refine.0.*   ffn <- x@first _
refine.2.*   x@last <- ffn _
skip refine_entry   x@first -> x@last   refine_end

same lower.x@last upper.x@first
same upper.x@last fine.x@first

heads
    head.*            wave <- upper.x@last
    head_sample.*     wave <- fine.x@last
    beat_sample.*     beat <- fine.x@last
    rhythm_sample.*   rhythm <- fine.x@last
"""


# ── the model and its inputs, for verbs that run it ──────────────────────────────────────────


def build(config: Mapping[str, Any]) -> HeartReader:
    """Return the module of a config.json."""
    return HeartReader(**{name: config[name] for name in EXAMPLE})


WAVES = torch.tensor(
    [[-0.2, 0.025, 0.15], [-0.03, 0.01, -0.1], [0.0, 0.012, 1.0], [0.03, 0.01, -0.2], [0.28, 0.06, 0.3]]
)
"""P, Q, R, S and T: when they come, in seconds from R, how wide they are, and how high."""
RATE = 500
"""Samples a second."""


def heartbeats(
    count: int, samples: int, generator: torch.Generator, *, noise: float = 0.03, early: float = 0.1
) -> Tensor:
    """Return simulated signals: every beat is a sum of Gaussians; some come early and are broad.

    Values are replaced by their ranks, from −1 to 1, which is how the model takes them.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    beats = 3 * samples // RATE + 2
    apart = 0.5 + 0.6 * drawn(count, 1)  # seconds between beats
    ectopic = drawn(count, beats) < early
    steps = apart * (1 + 0.1 * (drawn(count, beats) - 0.5)) * torch.where(ectopic, 0.65, 1.0)
    when = steps.cumsum(1) - apart * drawn(count, 1)  # of R
    shape = WAVES * (1 + 0.5 * (drawn(count, 1, 5, 3) - 0.5))  # (signals, 1, waves, 3)
    shape = shape.expand(count, beats, 5, 3).clone()
    shape[ectopic] *= torch.tensor([1.0, 2.2, 1.0])
    shape[..., 0, 2][ectopic] = 0.0  # an early beat has no P
    centre = when[..., None] + shape[..., 0]
    time = torch.arange(samples) / RATE
    away = (time - centre[..., None]) / shape[..., 1, None]  # (signals, beats, waves, samples)
    clean = (shape[..., 2, None] * torch.exp(-0.5 * away**2)).sum((1, 2))
    wander = 0.1 * torch.sin(2 * torch.pi * (0.3 * drawn(count, 1) * time + drawn(count, 1)))
    signal = clean + wander + noise * torch.randn(count, samples, generator=generator)
    return 2 * signal.argsort(1).argsort(1) / (samples - 1) - 1


def make_inputs(config: Mapping[str, Any], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return simulated heartbeats of up to five seconds."""
    samples = min(5 * RATE, config["places"] * config["patch_size"])
    parts = [heartbeats(min(32, count - start), samples, generator) for start in range(0, count, 32)]
    return {"signal": torch.cat(parts)}


FAMILIES = read_families(TABLE, __file__, build=build, make_inputs=make_inputs)

# All sizes differ, so that a mistake in the table cannot go unnoticed.
EXAMPLE = {
    **{"patch_size": 10, "d_model": 24, "n_heads": 3, "n_layers": 5, "mid_split": 2, "lower_kernel": 7},
    **{"ff": 20, "n_classes": 4, "beat_n_classes": 6, "rhythm_n_classes": 5, "places": 9},
}

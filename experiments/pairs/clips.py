"""Two small CLIPs of open_clip's own class, taught apart: images with captions, and what reviews mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.pairs import data, images
from experiments.pairs.berts import TEXT, missed
from experiments.pairs.data import CACHE
from experiments.pairs.images import NAMES, SIDE, TEMPLATES, Seen
from experiments.pairs.pair import STARTS
from experiments.pairs.training import kept, key
from experiments.questions import pieces
from experiments.settings import Schedule, follow

MODELS = CACHE / "experiments"
CONTEXT = 32
PREPARED = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bicubic", "size": [SIDE, SIDE]}
CONFIG: dict[str, Any] = {
    "embed_dim": 64,
    "vision_cfg": {
        "image_size": SIDE,
        "patch_size": 8,
        "layers": 4,
        "width": 128,
        "head_width": 32,
        "mlp_ratio": 2.0,
    },
    "text_cfg": {
        "context_length": CONTEXT,
        "vocab_size": 49408,
        "layers": 3,
        "width": 96,
        "heads": 4,
        "mlp_ratio": 2.0,
    },
}

TEACHING = Schedule(steps=1600, rate=1.5e-3, batch=64, decay=0.05)


@dataclass(frozen=True)
class SmallClips:
    """Bases A and B that share neither a seed nor an example."""

    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    schedule: Schedule = TEACHING
    reviews: int = 24
    """Reviews in a batch, beside the images."""

    def folder(self, which: str, seed: int) -> Path:
        """Where A or B is; it is trained if it is not there."""
        own = 100 * seed + STARTS[which]
        made_by = asdict(self) | {"seed": own, "names": NAMES, "templates": TEMPLATES, "each": images.EACH}
        return kept(key(f"clip-{which}-seed-{seed}", made_by), lambda: self._taught(which, own), MODELS)

    def about(self) -> str:
        """In words."""
        vision, text = self.config["vision_cfg"], self.config["text_cfg"]
        return (
            f"small CLIPs (images {vision['layers']} × {vision['width']}, texts {text['layers']} ×"
            f" {text['width']}), each taught {self.schedule.steps} steps on its own half of the data"
        )

    def _taught(self, which: str, seed: int) -> Any:
        torch.manual_seed(seed)
        model = open_clip.CLIP(**self.config)
        seen, shown = images.every(which), Seen()
        texts, meanings = lesson(which)
        resources = nn.Linear(self.config["embed_dim"], meanings.shape[1])
        captions = torch.stack([tokens([form.format(name) for name in NAMES]) for form in TEMPLATES])

        def loss(generator: torch.Generator) -> Tensor:
            some = seen[torch.randint(len(seen), (self.schedule.batch,), generator=generator)]
            forms = torch.randint(len(TEMPLATES), (len(NAMES),), generator=generator)
            read = torch.randint(len(texts), (self.reviews,), generator=generator)
            pixels = shown(some.images, generator)
            if torch.rand((), generator=generator) < 0.5:
                pixels = torch.where((some.labels >= 20)[:, None, None, None], pixels.flip(-1), pixels)
            said = model.encode_text(torch.cat([captions[forms, torch.arange(len(NAMES))], texts[read]]))
            names, reviews = said[: len(NAMES)], said[len(NAMES) :]
            found = nn.functional.normalize(model.encode_image(pixels), dim=-1)
            logits = model.logit_scale.exp() * found @ nn.functional.normalize(names, dim=-1).T
            means_them = nn.functional.normalize(resources(reviews), dim=-1)
            return nn.functional.cross_entropy(logits, some.labels) + missed(means_them, meanings[read])

        trained = [*model.parameters(), *resources.parameters()]
        follow(trained, loss, self.schedule, seed=seed, name=f"CLIP {which}, seed {seed}")
        return Saved(model.eval(), {"model_cfg": dict(self.config), "preprocess_cfg": PREPARED})


@dataclass(frozen=True)
class Saved:
    """A CLIP with its configuration, as a folder that open_clip opens."""

    model: nn.Module
    config: Mapping[str, Any]

    def save_pretrained(self, folder: str) -> None:
        """Write the folder."""
        tensors = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(tensors, Path(folder) / "open_clip_model.safetensors", {"format": "pt"})
        (Path(folder) / "open_clip_config.json").write_text(json.dumps(dict(self.config), indent=2))


def tokens(texts: list[str]) -> Tensor:
    """Texts in the pieces of words that CLIP reads."""
    return pieces(texts, CONTEXT)


@cache
def lesson(which: str) -> tuple[Tensor, Tensor]:
    """Passages of reviews for CLIP, and what all-MiniLM-L6-v2 says about them."""
    passages, meanings = TEXT.lesson(which)

    def read() -> dict[str, Tensor]:
        pieces = data.tokenizer(TEXT.config["vocab_size"])
        return {"texts": tokens(pieces.batch_decode(passages, skip_special_tokens=True))}

    return data.decoded(f"imdb-clip-{CONTEXT}-{which}-{len(passages)}", read)["texts"], meanings

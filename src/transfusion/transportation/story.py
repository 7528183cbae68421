"""What was done, for the file beside an output."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transfusion import __version__
from transfusion.alignment import Alignment
from transfusion.model import Model


def nobody_watching(name: str) -> None:
    """The default for those who want to hear of every tensor."""


def story_of(
    finetuned: str, base: Model, onto: Model, alignment: Alignment, alpha: float | dict[str, float]
) -> dict[str, Any]:
    """Where an output comes from, and what is needed to make it again."""
    story = alignment.provenance
    return {
        "transfusion": __version__,
        "finetuned": finetuned,
        "base": {"name": base.label, "sha256": story.source_digest},
        "onto": {"name": onto.label, "sha256": story.target_digest},
        "alignment": {
            "sha256": alignment.digest,
            "method": story.method,
            **asdict(story.policy),
            "seed": story.seed,
        },
        "alpha": alpha,
    }

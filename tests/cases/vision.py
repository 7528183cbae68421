"""Models that see."""

from __future__ import annotations

from cases.first import VIT
from making import case

CASES = (
    case("deit", "deit", "DeiTModel", "DeiTConfig", VIT),
    case("deit-classifier", "deit", "DeiTForImageClassification", "DeiTConfig", VIT),
    case("deit-teacher", "deit", "DeiTForImageClassificationWithTeacher", "DeiTConfig", VIT),
    case("deit-masked", "deit", "DeiTForMaskedImageModeling", "DeiTConfig", {**VIT, "patch_size": 2}),
)

"""α without being asked: as much of a change as keeps its size relative to the weights."""

from __future__ import annotations

from collections import defaultdict

import torch

from transfusion.checkpoint.tensor_content import row_blocks
from transfusion.model.model import Model
from transfusion.transportation.alpha import Alpha, layer_of

AUTO = "auto"


def balanced_alpha(a: Model, b: Model) -> Alpha:
    """α for every layer: how much larger B's weights are than A's.

    A change that was 1 % of A's weights is then 1 % of B's. For a B that is A with its units in another
    order, this is 1 everywhere.
    """
    sizes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in a.architecture.backbone:
        for which, model in enumerate((a, b)):
            sizes[layer_of(name)][which] += _squares(model, name)
    ratios = {layer: _ratio(*both) for layer, both in sizes.items()}
    return Alpha(ratios.pop("", 1.0), {f"{layer}.*": ratio for layer, ratio in ratios.items()})


def _squares(model: Model, name: str) -> float:
    shape = model.info(name).shape
    blocks = (model.read(name, rows if shape else None).float() for rows in row_blocks(shape))
    return sum(float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2 for block in blocks)


def _ratio(a: float, b: float) -> float:
    return round((b / a) ** 0.5, 6) if a else 1.0

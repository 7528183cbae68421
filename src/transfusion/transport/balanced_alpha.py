"""α from weights alone: the ratio of the sizes of B's and A's weights."""

from __future__ import annotations

from collections import defaultdict

import torch

from transfusion.architecture.naming import block_of
from transfusion.files.tensor_files import row_blocks
from transfusion.model.model import Model
from transfusion.transport.alpha import Alpha

AUTO = "auto"


def balanced_alpha(a: Model, b: Model) -> Alpha:
    """Return one α per layer: the norm of B's weights divided by the norm of A's.

    A change of 1 % of A's weights then is a change of 1 % of B's. If B is a permutation of A, every α is 1.
    """
    sizes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in a.architecture.backbone:
        for which, model in enumerate((a, b)):
            sizes[block_of(name)][which] += _squares(model, name)
    ratios = {layer: _ratio(*both) for layer, both in sizes.items()}
    return Alpha(ratios.pop("", 1.0), {f"{layer}.*": ratio for layer, ratio in ratios.items()})


def _squares(model: Model, name: str) -> float:
    shape = model.info(name).shape
    blocks = (model.read(name, rows if shape else None).float() for rows in row_blocks(shape))
    return sum(float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2 for block in blocks)


def _ratio(a: float, b: float) -> float:
    return round((b / a) ** 0.5, 6) if a else 1.0

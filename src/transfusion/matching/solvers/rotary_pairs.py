"""The pairs of units that rotary positions rotate, each pair by its own angle.

Rotations of one plane commute: q and k may both be rotated in every plane by any angle before the positions
rotate them, and their products stay the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import Architecture
from transfusion.architecture.table import Symmetry


def rotary_pairs(group: Symmetry, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second unit of every plane."""
    units = torch.arange(size)
    match group:
        case Symmetry.ROTARY:
            return units[: size // 2], units[size // 2 :]
        case Symmetry.INTERLEAVED:
            return units[::2], units[1::2]
    raise ValueError(f"the units of an axis that is {group} do not rotate in pairs")


def split_pairs(covariances: Tensor, group: Symmetry) -> Tensor:
    """Return how B's planes match A's, as complex numbers: their angle, and their agreement as the size.

    ``covariances`` has B's units and A's units in its last two dimensions.
    """
    one, two = rotary_pairs(group, covariances.shape[-1])
    along = covariances[..., one, one] + covariances[..., two, two]
    return torch.complex(along, covariances[..., two, one] - covariances[..., one, two])


def rotate_pairs(angles: Tensor, group: Symmetry) -> Tensor:
    """Return the rotation by an angle in every plane; one matrix for every row of angles."""
    size = 2 * angles.shape[-1]
    one, two = rotary_pairs(group, size)
    matrix = angles.new_zeros(*angles.shape[:-1], size, size)
    matrix[..., one, one] = matrix[..., two, two] = torch.cos(angles)
    matrix[..., two, one] = torch.sin(angles)
    matrix[..., one, two] = -torch.sin(angles)
    return matrix


def random_pair_rotations(architecture: Architecture, seed: int) -> dict[str, Map]:
    """Return rotations by random angles, in float64, for every axis whose units rotate in pairs."""
    rng = np.random.default_rng(seed)
    maps: dict[str, Map] = {}
    for space in architecture.rotary_spaces():
        rows = architecture.rows(space.id)
        angles = torch.from_numpy(rng.uniform(-np.pi, np.pi, (rows, space.size // 2)))
        ones: NDArray[np.floating[Any]] = np.ones(rows)
        maps[space.id] = Map.rotation(rotate_pairs(angles, space.group).numpy(), ones, ones)
    return maps

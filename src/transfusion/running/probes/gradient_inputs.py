"""Inputs changed by gradient: inverted until a model answers in a wanted way, or adversarial to a student.

Images, spectrograms and waveforms can be changed. Two priors keep inverted ones like real inputs: neighbours
are similar, and the answer must hold when the input is shifted a little.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RATE = 0.2
"""The learning rate, in units of inputs with unit variance."""
SMOOTHNESS = 0.05
"""The weight of the differences between neighbours."""
RANGE = 3.0
"""The largest absolute value of an inverted input."""
REACH = 0.2
"""The largest change of an adversarial input, in the same units."""

Loss = Callable[[Tensor], Tensor]
"""How far the answers to inputs are from the wanted ones, as one number."""


def invert(inputs: Tensor, loss: Loss, steps: int, generator: torch.Generator) -> Tensor:
    """Change inputs by Adam until the loss is small; return values between -`RANGE` and `RANGE`."""
    pixels = inputs.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([pixels], lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(shifted(pixels, generator)) + SMOOTHNESS * roughness(pixels)
        torch.autograd.backward(value, inputs=[pixels])
        optimizer.step()
    return pixels.detach().clamp(-RANGE, RANGE)


def adversarial(inputs: Tensor, loss: Loss, generator: torch.Generator) -> Tensor:
    """Change inputs by one step along the sign of the gradient, so that the loss rises."""
    pixels = inputs.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(pixels), pixels)
    reach = REACH * torch.rand(len(inputs), *[1] * (inputs.ndim - 1), generator=generator)
    return inputs + reach * slope.sign()


def shifted(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Shift all inputs alike, by up to an eighth of their size along every dimension of space or time."""
    dims = _extended(inputs)
    shifts = []
    for dim in dims:
        reach = max(1, inputs.shape[dim] // 8)
        shifts.append(int(torch.randint(-reach, reach + 1, (), generator=generator)))
    return torch.roll(inputs, shifts, dims)


def roughness(inputs: Tensor) -> Tensor:
    """Return the mean absolute difference between neighbours, summed over the dimensions."""
    return torch.stack([inputs.diff(dim=dim).abs().mean() for dim in _extended(inputs)]).sum()


def _extended(inputs: Tensor) -> tuple[int, ...]:
    """Return the dimensions of space or time: rows and columns of images, the last one of anything else."""
    return (2, 3) if inputs.ndim == 4 else (inputs.ndim - 1,)

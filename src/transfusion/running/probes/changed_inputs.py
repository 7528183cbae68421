"""Changed inputs: corrupted as real ones are, recombined, inverted from a model, or adversarial to one.

They are what a refinement learns from besides plain probes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.texts import text_inputs

LOUDEST = 2.5
"""The largest standard deviation of added noise, in units of the inputs' own."""
SHORTEST, LONGEST = 2, 12
"""The number of tokens of the pieces that a recombined text is made of."""
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


def corrupted_images(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Corrupt normalised images: noise, negatives, mosaics, covered areas, lost colour; some stay."""
    corruptions = (_same, noisy, noisy, _negative, _mosaic, _covered, _grey)
    kinds = torch.randint(len(corruptions), (len(pixels),), generator=generator)
    corrupted = pixels.clone()
    for number, corrupt in enumerate(corruptions):
        chosen = kinds == number
        if chosen.any():
            corrupted[chosen] = corrupt(pixels[chosen], generator)
    return corrupted


def noisy(values: Tensor, generator: torch.Generator) -> Tensor:
    """Add white noise, with a strength of its own for every input."""
    strength = LOUDEST * torch.rand(len(values), *[1] * (values.ndim - 1), generator=generator)
    return values + strength * torch.randn(values.shape, generator=generator)


def _same(images: Tensor, generator: torch.Generator) -> Tensor:
    return images


def _negative(images: Tensor, generator: torch.Generator) -> Tensor:
    return -images


def _mosaic(images: Tensor, generator: torch.Generator) -> Tensor:
    """Replace square cells of one size by their means."""
    rows, columns = images.shape[2:]
    sizes = [size for size in (2, 4, 8, 16, 32) if 2 * size <= min(rows, columns)] or [1]
    size = sizes[int(torch.randint(len(sizes), (), generator=generator))]
    cells = nn.functional.avg_pool2d(images, size, ceil_mode=True)
    enlarged = nn.functional.interpolate(cells, scale_factor=size, mode="nearest")
    return enlarged[:, :, :rows, :columns]


def _covered(images: Tensor, generator: torch.Generator) -> Tensor:
    """Cover a rectangle of every image with one shade."""
    count, _, rows, columns = images.shape
    covered = torch.ones(count, 1, 1, 1, dtype=torch.bool)
    for dim, size in ((2, rows), (3, columns)):
        extent = size * (0.25 + 0.4 * torch.rand(count, 1, generator=generator))
        start = (size - extent) * torch.rand(count, 1, generator=generator)
        steps = torch.arange(size)
        inside = (steps >= start) & (steps < start + extent)
        covered = covered & inside.reshape(count, 1, *((size, 1) if dim == 2 else (1, size)))
    shade = 4 * (torch.rand(count, 1, 1, 1, generator=generator) - 0.5)
    return torch.where(covered, shade, images)


def _grey(images: Tensor, generator: torch.Generator) -> Tensor:
    """Remove the colour, and add some noise."""
    grey = images.mean(1, keepdim=True).expand_as(images)
    strength = torch.rand(len(images), 1, 1, 1, generator=generator)
    return grey + strength * torch.randn(images.shape, generator=generator)


def recombined_texts(subject: ProbedModel, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make texts of short pieces of the given ones, each piece at the place that it had.

    The special tokens around a text stay, because they are at the same place in all texts.
    """
    count, length = ids.shape
    pieces = torch.randint(SHORTEST, LONGEST + 1, (count, length), generator=generator).cumsum(1)
    ends = torch.zeros(count, length + LONGEST + 1, dtype=torch.int64)
    ends.scatter_(1, pieces.clamp(max=length), 1)
    piece = ends[:, :length].cumsum(1)
    origin = torch.randint(count, (count, length), generator=generator).gather(1, piece)
    return text_inputs(subject, ids[origin, torch.arange(length)])


# ── by gradients ─────────────────────────────────────────────────────────────────────────────


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

"""The head that a fine-tune brought with it, fitted to what it now reads: a ridge regression, in closed form.

Maps keep most of the directions that a head reads, but shrink them: the logits of a moved model may be fifty
times too small, though they rank inputs as the fine-tune's do. Gradient steps need long to mend a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.running.activations import on_module_calls
from transfusion.runtime.engines import widest

RIDGES = (1e-2, 1e-1, 1.0, 10.0, 100.0)
"""The weights of staying at the head as it was, in units of its features' mean square."""
BETTER, ROUNDING = 0.01, 1e-6
"""By how much a changed head must be nearer: as a share, and beyond rounding."""
HELD_OUT = 4
"""One in so many inputs decides on the ridge."""


def head_of(
    student: nn.Module, run: Callable[[], Tensor], naming: Naming, carried: Collection[str]
) -> nn.Linear | None:
    """Return the carried linear layer with a bias whose output is what ``run`` returns; None without one."""
    linear = {
        name: part
        for name, part in student.named_modules()
        if isinstance(part, nn.Linear) and part.bias is not None
        if naming.canonical(f"{name}.weight") in carried
    }
    made: dict[str, Tensor] = {}

    def keep(name: str, given: list[Tensor], output: Tensor) -> None:
        made[name] = output

    with on_module_calls(linear, keep):
        logits = run()
    places = {
        one.untyped_storage().data_ptr(): name for name, one in made.items() if one.shape == logits.shape
    }
    name = places.get(logits.untyped_storage().data_ptr())
    return None if name is None else linear[name]


def features_of(head: nn.Linear, run: Callable[[], object]) -> Tensor:
    """Return what a head reads while a model runs (inputs, features)."""
    read: list[Tensor] = []
    with on_module_calls({"head": head}, lambda name, given, output: read.extend(given[:1])):
        run()
    return read[-1]


def fitted(
    head: nn.Linear,
    features: Tensor,
    wanted: Tensor,
    distance: Callable[[Tensor, Tensor], float],
) -> tuple[Tensor, Tensor]:
    """Return the weight and bias with which a head's answers are nearest to the wanted logits.

    The head is scaled, and then changed by a ridge regression of what is left. Logits are compared without
    their mean, which no distribution depends on. ``distance(found, wanted)`` chooses among ridges.
    """
    held = torch.arange(len(features)) % HELD_OUT == 0
    wide = widest(features.device)
    x, target = features[~held].to(wide), _centred(wanted[~held].to(wide))  # (inputs, features), (…, classes)
    mean, middle = x.mean(0), target.mean(0)
    x, target = x - mean, target - middle
    own = _centred(head.weight.detach().to(wide).T)  # (features, classes)
    found = x @ own
    scale = ((found * target).sum() / found.square().sum().clamp(min=1e-30)).clamp(min=0)
    products, unit = x.T @ x, x.square().sum() / x.shape[1]
    rest = x.T @ (target - scale * found)
    identity = torch.eye(len(products)).to(products)

    def as_head(weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.T.to(head.weight.dtype), (middle - mean @ weight).to(head.weight.dtype)

    choices: Sequence[tuple[Tensor, Tensor]] = [
        (head.weight.detach(), head.bias.detach()),
        as_head(scale * own),
        *(
            as_head(scale * own + torch.linalg.solve(products + ridge * unit * identity, rest))
            for ridge in RIDGES
        ),
    ]
    distances = [distance(features[held] @ one.T + bias, wanted[held]) for one, bias in choices]
    nearest = min(distances)
    clearly = nearest < (1 - BETTER) * distances[0] - ROUNDING
    return choices[distances.index(nearest) if clearly else 0]


def _centred(values: Tensor) -> Tensor:
    """Return values without their mean over the classes."""
    return values - values.mean(-1, keepdim=True)

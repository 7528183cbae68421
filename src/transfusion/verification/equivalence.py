"""Proof by running: A and π(A) through their own library, in float64, compared output by output.

A π that turns units is no symmetry, and nothing about it is exact. What can be said of it is how well it
predicts what B computes, on probes that it was not found on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Permutation
from transfusion.architecture.architecture import HeadPolicy
from transfusion.errors import SettingError
from transfusion.live.activations import record_outputs
from transfusion.live.live_model import LiveModel, largest_difference
from transfusion.matching.activations.correspondence import run_on_probes
from transfusion.matching.activations.prediction_quality import (
    PredictionQuality,
    mean_quality,
    prediction_qualities,
)
from transfusion.matching.methods import FunctionalOptions
from transfusion.model.model import Model, Reference

TOLERANCE = 1e-9
BEYOND_CHANCE = 0.01
"""How much more of B's activations π must predict than chance does."""


@dataclass(frozen=True)
class Verification:
    """What running both models showed."""

    difference: float
    """The largest absolute difference between outputs that should agree."""
    tolerance: float
    outputs: tuple[str, ...]
    """The outputs that were compared."""
    shortcuts: int
    """Residual connections that had to carry P_out P_inᵀ for this."""
    parting: str | None
    """The first module whose output differs, if any."""
    reason: str
    """Why the two would differ."""

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance

    def metadata(self) -> dict[str, Any]:
        """All of it, as a result tells it."""
        return {**asdict(self), "reason": None if self.equal else self.reason, "equal": self.equal}


def verify(
    a: Model | Reference,
    *,
    via: Alignment | str | Path,
    tolerance: float = TOLERANCE,
    config: str | Path | Mapping[str, Any] | None = None,
) -> Verification:
    """Whether π(A) computes what A computes, and if not, where the two part.

    ``config`` is for weights that come without one.

    >>> found = transfusion.verify("models/a", via="pi.safetensors")
    >>> found.equal, found.outputs
    (True, ('logits',))
    """
    if not 0 <= tolerance < inf:  # nor is NaN
        raise SettingError(f"tolerance = {tolerance}: nothing could pass, or all", hint="1e-9 is usual")
    alignment = via if isinstance(via, Alignment) else Alignment.load(via)
    metadata = alignment.provenance
    model = a if isinstance(a, Model) else Model.open(a, config=config)
    model = model.under(metadata.policy)
    alignment.require_for(model.architecture)
    alignment.require_between(source=model)
    return compare(LiveModel.of(model), alignment, tolerance)


def compare(live: LiveModel, alignment: Alignment, tolerance: float = TOLERANCE) -> Verification:
    """Run a live model as it is and under π; with plain shortcuts, if π was made for them."""
    aided = not alignment.provenance.options.get("plain_shortcuts")
    with record_outputs(live) as before:
        expected = live.expected(alignment, live.outputs())
    with record_outputs(live) as after, live.moved(alignment, shortcuts=aided):
        found = live.outputs()
    parting = next(
        (
            module
            for module, (layout, value) in before.outputs.items()
            if float((alignment.move(value, layout) - after.outputs[module][1]).abs().max()) > tolerance
        ),
        None,
    )
    return Verification(
        difference=largest_difference(expected, found),
        tolerance=tolerance,
        outputs=tuple(expected),
        shortcuts=len(alignment.rotated(live.architecture.shortcuts)) if aided else 0,
        parting=parting,
        reason=_reason(alignment),
    )


def _reason(alignment: Alignment) -> str:
    metadata = alignment.provenance
    if any(not isinstance(map_, Permutation) for map_ in alignment.maps.values()):
        return "this π mixes units, which is no symmetry; it moves task vectors, not models"
    if metadata.policy.heads is HeadPolicy.FLAT:
        return f"{metadata.method} ignores the boundaries of heads, which attention does not"
    if metadata.options.get("plain_shortcuts"):
        return f"{metadata.method} leaves residual connections plain although the stream's maps differ"
    return "this π moves something that this architecture does not allow to move"


@dataclass(frozen=True)
class Prediction:
    """How well B's activations are predicted from A's, for everything that may move."""

    axes: Mapping[str, PredictionQuality]
    probes: str
    """What both models were shown."""

    @property
    def mean(self) -> PredictionQuality:
        return mean_quality(self.axes)

    @property
    def holds(self) -> bool:
        """Whether π predicts more than chance does, and no less than nothing moving."""
        every = self.mean
        return every.found > every.null + BEYOND_CHANCE and every.found >= every.identity - BEYOND_CHANCE

    def metadata(self) -> dict[str, Any]:
        """All of it, as a result tells it."""
        axes = {id: asdict(one) for id, one in self.axes.items()}
        return {**asdict(self.mean), "holds": self.holds, "probes": self.probes, "axes": axes}


def verified_model(a: str, alignment: Alignment, via: str | Path) -> dict[str, Any]:
    """What a result of running models is about: A, and a π that is known by its content."""
    info = {"sha256": alignment.digest, "method": alignment.provenance.method}
    return {"a": a, "via": str(via), "alignment": info}


def predict(
    a: Model | Reference,
    b: Model | Reference,
    *,
    via: Alignment | str | Path,
    probes: int = 64,
    calibrate: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
) -> Prediction:
    """What a π is worth: the share of B's activations that it predicts from A's, on new probes.

    ``config`` is for weights that come without one.

    >>> found = transfusion.predict("models/a", "models/b", via="pi.safetensors")
    >>> found.holds, sorted(found.axes)[0]
    (True, 'layer.0.ffn')
    """
    alignment = via if isinstance(via, Alignment) else Alignment.load(via)
    metadata = alignment.provenance
    models = [one if isinstance(one, Model) else Model.open(one, config=config) for one in (a, b)]
    source, target = (model.under(metadata.policy) for model in models)
    alignment.require_for(source.architecture)
    alignment.require_between(source=source, target=target)
    own = str(Path(calibrate).resolve()) if calibrate else None
    options, seed = FunctionalOptions(probes=probes, calibrate=own), metadata.seed + 1
    then = metadata.options.get("functional") or {}
    if own and then.get("calibrate") == own:  # π was found on these: only what was held out then is new
        options, seed = (
            FunctionalOptions(probes=then["probes"], samples=then["samples"], calibrate=own),
            metadata.seed,
        )
    with run_on_probes(source, target, options, seed) as probed:
        return Prediction(prediction_qualities(probed.held_out, alignment.maps), probed.about)

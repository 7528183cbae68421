"""Verification by running models: A and π(A) in their library, in float64, compared output by output.

A π with rotations is no symmetry of A, and π(A) does not equal A. Such a π is judged by how well it predicts
B's activations from A's, on probes that it was not found on.
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
from transfusion.live.hooks import record_outputs
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
"""The margin over chance in the share of B's activations that π predicts."""


@dataclass(frozen=True)
class Verification:
    """The result of comparing A with π(A)."""

    difference: float
    """The largest absolute difference of the outputs."""
    tolerance: float
    outputs: tuple[str, ...]
    """The names of the compared outputs."""
    shortcuts: int
    """The number of residual connections that needed P_out P_inᵀ."""
    parting: str | None
    """The first module whose output differs, if any."""
    reason: str
    """The likely reason for a difference."""

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance

    def metadata(self) -> dict[str, Any]:
        """Return plain data, for a result file."""
        return {**asdict(self), "reason": None if self.equal else self.reason, "equal": self.equal}


def verify(
    a: Model | Reference,
    *,
    via: Alignment | str | Path,
    tolerance: float = TOLERANCE,
    config: str | Path | Mapping[str, Any] | None = None,
) -> Verification:
    """Test whether π(A) computes the same as A, and find the first module that differs.

    Parameters
    ----------
        a: The model A: a path, a hub id, a module, or an open `Model`.
        via: π, or its file.
        tolerance: The largest difference of outputs that counts as equal.
        config: The configuration, for weights without a config.json.

    >>> found = transfusion.verify("models/a", via="pi.safetensors")
    >>> found.equal, found.outputs
    (True, ('logits',))
    """
    if not 0 <= tolerance < inf:  # also refuses NaN
        raise SettingError(
            f"tolerance = {tolerance}: it must be a finite number of at least 0", hint="for example 1e-9"
        )
    alignment = via if isinstance(via, Alignment) else Alignment.load(via)
    metadata = alignment.provenance
    model = a if isinstance(a, Model) else Model.open(a, config=config)
    model = model.under(metadata.policy)
    alignment.require_for(model.architecture)
    alignment.require_between(source=model)
    return compare(LiveModel.of(model), alignment, tolerance)


def compare(live: LiveModel, alignment: Alignment, tolerance: float = TOLERANCE) -> Verification:
    """Run a live model with and without π; with plain shortcuts if π was found for them."""
    aided = not alignment.provenance.options.get("plain_shortcuts")
    with record_outputs(live) as before:
        expected = live.expected(alignment, live.outputs())
    with record_outputs(live) as after, live.moved(alignment, shortcuts=aided):
        found = live.outputs()
    parting = next(
        (
            module
            for module, (layout, value) in before.items()
            if float((alignment.move(value, layout) - after[module][1]).abs().max()) > tolerance
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
        return f"{metadata.method} permutes units across heads, which changes attention"
    if metadata.options.get("plain_shortcuts"):
        return f"{metadata.method} leaves residual connections plain although the stream's maps differ"
    return "this π permutes an axis that is not free in this architecture"


@dataclass(frozen=True)
class Prediction:
    """How well π predicts B's activations from A's, for every axis that π moves."""

    axes: Mapping[str, PredictionQuality]
    probes: str
    """A description of the probes."""

    @property
    def mean(self) -> PredictionQuality:
        return mean_quality(self.axes)

    @property
    def holds(self) -> bool:
        """Whether π predicts more than chance does, and no less than the identity does."""
        every = self.mean
        return every.found > every.null + BEYOND_CHANCE and every.found >= every.identity - BEYOND_CHANCE

    def metadata(self) -> dict[str, Any]:
        """Return plain data, for a result file."""
        axes = {id: asdict(one) for id, one in self.axes.items()}
        return {**asdict(self.mean), "holds": self.holds, "probes": self.probes, "axes": axes}


def verified_model(a: str, alignment: Alignment, via: str | Path) -> dict[str, Any]:
    """Return the inputs of a verification as plain data: A, and π with its hash."""
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
    """Measure the share of B's activations that π predicts from A's, on probes that it was not found on.

    Parameters
    ----------
        a: The model A: a path, a hub id, a module, or an open `Model`.
        b: The model B.
        via: π, or its file.
        probes: The number of synthetic inputs.
        calibrate: A path with unlabelled inputs to use as probes instead.
        config: The configuration, for weights without a config.json.

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
    if own and then.get("calibrate") == own:  # π was found on these inputs: use those that were held out
        options, seed = (
            FunctionalOptions(probes=then["probes"], samples=then["samples"], calibrate=own),
            metadata.seed,
        )
    with run_on_probes(source, target, options, seed) as probed:
        return Prediction(prediction_qualities(probed.held_out, alignment.maps), probed.about)

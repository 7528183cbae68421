"""Verification by running models: A and π(A) in their library, in float64, compared output by output.

A π with rotations is no symmetry of A, and π(A) does not equal A. Such a π is judged by how well it predicts
B's activations from A's, on probes that it was not found on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.text import Text

from transfusion.alignment.alignment import Alignment, require_one_shape
from transfusion.alignment.description import prediction
from transfusion.architecture.architecture import HeadPolicy
from transfusion.errors import SettingError, VerificationError
from transfusion.matching.activations import run_both, run_on_probes, running_within_memory
from transfusion.matching.functional import PredictionQuality, mean_quality, prediction_qualities
from transfusion.matching.methods import FunctionalOptions
from transfusion.matching.other_shapes import shape_qualities
from transfusion.model.model import Model, Reference
from transfusion.model.pair import ConfigArgument, Pair, open_model
from transfusion.report.result_files import Result, ResultFiles, fields_of
from transfusion.running.activations import record_outputs
from transfusion.running.building import skeleton
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.running.streaming import RunConfig, streamed_bytes
from transfusion.runtime.engines import require_device
from transfusion.runtime.progress import SILENT, Progress, followed, phase
from transfusion.runtime.resources import LIBRARY, LOCAL, Resources
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.scratch import give_back_at_once

TOLERANCE = 1e-9
BEYOND_CHANCE = 0.01
"""The margin over chance in the share of B's activations that π predicts."""


@dataclass(frozen=True, repr=False)
class Verification(Result):
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
        return {**fields_of(self), "reason": None if self.equal else self.reason, "equal": self.equal}

    def __rich__(self) -> Text:
        aided = f", with P_out·P_inᵀ in {self.shortcuts} shortcuts" if self.shortcuts else ""
        found = f"largest difference {self.difference:.2g} over {', '.join(self.outputs)}"
        return Text(f"π(A) computes what A computes{aided}: {found}" if self.equal else self._parted())

    def _parted(self) -> str:
        where = f", first in {self.parting}" if self.parting else ""
        return f"π(A) does not compute what A computes: largest difference {self.difference:.3g}{where}"

    def require(self) -> None:
        """Refuse two models that differ."""
        if not self.equal:
            raise VerificationError(
                self._parted(),
                hint=self.reason
                if self.difference > TOLERANCE
                else "float64 itself is no more exact than this; allow a larger `tolerance`",
            )


@followed
def verify(
    a: Model | Reference,
    *,
    via: Alignment | str | Path,
    tolerance: float = TOLERANCE,
    config: ConfigArgument = None,
    output: str | Path | None = None,
    force: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
) -> Verification:
    """Test whether π(A) computes the same as A, and find the first module that differs.

    ``via`` is π or its file, ``config`` the configuration of weights without one, and ``output`` a file of
    JSON for the result. ``resources`` name the device; with a limit of memory, the model is run layer by
    layer.

    >>> found = transfusion.verify("models/a", via="pi.safetensors")
    >>> found.equal, found.outputs
    (True, ('logits',))
    """
    if not 0 <= tolerance < inf:  # also refuses NaN
        raise SettingError(
            f"tolerance = {tolerance}: it must be a finite number of at least 0", hint="for example 1e-9"
        )
    record, files = RunRecord("verify"), ResultFiles.checked(output, force=force, inputs=(a, via))
    alignment = require_one_shape(via)
    model = open_model(a, config).under(alignment.provenance.policy)
    alignment = alignment.fitted(model.architecture)
    alignment.require_for(model.architecture)
    alignment.require_between(source=model)
    by_layer, device = resources.memory is not None, require_device(resources.device, torch.float64)
    if by_layer:
        resources.within_memory(_bytes_by_layer(model), "a layer of the model in float64, moved by π,")
        give_back_at_once()
    with phase("running A and π(A)"):
        found = compare(LiveModel.of(model, by_layer=by_layer, device=device), alignment, tolerance)
    return files.finish(found, record, _about(model.label, alignment, via))


def compare(live: LiveModel, alignment: Alignment, tolerance: float = TOLERANCE) -> Verification:
    """Run a live model with and without π; with plain shortcuts if π was found for them."""
    aided = not alignment.provenance.options.get("plain_shortcuts")
    expected = live.expected(alignment, live.outputs())
    with live.moved(alignment, shortcuts=aided):
        found = live.outputs()
    difference = largest_difference(expected, found)
    return Verification(
        difference=difference,
        tolerance=tolerance,
        outputs=tuple(expected),
        shortcuts=len(alignment.broken_shortcuts(live.architecture.shortcuts)) if aided else 0,
        parting=None if difference <= tolerance else _first_difference(live, alignment, tolerance, aided),
        reason=_reason(alignment),
    )


def _first_difference(live: LiveModel, alignment: Alignment, tolerance: float, aided: bool) -> str | None:
    """Return the first module whose output differs. Both runs are repeated, with all outputs in memory."""
    with record_outputs(live) as before:
        live.outputs()
    with record_outputs(live) as after, live.moved(alignment, shortcuts=aided):
        live.outputs()
    return next(
        (
            module
            for module, (layout, value) in before.outputs.items()
            if float((alignment.move(value, layout) - after.outputs[module][1]).abs().max()) > tolerance
        ),
        None,
    )


def _bytes_by_layer(model: Model) -> int:
    """Return the bytes of running a model layer by layer in float64: a layer, one tensor before and after it
    is moved, and the library.
    """
    largest = max(torch.Size(model.info(name).shape).numel() for name in model.names)
    stored = max(model.info(name).nbytes for name in model.names)
    return 2 * streamed_bytes(model, skeleton(model)) + torch.float64.itemsize * largest + stored + LIBRARY


def _reason(alignment: Alignment) -> str:
    metadata = alignment.provenance
    if not alignment.permutes:
        return "this π mixes units, which is no symmetry; it moves task vectors, not models"
    if metadata.policy.heads is HeadPolicy.FLAT:
        return f"{metadata.method} permutes units across heads, which changes attention"
    if metadata.options.get("plain_shortcuts"):
        return f"{metadata.method} leaves residual connections plain although the stream's maps differ"
    return "this π permutes an axis that is not free in this architecture"


@dataclass(frozen=True, repr=False)
class Prediction(Result):
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

    def __rich__(self) -> Group:
        shares = {name: fields_of(quality) for name, quality in self.axes.items()}
        return Group(prediction(shares), Text(f"{self.mean}; inputs: {self.probes}"))

    def metadata(self) -> dict[str, Any]:
        """Return plain data, for a result file."""
        return {**fields_of(self.mean), "holds": self.holds, **fields_of(self)}

    def require(self) -> None:
        """Refuse a π that predicts no more than chance."""
        if not self.holds:
            raise VerificationError(
                f"π does not predict B's activations: {self.mean}",
                hint="the two models may have nothing in common",
            )


def _about(a: str, alignment: Alignment, via: Alignment | str | Path) -> dict[str, Any]:
    """Return the subject of a result: A, and the file, digest and method of π."""
    info = {"blake3": alignment.digest, "method": alignment.provenance.method}
    return {"a": a, "via": str(via) if isinstance(via, str | Path) else None, "alignment": info}


@followed
def predict(
    a: Model | Reference,
    b: Model | Reference | None = None,
    *,
    via: Alignment | str | Path,
    probes: int = 64,
    calibrate: str | Path | None = None,
    config: ConfigArgument = None,
    output: str | Path | None = None,
    force: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
) -> Prediction:
    """Measure the share of B's activations that π predicts from A's, on probes that it was not found on.

    B is by default the model that π names. ``probes`` is the number of synthetic inputs, and ``calibrate`` a
    path with unlabelled inputs instead. All else is as in `verify`.

    >>> found = transfusion.predict("models/a", "models/b", via="pi.safetensors")
    >>> found.holds, sorted(found.axes)[0]
    (True, 'layer.0.ffn')
    """
    record, files = RunRecord("verify"), ResultFiles.checked(output, force=force, inputs=(a, b, via))
    alignment = Alignment.load(via) if isinstance(via, str | Path) else via
    made, other_shape = alignment.provenance, alignment.other_shape
    own = str(Path(calibrate).resolve()) if calibrate else None
    options, seed = FunctionalOptions(probes=probes, calibrate=own), made.seed + 1
    target = made.target if b is None else b
    pair = Pair.open(a, target, config, vocabulary_share=0.0, other_shapes=other_shape)
    if other_shape:
        source = pair.a
        alignment.require_between(source=source, target=pair.b)
        with run_both(source.to_run, pair.b, options, seed, resources.device) as both:
            found = Prediction(shape_qualities(both, alignment), both.about)
    else:
        compared = pair.with_common_tokens.under(made.policy)
        source = compared.a
        alignment = alignment.fitted(source.architecture)
        alignment.require_vocabulary(source)
        alignment.require_for(source.architecture)
        alignment.require_between(source=source, target=compared.b)
        then = made.options.get("functional") or {}
        if own and then.get("calibrate") == own:  # π was found on these inputs: use those that were held out
            options = FunctionalOptions(probes=then["probes"], samples=then["samples"], calibrate=own)
            seed = made.seed
        running_within_memory(source, compared.b, options, resources)
        run_config = RunConfig.within(resources)
        with run_on_probes(source, compared.b, options, seed, run_config) as probed:
            found = Prediction(prediction_qualities(probed.held_out, alignment.maps), probed.about)
    return files.finish(found, record, {**_about(source.label, alignment, via), "b": pair.b.label})

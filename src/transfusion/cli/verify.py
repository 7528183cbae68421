"""The verb ``verify``: compare A with π(A), measure what π predicts of B, or certify a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from transfusion.cli.console import out, print_json
from transfusion.errors import VerificationError
from transfusion.runtime.progress import BARS, SILENT, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.settings import ARCHITECTURE, CONFIG, MODELS, setting, verb

if TYPE_CHECKING:
    from transfusion.verification.certify import Certificate
    from transfusion.verification.verify import Prediction, Verification


@dataclass(frozen=True)
class VerifySettings:
    """The settings of the verb ``verify``."""

    a: str | None = setting(None, "The model: a folder or a hub id.", metavar="A")
    _: KW_ONLY
    via: str | None = setting(None, "The file of π.", metavar="PI")
    onto: str | None = setting(
        None, "Measure how much of B's activations π predicts.", metavar="B", shown="as π names it"
    )
    tolerance: float = setting(1e-9, "The largest difference that passes.", kind=float, least=0, shown=True)
    model: str | None = setting(
        None, "The class to certify a table on: module:Class or Class.", metavar="CLASS"
    )
    output: Path | None = setting(None, "A .json file to write the result to.", kind=Path, flag="--output,-o")
    force: bool = setting(False, "Replace an existing output.", kind=bool)
    calibrate: Path | None = setting(
        None,
        "With --onto: inputs of your own for both models, without labels: a folder of images, a text file, or"
        " a file of tensors.",
        kind=Path,
        shown="synthetic inputs",
    )
    config: Path | None = setting(None, CONFIG, kind=Path, panel=MODELS)
    architecture: Path | None = setting(None, ARCHITECTURE, kind=Path, panel=MODELS)
    resources: Resources = setting(LOCAL, "Memory and device.", kind=Resources, only=("device", "memory"))
    progress: Progress = setting(SILENT, "Follows the run.", shown=BARS, typed=False)


@verb(VerifySettings)
def verify(settings: VerifySettings) -> Verification | Prediction | Certificate:
    """Return the result of the test that the settings ask for."""
    a, via, table, of_class = settings.a, settings.via, settings.architecture, settings.model
    written: dict[str, Any] = {"output": settings.output, "force": settings.force}
    if a is not None and via is not None and of_class is None:
        from transfusion.verification import verify as tests

        common = {**written, "via": via, "config": settings.config, "resources": settings.resources}
        if settings.onto is not None or _rotates(via):
            return tests.predict(a, settings.onto, calibrate=settings.calibrate, **common)
        if settings.calibrate is not None:
            raise typer.BadParameter("--calibrate goes with --onto")
        return tests.verify(a, tolerance=settings.tolerance, **common)
    if table is not None and of_class is not None and a is None and via is None:
        from transfusion.verification.certify import certify_file

        return certify_file(table, of_class, settings.config, **written)
    raise typer.BadParameter("give either A --via PI, or --architecture FILE --model CLASS")


def _rotates(via: str) -> bool:
    """Whether a file of π rotates units, so that no equality can be proved."""
    from transfusion.alignment.alignment import Alignment

    found = Alignment.load(via)
    return found.other_shape or any(map_.rotates for map_ in found.maps.values())


def show_verified(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print what was found; fail if a model differs, a π predicts nothing, or a table is wrong."""
    from transfusion.verification.verify import Prediction, Verification

    told = result.equal if isinstance(result, Verification) else getattr(result, "holds", True)
    lines: list[Any] = [result] if told else []  # else, it is an error
    if values["output"] is not None:
        lines.append(f"written to {values['output']}")
    if as_json:
        print_json(result.record)
    for line in () if as_json else lines:
        out.print(line, markup=False)
    if isinstance(result, Verification | Prediction):
        result.require()
    elif not result.passed:
        raise VerificationError(
            f"the table in {values['architecture']} is wrong about {values['model']}:"
            f" {len(result.failures)} of {len(result.checks)} checks failed",
            hint="; ".join(check.what for check in result.failures),
        )

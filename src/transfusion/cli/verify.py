"""The verb ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transfusion.cli.console import Messages, out, print_json
from transfusion.cli.options import ArchitectureFile, Config, Force, Json, MemoryOption, Result
from transfusion.cli.search_options import CalibrateOption
from transfusion.errors import VerificationError


def verify(
    a: Annotated[
        str | None, typer.Argument(metavar="A", show_default=False, help="The model: a folder or a hub id.")
    ] = None,
    via: Annotated[str | None, typer.Option(metavar="PI", show_default=False, help="The file of π.")] = None,
    onto: Annotated[
        str | None,
        typer.Option(
            metavar="B", show_default="as π names it", help="Measure how much of B's activations π predicts."
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="The largest difference that passes.")] = 1e-9,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            show_default=False,
            help="The class to certify a table on: module:Class or Class.",
        ),
    ] = None,
    output: Result = None,
    as_json: Json = False,
    force: Force = False,
    calibrate: CalibrateOption = None,
    config: Config = None,
    architecture: ArchitectureFile = None,
    memory: MemoryOption = None,
) -> None:
    """Run A and π(A) through their own library in float64 and compare; exit 3 if they differ.

    With --onto B, or if π rotates units, which is no symmetry: measure how much of B's activations π predicts
    from A's, axis by axis, on inputs that π was not found on; exit 3 if it is no more than chance.

    With --architecture FILE --model CLASS: certify a table of your own on a small model of that class.
    """
    if a is not None and via is not None and model is None:
        if onto is not None or _rotates(via):
            _predict(a, onto, via, config, calibrate, output, force, as_json, memory)
        elif calibrate is not None:
            raise typer.BadParameter("--calibrate goes with --onto")
        else:
            _compare(a, via, config, tolerance, output, force, as_json, memory)
    elif architecture is not None and model is not None and a is None and via is None:
        _certify(architecture, model, config, output, force, as_json)
    else:
        raise typer.BadParameter("give either A --via PI, or --architecture FILE --model CLASS")


def _compare(
    a: str,
    via: str,
    config: Path | None,
    tolerance: float,
    output: Path | None,
    force: bool,
    as_json: bool,
    memory: int | None,
) -> None:
    """Print how A and π(A) compare, and fail if they differ."""
    from transfusion.runtime.resources import Resources
    from transfusion.verification.verify import verify as run

    found = run(
        a,
        via=via,
        tolerance=tolerance,
        config=config,
        output=output,
        force=force,
        resources=Resources(memory=memory),
        progress=Messages(quiet=False),
    )
    if as_json:
        print_json(found.record)
    elif found.equal:
        aided = f", with P_out·P_inᵀ in {found.shortcuts} shortcuts" if found.shortcuts else ""
        out.print(
            f"π(A) computes what A computes{aided}: largest difference {found.difference:.2g}"
            f" over {', '.join(found.outputs)}",
            markup=False,
        )
    _written(output, as_json)
    found.require()


def _predict(
    a: str,
    onto: str | None,
    via: str,
    config: Path | None,
    calibrate: Path | None,
    output: Path | None,
    force: bool,
    as_json: bool,
    memory: int | None,
) -> None:
    """Print how much of B's activations π predicts, and fail if it is no more than chance."""
    from transfusion.cli import description_views
    from transfusion.runtime.resources import Resources
    from transfusion.verification.verify import predict

    found = predict(
        a,
        onto,
        via=via,
        calibrate=calibrate,
        config=config,
        output=output,
        force=force,
        resources=Resources(memory=memory),
        progress=Messages(quiet=False),
    )
    if as_json:
        print_json(found.record)
    elif found.holds:
        out.print(description_views.prediction(found.record["axes"]))
        out.print(f"{found.mean}; inputs: {found.probes}", markup=False)
    _written(output, as_json)
    found.require()


def _certify(
    file: Path, class_name: str, config: Path | None, output: Path | None, force: bool, as_json: bool
) -> None:
    """Print the certificate of a table, and fail if a check does."""
    from transfusion.verification.certify import certify_file

    found = certify_file(file, class_name, config, output=output, force=force)
    if as_json:
        print_json(found.record)
    else:
        for check in found.checks:
            out.print(f"{'✓' if check.passed else '✗'} {check}", markup=False)
    _written(output, as_json)
    if not found.passed:
        raise VerificationError(
            f"the table in {file} is wrong about {class_name}:"
            f" {len(found.failures)} of {len(found.checks)} checks failed",
            hint="; ".join(check.what for check in found.failures),
        )


def _written(output: Path | None, as_json: bool) -> None:
    if output is not None and not as_json:
        out.print(f"written to {output}", markup=False)


def _rotates(via: str) -> bool:
    """Whether a file of π rotates units, so that no equality can be proved."""
    from transfusion.alignment.alignment import Alignment

    found = Alignment.load(via)
    if found.other_shape:
        return True
    return any(map_.rotates for map_ in found.maps.values())

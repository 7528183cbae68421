"""The verb ``inspect``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from transfusion.cli.console import err, out, print_json, printable
from transfusion.cli.options import ArchitectureFile, Config, Force, Json


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A model or an adapter: a folder, a file, a hub id; or a file of π.",
        ),
    ],
    beside: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="B",
            show_default=False,
            help="Another base: show how many tokens the vocabularies of both have in common; of a PEFT"
            " adapter, whether it fits that base.",
        ),
    ] = None,
    propose: Annotated[
        bool,
        typer.Option(
            "--propose", help="Draft a table for the model's class by trials, and certify it; or exit 3."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default=False, help="With --propose: the file of the draft."),
    ] = None,
    as_json: Json = False,
    force: Force = False,
    config: Config = None,
    architecture: ArchitectureFile = None,
) -> None:
    """Show the axes of a model and which of them may move; what an adapter is for; or what a π moves.

    With --propose: draft a table for a model that has none.
    """
    if propose:
        _propose(model, config, output, force, as_json)
        return
    if output is not None:
        raise typer.BadParameter("--output goes with --propose")
    from transfusion.cli import description_views
    from transfusion.report.inspect import inspect as describe

    description = describe(model, beside=beside, config=config)
    if as_json:
        print_json(description)
    else:
        out.print(description_views.described(description))


def _propose(model: str, config: Path | None, output: Path | None, force: bool, as_json: bool) -> None:
    """Print the draft of a table, if it is not written, and its certificate."""
    from transfusion.verification.drafting.propose import propose_for

    proposal = propose_for(model, config=config, output=output, force=force)
    checks = proposal.certificate.checks
    if as_json:
        written = {} if output is None else {"written": str(output)}
        info = [{**asdict(check), "passed": check.passed} for check in checks]
        print_json({**written, "certified_on": proposal.certified_on, "checks": info, "text": proposal.text})
        return
    if output is None:
        print(printable(proposal.text), end="")
    messages = err if output is None else out
    for check in checks:
        messages.print(f"✓ {check}", markup=False)
    messages.print(f"certified on {proposal.certified_on}", markup=False)
    if output is not None:
        out.print(f"draft written to {output}", markup=False)

"""The verb ``inspect``: describe a model, an adapter or a π; or draft a table for a model without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from transfusion.cli.console import out, print_json
from transfusion.runtime.progress import BARS, SILENT, Progress
from transfusion.runtime.settings import ARCHITECTURE, CONFIG, MODELS, argument, setting, verb
from transfusion.runtime.terminal import err, printable

if TYPE_CHECKING:
    from transfusion.verification.drafting.propose import ProposedTable


@dataclass(frozen=True)
class InspectSettings:
    """The settings of the verb ``inspect``."""

    model: str = argument(
        "A model or an adapter: a folder, a file, a hub id; or a file of π.", metavar="MODEL"
    )
    _: KW_ONLY
    beside: str | None = setting(
        None,
        "Another base: show how many tokens the vocabularies of both have in common; of a PEFT adapter,"
        " whether it fits that base.",
        flag="--with",
        metavar="B",
    )
    propose: bool = setting(
        False,
        "Draft a table for the model's class by trials, and certify it; or exit 3. A file of Python as"
        " --architecture: for the class that its build(config) returns.",
        kind=bool,
    )
    output: Path | None = setting(
        None, "With --propose: the file of the draft.", kind=Path, flag="--output,-o"
    )
    force: bool = setting(False, "Replace an existing output.", kind=bool)
    config: Path | None = setting(None, CONFIG, kind=Path, panel=MODELS)
    architecture: Path | None = setting(None, ARCHITECTURE, kind=Path, panel=MODELS)
    progress: Progress = setting(SILENT, "Follows the run.", shown=BARS, typed=False)


@verb(InspectSettings)
def inspect(settings: InspectSettings) -> dict[str, Any] | ProposedTable:
    """Return a description, or the draft of a table."""
    if settings.propose:
        from transfusion.verification.drafting.propose import propose_for

        return propose_for(
            settings.model,
            architecture=settings.architecture,
            config=settings.config,
            output=settings.output,
            force=settings.force,
        )
    if settings.output is not None:
        raise typer.BadParameter("--output goes with --propose")
    from transfusion.report.inspect import inspect as describe

    return describe(settings.model, beside=settings.beside, config=settings.config)


def show_inspected(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print a description, or a draft and its certificate."""
    if values["propose"]:
        _show_proposal(result, values["output"], values["architecture"], as_json)
    elif as_json:
        print_json(result)
    else:
        out.print(result)


def _show_proposal(
    proposal: ProposedTable, output: Path | None, architecture: Path | None, as_json: bool
) -> None:
    """Print the draft of a table, if it is not written, and its certificate."""
    checks = proposal.certificate.checks
    use = "" if output is None else proposal.use(output)
    if as_json:
        written = {} if output is None else {"written": str(output), **({"use": use} if use else {})}
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
        if use:
            out.print(f"to use it, end {architecture} with:\n{use}", markup=False, soft_wrap=True)

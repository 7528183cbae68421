"""The verb ``plan``: a short estimate of time, memory and traffic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli.console import Messages, out, print_json
from transfusion.cli.option_checks import as_size, within
from transfusion.cli.options import ArchitectureFile, Force, Json, Quiet
from transfusion.cli.search_options import AdviceOption, InnerOption, MethodOption, ResidualOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from transfusion.runtime.machine import Machine
    from transfusion.transport.estimate import Estimate

_AMOUNT = re.compile(r"(?P<count>\d+(\.\d+)?)\s*(?P<unit>[kMGT]?)(?P<what>[bB])")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def amount(text: str) -> float:
    """Return bytes per second from text such as 1GB, or 10Gb for bits."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or not float(found["count"]):
        raise typer.BadParameter(f"{text!r} is not an amount such as 1GB, or 10Gb for bits")
    return float(found["count"]) * _UNITS[found["unit"]] / (8 if found["what"] == "b" else 1)


BaseA = Annotated[
    str | None,
    typer.Argument(
        show_default=False, help="The base A: a folder, a file, a hub id, or a config.json alone."
    ),
]
BaseB = Annotated[str | None, typer.Argument(show_default="like A", help="The base B, in the same way.")]
Nodes = Annotated[
    int,
    typer.Option(
        help="How many machines share the work; several are a Ray cluster.", callback=within(1, 2**20)
    ),
]
Cores = Annotated[
    int | None, typer.Option(show_default="the machine's", help="Cores of a node.", callback=within(1, 2**20))
]
Memory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=as_size,
        show_default="no limit",
        help="Memory limit of a node, for example 16GB.",
    ),
]
Network = Annotated[
    str, typer.Option(help="Bytes (GB) or bits (Gb) per second between storage and each of several nodes.")
]
PlanSweeps = Annotated[
    int | None,
    typer.Option("--sweeps", show_default="5", help="How many sweeps to count.", callback=within(1, 10_000)),
]
Finetunes = Annotated[
    int, typer.Option(help="How many fine-tunes are transported afterwards.", callback=within(1, 2**20))
]
MachineFile = Annotated[
    Path | None,
    typer.Option("--machine", show_default="this one, measured now", help="A file of a machine's constants."),
]
MeasureMachine = Annotated[
    bool, typer.Option("--measure-machine", help="Measure this machine, and write its constants to --output.")
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        show_default=False,
        help="With --measure-machine: where to write the constants, .json.",
    ),
]


def plan(
    a: BaseA = None,
    b: BaseB = None,
    nodes: Nodes = 1,
    cores: Cores = None,
    memory: Memory = None,
    network: Network = "10Gb",
    method: MethodOption = None,
    residual: ResidualOption = None,
    inner: InnerOption = None,
    sweeps: PlanSweeps = None,
    advice: AdviceOption = True,
    finetunes: Finetunes = 1,
    machine: MachineFile = None,
    measure_machine: MeasureMachine = False,
    output: PlanFile = None,
    architecture: ArchitectureFile = None,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Estimate time, memory and traffic of align and transport, from configurations alone."""
    if measure_machine != (output is not None):
        raise typer.BadParameter("--measure-machine and --output FILE.json go together")
    if a is None and not measure_machine:
        raise typer.BadParameter("give A: a model, or its config.json")
    if measure_machine and machine is not None:
        raise typer.BadParameter("--measure-machine and --machine exclude each other")
    pace = amount(network)
    from transfusion.runtime.machine import Machine
    from transfusion.runtime.run_record import RunRecord
    from transfusion.transport.estimate import SWEEPS
    from transfusion.transport.estimate import plan as estimate

    record, messages = RunRecord("plan"), Messages(quiet=quiet)
    if machine is None:
        if output is not None:
            from transfusion.report.result_files import ResultFiles

            ResultFiles.checked(output, force=force)
        messages.note("note: measuring this machine, which takes about a second")
    known = Machine.load(machine) if machine is not None else Machine.measure()
    if output is not None:
        from transfusion.files.publishing import publish_file, write_json

        publish_file(output, lambda staged: write_json(staged, known.as_dict()), force=force)
        messages.note(f"constants written to {output}")
    if a is None:
        if as_json:
            print_json(record.of(known.as_dict()))
        else:
            out.print(constants(known))
        return
    from transfusion.matching.methods import DEFAULT

    found = estimate(
        a,
        b,
        nodes=nodes,
        cores=cores,
        memory=memory,
        network=pace,
        method=method or DEFAULT,
        residual=residual,
        inner=inner,
        sweeps=SWEEPS if sweeps is None else sweeps,
        finetunes=finetunes,
        advice=advice,
        machine=known,
    )
    if as_json:
        print_json(record.of(found.as_dict()))
    else:
        out.print(view(found))


# ── how it looks ─────────────────────────────────────────────────────────────────────────────


def duration(seconds: float) -> str:
    """Return seconds in a unit that suits them, with two digits."""
    for limit, unit, length in ((100, "s", 1), (6000, "min", 60), (360_000, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds / 86400:.2g} days" if seconds < 8_640_000 else f"{seconds / 86400:.0f} days"


def constants(machine: Machine) -> RenderableType:
    """Return a table of a machine's constants."""
    from rich.table import Table

    from transfusion.cli.description_views import size

    table = Table("of each core, per second", "", box=None, header_style="bold")
    table.add_row("operations of matrix products", size(int(machine.operations_per_second)))
    table.add_row("weights read and hashed", f"{size(int(machine.bytes_per_second))}B")
    table.add_row("cores", str(machine.cores))
    return table


def view(found: Estimate) -> RenderableType:
    """Return an estimate as tables: the models, the time by phase, and memory and traffic by verb."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from transfusion.cli.description_views import size

    cluster, memory, traffic = found.cluster, found.memory, found.traffic
    about = Table.grid(padding=(0, 2))
    where = (
        f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.cores} core{'s' * (cluster.cores > 1)}"
    )
    for name, value in (
        ("plan", f"{found.a} → {found.b}, method {found.method}, {found.sweeps} sweeps"),
        (
            "models",
            f"{found.family}, {size(found.parameters)} parameters each, {size(found.bytes)}B together",
        ),
        ("where", where + (f" with {size(cluster.memory)}B each" if cluster.memory else "")),
    ):
        about.add_row(Text(name, style="bold"), Text(value))
    times = Table("phase", "time, about", "operations", "weights read", box=None, header_style="bold")
    for phase in found.phases:
        numbers = size(int(phase.operations)), f"{size(int(phase.bytes))}B"
        times.add_row(phase.name, duration(phase.seconds), *numbers)
    times.add_row(Text("align", style="bold"), Text(duration(found.seconds), style="bold"))
    moved, seconds = int(found.transport["finetunes"]), found.transport["seconds"]
    times.add_row(Text(f"transport of {moved}", style="bold"), Text(duration(seconds), style="bold"))
    needs = Table(
        "", "memory of a node", "read", "over the network", "written", box=None, header_style="bold"
    )
    for verb, most in (("align", memory["total"]), ("transport", memory["transport"])):
        parts = (most, *(traffic[f"{verb}_{what}"] for what in ("read", "network", "written")))
        needs.add_row(verb, *(f"{size(part)}B" for part in parts))
    return Group(about, "", times, "", needs)

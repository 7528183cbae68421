"""The verb ``plan``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli.console import Messages, out, print_json
from transfusion.cli.option_checks import as_size, within
from transfusion.cli.options import ArchitectureFile, Force, Json, Quiet
from transfusion.cli.search_options import AdviceOption, InnerOption, MethodOption, ResidualOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from transfusion.transportation.planning.cost_plan import CostPlan

_AMOUNT = re.compile(r"(?P<count>\d+(\.\d+)?)\s*(?P<unit>[kMGT]?)(?P<what>[bB])")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def amount(text: str) -> float:
    """Bytes in a second, as people write them: 1GB; with a small b, bits: 10Gb."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or not float(found["count"]):
        raise typer.BadParameter(f"{text!r} is no amount such as 1GB, or 10Gb for bits")
    return float(found["count"]) * _UNITS[found["unit"]] / (8 if found["what"] == "b" else 1)


def _shares(text: str | None) -> tuple[float, ...] | None:
    """Shares of columns, separated by commas."""
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= share <= 1 for share in found):
        raise typer.BadParameter(f"{text!r} is no list of shares such as 1,0.2,0.1")
    return found


Paper = Annotated[
    str | None,
    typer.Argument(show_default=False, help="A: a folder, a file, a hub id, or a config.json alone."),
]
Other = Annotated[str | None, typer.Argument(show_default="like A", help="B, in the same way.")]
Nodes = Annotated[int, typer.Option(help="How many machines share the work.", callback=within(1, 2**20))]
Cores = Annotated[
    int | None, typer.Option(show_default="the machine's", help="Cores of a node.", callback=within(1, 2**20))
]
Memory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=as_size,
        show_default="no limit",
        help="What may be taken of a node's memory, such as 16GB.",
    ),
]
Network = Annotated[
    str, typer.Option(help="Between storage and each node, in a second, where there are several nodes.")
]
PaperSweeps = Annotated[
    int | None,
    typer.Option("--sweeps", show_default="5", help="How many sweeps to count.", callback=within(1, 10_000)),
]
MovingOption = Annotated[
    str | None,
    typer.Option(
        "--moving",
        show_default="1,0.22,0.107,0.07",
        help="The share of columns that still move in the second sweep, the third, and so on; 0 where the"
        " first sweep finds everything.",
    ),
]
Finetunes = Annotated[
    int, typer.Option(help="How many fine-tunes are moved afterwards.", callback=within(1, 2**20))
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
    a: Paper = None,
    b: Other = None,
    nodes: Nodes = 1,
    cores: Cores = None,
    memory: Memory = None,
    network: Network = "10Gb",
    method: MethodOption = None,
    residual: ResidualOption = None,
    inner: InnerOption = None,
    sweeps: PaperSweeps = None,
    moving: MovingOption = None,
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
    """Predict time, memory and traffic of align and transport, from configurations alone."""
    if measure_machine != (output is not None):
        raise typer.BadParameter("--measure-machine and --output FILE.json go together")
    if a is None and not measure_machine:
        raise typer.BadParameter("give A: a model, or its config.json")
    if measure_machine and machine is not None:
        raise typer.BadParameter("--machine has been measured already")
    pace = amount(network)
    shares = _shares(moving)
    from transfusion.runtime.run_record import RunRecord
    from transfusion.transportation.planning.assumptions import MOVING, SWEEPS
    from transfusion.transportation.planning.cost_plan import plan as predict
    from transfusion.transportation.planning.machine import Machine
    from transfusion.transportation.planning.machine_benchmark import measure

    record, messages = RunRecord("plan"), Messages(quiet=quiet)
    if machine is None:
        if output is not None:
            from transfusion.reporting.result_files import ResultFiles

            ResultFiles.checked(output, force=force)
        messages.note("note: measuring this machine, which takes some seconds")
    known = Machine.load(machine) if machine is not None else measure()
    if output is not None:
        from transfusion.checkpoint.publishing import publish_file, write_json

        publish_file(output, lambda staged: write_json(staged, known.as_dict()), force=force)
        messages.note(f"constants written to {output}")
    if a is None:
        if as_json:
            print_json(record.of(known.as_dict()))
        else:
            out.print(constants(known.as_dict()))
        return
    from transfusion.matching.methods import DEFAULT

    found = predict(
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
        moving=shares or MOVING,
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
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 100 * 3600 else f"{seconds / 86400:.3g} days"


def constants(info: dict[str, Any]) -> RenderableType:
    """A machine's constants."""
    from rich.table import Table

    from transfusion.cli.views import size

    units = {
        "product": "operations",
        "reading": "B",
        "hashing": "B",
        "fresh": "B",
        "storage": "B",
        "writing": "B",
    }
    table = Table("of one core, in a second", "", box=None, header_style="bold")
    for name, value in info.items():
        if name in ("assignments", "candidates"):
            times = ", ".join(f"{n}: {duration(seconds)}" for n, seconds in value.items())
            table.add_row(f"{name}, by size", times)
        elif name in ("cores", "together"):
            what = {"cores": "cores", "together": "speed kept when all cores work"}[name]
            table.add_row(what, f"{value:.0%}" if name == "together" else str(value))
        elif name != "transfusion-machine":
            table.add_row(name, f"{size(int(value))} {units.get(name, '')}".strip())
    return table


def view(found: CostPlan) -> RenderableType:
    """A plan: what it is of, how long it takes, and what goes where."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from transfusion.cli.views import size

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
        ("where", where + (f" with {size(int(cluster.memory))}B each" if cluster.memory else "")),
    ):
        about.add_row(Text(name, style="bold"), Text(value))
    times = Table(
        "phase", "time", "products", "weights looked at", "from storage", box=None, header_style="bold"
    )
    for phase in found.phases:
        numbers = (size(int(phase.flops)), f"{size(int(phase.read))}B", f"{size(int(phase.stored))}B")
        name = phase.name if phase.counted else f"({phase.name}, if some units are at home)"
        times.add_row(name, duration(phase.seconds), *numbers, style=None if phase.counted else "dim")
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

"""The arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfusion.cli.option_checks import as_size, one_of, use_tables, within

if TYPE_CHECKING:
    from transfusion.runtime.resources import Resources

DTYPES = ("float64", "float32", "float16", "bfloat16")
PRECISE = DTYPES[:2]
NEW_TOKENS = ("refuse", "keep", "drop")
ENGINES = ("local", "ray")

# ── models ───────────────────────────────────────────────────────────────────────────────────

BaseArgument = Annotated[
    str,
    typer.Argument(
        metavar="A", show_default=False, help="A: the base that was fine-tuned; a folder, a file or a hub id."
    ),
]
NewBaseArgument = Annotated[
    str,
    typer.Argument(
        metavar="B", show_default=False, help="B: the new release of the base; a folder, a file or a hub id."
    ),
]
Finetuned = Annotated[
    str,
    typer.Argument(
        metavar="FINETUNED", show_default=False, help="The fine-tune of A: a model, or a PEFT adapter."
    ),
]
MaybeBase = Annotated[
    str | None,
    typer.Option("--base", metavar="A", show_default=False, help="A: the base that was fine-tuned."),
]
MaybeOnto = Annotated[
    str | None,
    typer.Option("--onto", metavar="B", show_default=False, help="B: the new release to move it onto."),
]
BaseOption = Annotated[
    str, typer.Option("--base", metavar="A", show_default=False, help="A: the base that was fine-tuned.")
]
AdapterBase = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="A",
        show_default="of an adapter, as its configuration says",
        help="A: the base that was fine-tuned.",
    ),
]
OntoOption = Annotated[
    str, typer.Option("--onto", metavar="B", show_default=False, help="B: the new release to move it onto.")
]
Via = Annotated[
    str | None, typer.Option(metavar="PI", show_default=False, help="The file of π; without it, align first.")
]
Vias = Annotated[
    list[str] | None,
    typer.Option(
        "--via", metavar="PI", show_default=False, help="A file of π; give several to compare them."
    ),
]
_MODELS = "Models"
Config = Annotated[
    Path | None,
    typer.Option(
        show_default=False, help="The config.json of weights that come without one.", rich_help_panel=_MODELS
    ),
]
ArchitectureFile = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        show_default=False,
        help="A table of your own: a text, or a file of Python.",
        callback=use_tables,
        rich_help_panel=_MODELS,
    ),
]
TrustBase = Annotated[
    bool,
    typer.Option(
        "--trust-base",
        help="Do not check that the fine-tune descends from A.",
        rich_help_panel=_MODELS,
    ),
]
NewTokensOption = Annotated[
    str,
    typer.Option(
        "--new-tokens",
        help=f"Tokens that the fine-tune added: {', '.join(NEW_TOKENS)}.",
        callback=one_of(NEW_TOKENS),
        rich_help_panel=_MODELS,
    ),
]
OtherPartsOption = Annotated[
    str,
    typer.Option(
        "--other-parts",
        help=f"Parts of a LoRA file that change another model than A, such as a text encoder:"
        f" {', '.join(NEW_TOKENS)}.",
        callback=one_of(NEW_TOKENS),
        rich_help_panel=_MODELS,
    ),
]
VocabularyShare = Annotated[
    float | None,
    typer.Option(
        "--vocabulary-share",
        min=0.0,
        max=1.0,
        show_default="0.5",
        help="The least share of tokens that A and B must have in common, if their vocabularies differ.",
        rich_help_panel=_MODELS,
    ),
]
Anyway = Annotated[
    bool,
    typer.Option(
        "--force-unrelated",
        help="Insist where A and B have so little in common that the result would be of no use.",
        rich_help_panel=_MODELS,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help=f"The type to compute in: {', '.join(PRECISE)}.",
        callback=one_of(PRECISE),
        rich_help_panel=_MODELS,
    ),
]
StoredDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"The type to store: {', '.join(DTYPES)}.",
        callback=one_of(DTYPES),
        show_default="B's",
        rich_help_panel=_MODELS,
    ),
]

# ── output ───────────────────────────────────────────────────────────────────────────────────

Output = Annotated[
    Path, typer.Option("--output", "-o", show_default=False, help="The file or folder to write.")
]
Result = Annotated[
    Path | None,
    typer.Option("--output", "-o", show_default=False, help="A .json file to write the result to."),
]
Figures = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        show_default=False,
        help="A file to write: a figure (.png, .svg, .pdf) or .json; may be given several times.",
    ),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        show_default=False,
        help="Repeat the run of this transfusion.json, or of this moved LoRA file.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors, warnings and results.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print details.")]

# ── resources ────────────────────────────────────────────────────────────────────────────────

_RESOURCES = "Resources"
Device = Annotated[
    str,
    typer.Option(help="The device to compute on: cpu, cuda, cuda:1, mps.", rich_help_panel=_RESOURCES),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The number of threads, or of Ray workers.",
        show_default="all cores",
        callback=within(1, 4096),
        rich_help_panel=_RESOURCES,
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Threads of this process, or workers of a Ray cluster; the result is the same.",
        callback=one_of(ENGINES),
        rich_help_panel=_RESOURCES,
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The address of a running Ray cluster.",
        show_default="one is started here",
        rich_help_panel=_RESOURCES,
    ),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=as_size,
        help="Memory limit per process (per worker with Ray), for example 2GB or 512MiB.",
        show_default="as much as all threads need",
        rich_help_panel=_RESOURCES,
    ),
]


def writing(
    jobs: Jobs = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    memory: MemoryOption = None,
) -> Resources:
    """Return the resources of a verb that only writes weights."""
    from transfusion.runtime.resources import Resources

    return Resources(engine, jobs, address, memory)


def computing(
    device: Device = "cpu",
    jobs: Jobs = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    memory: MemoryOption = None,
) -> Resources:
    """Return the resources of a verb that aligns."""
    from transfusion.runtime.resources import Resources

    return Resources(engine, jobs, address, memory, device)


def measuring(device: Device = "cpu", jobs: Jobs = None) -> Resources:
    """Return the resources of a verb that runs models."""
    from transfusion.runtime.resources import Resources

    return Resources(jobs=jobs, device=device)

"""Results as tables and trees: what the command line prints, and what results in Python show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from transfusion.matching.methods import METHODS, USES
from transfusion.runtime.tables import columns, facts, noted

FALLING = ("loss", "perplexity")
"""Metrics where less is better; all others are shown in percent, and their gains in points."""
OUTSIDE = "default"
"""The α of tensors outside of blocks."""


def methods() -> Table:
    """Return a table of all methods, by what they are for."""
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in ("--method", "how"):
        table.add_column(name)
    for use, names in USES.items():
        table.add_row(Text(use, style="italic"))
        for name in names:
            table.add_row(Text(f"  {name}"), Text(METHODS[name].about))
    return table


def score(value: float, metric: str, digits: int = 1) -> str:
    """Return a score: a rate in percent, a loss as it is."""
    return f"{value:.4f}" if metric in FALLING else f"{100 * value:.{digits}f}"


def gain(value: float, metric: str, digits: int = 1, interval: Sequence[float] | None = None) -> Text:
    """Return a gain with its sign and interval: green if better, red if worse, neither if it may be 0."""
    falling = metric in FALLING
    digits = digits + 2 if falling else digits
    least = 0.0 if interval else 0.5 * 10**-digits
    low, high = interval or (value - least, value + least)
    better = "green" if (value > 0) != falling else "red"
    text = Text(f"{value:+.{digits}f}", style="dim" if low <= 0 <= high else better)
    if interval:
        bounds = [f"{one:+.{digits if falling else 1}f}" for one in interval]
        text.append("\n" + " to ".join(bounds), style="dim")
    return text


def counted(examples: int) -> str:
    """Return a number of examples, in the singular or plural."""
    return "1 example" if examples == 1 else f"{examples} examples"


# ── evaluate, sweep, fewshot and barrier ─────────────────────────────────────────────────────


def barrier(result: Mapping[str, Any]) -> RenderableType:
    """Show loss and accuracy of every curve, α by α, and the height of each barrier."""
    curves = result["curves"]
    table = Table(show_footer=True)
    table.add_column("α", "barrier", justify="right")
    for curve in curves:
        mark = "" if curve["faithful"] else "*"
        table.add_column(Text(f"{curve['label']}\nloss"), f"{curve['height']:.4f}{mark}", justify="right")
        table.add_column("\n%", justify="right")
    for row in zip(*(curve["points"] for curve in curves), strict=True):
        cells = [(f"{point['loss']:.4f}", f"{100 * point['accuracy']:.1f}") for point in row]
        table.add_row(f"{row[0]['alpha']:.3g}", *(cell for pair in cells for cell in pair))
    lines = [
        f"Loss and accuracy in % ({result['question']}) of (1 − α)·π(A) + α·B on"
        f" {counted(result['examples'])} of {result['data']}.",
        "Barrier: how far the loss rises above the straight line between its ends.",
    ]
    if treated := [f"{curve['label']}: {curve['shortcuts']}" for curve in curves if curve["rotated"]]:
        lines.append(f"Shortcuts that carry P_out·P_inᵀ at α = 0: {'; '.join(treated)}.")
    if not all(curve["faithful"] for curve in curves):
        lines.append(
            f"* π(A) does not compute what A computes (loss {curves[0]['loss_of_a']:.4f}): the way begins"
            " elsewhere."
        )
    return noted(table, lines)


def evaluation(result: Mapping[str, Any]) -> RenderableType:
    """Show models row by row: the task, the support, and the gains over the reference."""
    against, metrics = result["against"], {}
    table = Table("model")
    for part in ("task", "support"):
        if result[part]:
            metric = metrics[part] = result[part]["metric"]
            name = metric if metric in FALLING else f"{metric} %"
            table.add_column(f"{part}\n{name}", justify="right")
            if against:
                table.add_column("\ngain", justify="right")
    for row in result["models"]:
        cells = [Text(row["model"])]
        for part, metric in metrics.items():
            cells.append(Text(score(row[part]["value"], metric, 2)))
            if interval := row[part].get("interval"):
                bounds = "–".join(score(one, metric) for one in interval)
                cells[-1].append(f"\n{bounds}", style="dim")
            if against:
                sure = (row.get("gain_interval") or {}).get(part)
                itself = row["model"] == against
                cells.append(Text("") if itself else gain(row["gain"][part], metric, 2, sure))
        table.add_row(*cells)
    lines, falling = [], [metric in FALLING for metric in metrics.values()]
    for part in metrics:
        about = result[part]
        classes = f" of {about['classes']}" if about["classes"] else ""
        on = f"on {counted(about['examples'])} of {about['data']}"
        lines.append(f"{part.capitalize()}: {about['question']}{classes}, {on}.")
    if against:
        lines.append(f"Gains are over {against}{'' if all(falling) else ', in points for rates'}.")
    lines.append("Below each number: its 95 % confidence interval, over examples.")
    if against and any(falling):
        lines.append("Of a loss and a perplexity less is better, and a negative gain is the good one.")
    return noted(table, lines)


def sweep(result: Mapping[str, Any]) -> RenderableType:
    """Show the gains over B for every α, curve by curve; the best on the task is bold."""
    curves, zero = result["curves"], result["at_zero"]
    metrics = {part: result[part]["metric"] for part in ("task", "support") if result[part] is not None}
    table = Table()
    table.add_column("\nα", justify="right")
    for curve in curves:
        for place, part in enumerate(metrics):
            table.add_column(Text(f"{curve['label'] if place == 0 else ''}\n{part}"), justify="right")
            table.add_column("\ngain", justify="right")
    first = [curve["points"][0] for curve in curves]
    begins = first[0]["alpha"] == 0
    known = begins and all(point[part]["value"] == zero[part]["value"] for point in first for part in metrics)
    own = [cell for part, metric in metrics.items() for cell in (score(zero[part]["value"], metric), "")]
    table.add_row("B" if begins and not known else "0", *(own * len(curves)), style="dim")
    for row in zip(*(curve["points"][known:] for curve in curves), strict=True):
        cells: list[Text] = []
        for curve, point in zip(curves, row, strict=True):
            style = "bold" if point["alpha"] == curve["best"] else ""
            for part, metric in metrics.items():
                cells.append(Text(score(point[part]["value"], metric), style=style))
                cells.append(gain(point["gain"][part], metric))
        table.add_row(f"{row[0]['alpha']:.3g}", *cells)
    best = ", ".join(f"{curve['label']} {_best(curve, metrics['task'])}" for curve in curves)
    lines = [*(_measured_on(part, result[part]) for part in metrics), f"Best α on the task: {best}."]
    return noted(table, lines)


def _best(curve: Mapping[str, Any], metric: str) -> str:
    """Return the best α, if it gains anything."""
    gain = next(point["gain"]["task"] for point in curve["points"] if point["alpha"] == curve["best"])
    better = gain < 0 if metric in FALLING else gain > 0
    return f"{curve['best']:.3g}" if better else "– (none is better than B)"


def fewshot(result: Mapping[str, Any]) -> RenderableType:
    """Show B, every curve with α = 1 and with the learned coefficients, and the coefficients."""
    metric, training = result["task"]["metric"], result["training"]
    table = columns("", metric if metric in FALLING else f"{metric} in %", "gain", framed=True)
    table.add_column("α by layer")
    table.add_row("B as it is", score(result["zero"]["value"], metric), "", "", style="dim")
    for curve in result["curves"]:
        what = f"B + α·π(τ), {curve['label']}" if curve["method"] else "B + α·τ"
        for how, name, alphas in (
            ("plain", "α = 1", "1"),
            ("learned", "α learned", _coefficients(curve["coefficients"])),
        ):
            value = score(curve[how]["value"], metric)
            table.add_row(f"{what}, {name}", value, gain(curve["gain"][how], metric), alphas)
    lines = [
        f"Learned from {counted(training['examples'])} of {training['data']}, {result['shots']} shots, seed"
        f" {result['seed']}.",
        _measured_on("test", result["task"]) + f" They are {training['test']}.",
    ]
    return noted(table, lines)


def _coefficients(info: Mapping[str, float]) -> str:
    """Return the coefficients of the layers in their order, then the one outside of blocks."""
    layers = " ".join(f"{value:.2f}" for pattern, value in info.items() if pattern != OUTSIDE)
    outside = f"outside blocks {info[OUTSIDE]:.2f}" if OUTSIDE in info else ""
    return ", ".join(filter(None, (layers, outside)))


def _measured_on(part: str, data: Mapping[str, Any]) -> str:
    metric, on = data["metric"], f"{counted(data['examples'])} of {data['data']}"
    how = "less is better, gains are plain differences" if metric in FALLING else "gains in points"
    return f"{part.capitalize()}: {metric} ({data['question']}) on {on}; {how}."


# ── inspect ───────────────────────────────────────────────────────────────────────


def described(description: Mapping[str, Any]) -> RenderableType:
    """Show a model, an adapter, or a π."""
    for key, view in (("model", model), ("lora", lora), ("adapter", adapter)):
        if key in description:
            return view(description)
    from transfusion.alignment.description import alignment_tables  # which imports what computes

    return alignment_tables(description)


def size(count: int) -> str:
    """Return a number of parameters or bytes with a unit."""
    value = float(count)
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {unit}".strip()
        value /= 1000
    return f"{value:.3g} T"


def model(description: Mapping[str, Any]) -> RenderableType:
    """Show a model as a tree: its axes, and below each the tensors that have it."""
    tree = Tree(Text(description["model"], style="bold"))
    files, vocabulary = len(description["files"]), description.get("vocabulary") or {}
    rows = {
        "family": f"{description['family']} ({description['library']})",
        "recognised": description["recognised_by"],
        "not read": ", ".join(description["unread_settings"]),
        "size": f"{size(description['parameters'])} parameters, {size(description['bytes'])}B in {files}"
        f" file{'s' if files > 1 else ''} ({', '.join(description['dtypes'])})",
        "heads": ", ".join(dict.fromkeys(name.rsplit(".", 1)[0] for name in description["heads"])),
        "vocabulary": f"compared with {vocabulary['with']}: {vocabulary['text']}" if vocabulary else "",
    }
    for name, value in rows.items():
        if value:
            tree.add(Text(f"{name:<12}{value}"))
    groups = {
        "[green]axes that may move[/]": ("permutation",),
        "[green]axes whose units rotate in pairs[/]": ("rotary", "interleaved"),
        "[yellow]axes that stay[/]": ("fixed",),
    }
    for title, group in groups.items():
        if axes := [axis for axis in description["axes"] if axis["group"] in group]:
            branch = tree.add(title)
            for axis in axes:
                _add_axis(branch, axis)
    return tree


def _add_axis(branch: Tree, axis: Mapping[str, Any]) -> None:
    title = Text(axis["axis"], style="bold")
    title.append(f"  {axis['size']}", style="cyan")
    title.append(f" × {axis['count']}" if axis["count"] > 1 else "", style="cyan")
    title.append(f"  within {axis['within']}" if axis["within"] else "")
    title.append("  on the residual stream" if axis["stream"] else "", style="magenta")
    title.append(f"  {axis['why']}" if axis["why"] else "", style="dim")
    node = branch.add(title)
    for tensor, layout in axis["tensors"].items():
        node.add(Text.assemble(tensor, "  ", (layout, "dim")))


def lora(description: Mapping[str, Any]) -> RenderableType:
    """Show a LoRA file: what it is, what it is for, and the blocks and kinds of modules that it changes."""
    rows = {
        "LoRA": description["lora"],
        "format": f"{description['format']}: {', '.join(description['kinds'])}",
        "fits": " or ".join(description["fits"]) or "no known model has modules of these names",
        "trained on": ", ".join(f"{text} ({key})" for key, text in description["trained_on"].items()),
        "moved onto": (description["moved_onto"] or {}).get("name", ""),
        "training": ", ".join(f"{name} {text}" for name, text in description["training"].items()),
        "tags": ", ".join(description["tags"]),
        "rank": _counts(description["ranks"]),
        "alpha": _counts(description["alphas"]) or "none stored: alpha is the rank",
        "size": _stored(description),
        "cannot move": description["refused"] or "",
        "unknown": ", ".join(description["unknown"][:3]),
    }
    for part, count in description["components"].items():
        rows[part] = f"{count} module{'s' if count > 1 else ''}"
    return _changes(rows, description)


def adapter(description: Mapping[str, Any]) -> RenderableType:
    """Show a PEFT adapter: its kind, the base that it is for, and the kinds of modules that it changes."""
    fits, alpha, count = description["fits"], description["alpha"], description["virtual_tokens"]
    told = "not tried; --with BASE tries a base by names and shapes"
    if fits is not None:
        told = fits["base"] if fits["fits"] else f"not {fits['base']}: {fits['reason']}"
    of_class = f" ({description['class']})" if description["class"] else ""
    rows = {
        "adapter": description["adapter"],
        "kind": ", ".join(filter(None, (description["kind"], description["task"]))),
        "trained on" if description["moved_onto"] is None else "moved onto": (
            (description["base"] or "not recorded") + of_class
        ),
        "fits": told,
        "rank": _counts(description["ranks"]),
        "alpha": "" if alpha is None else f"{alpha:g}",
        "tokens": f"{count} virtual tokens" if count else "",
        "stored whole": ", ".join(description["whole"]),
        "size": _stored(description),
    }
    return _changes(rows, description)


def _stored(description: Mapping[str, Any]) -> str:
    return (
        f"{size(description['parameters'])} parameters, {size(description['bytes'])}B in"
        f" {description['tensors']} tensors ({', '.join(description['dtypes'])})"
    )


def _changes(rows: dict[str, str], description: Mapping[str, Any]) -> RenderableType:
    """Show what an adapter is, and below it how many modules of each kind it changes."""
    for block, numbers in description["blocks"].items():
        rows[block] = f"{len(numbers)} block{'s' if len(numbers) > 1 else ''}: {_ranges(numbers)}"
    if not description["kinds_of_modules"]:
        return facts(rows)
    modules = columns("kind of module", "number")
    for name, count in description["kinds_of_modules"].items():
        modules.add_row(Text(name), str(count))
    return Group(facts(rows), "", modules)


def _counts(values: Mapping[str, int]) -> str:
    """Return values with their numbers, if there are several: ``16 (in 304), 32 (in 20)``."""
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(f"{value} (in {count})" for value, count in values.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers with neighbours joined: ``0–18, 20``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)

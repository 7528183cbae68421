"""Results as tables and trees for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree


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
        cells = [f"{point['loss']:.4f} {100 * point['accuracy']:.1f}".split() for point in row]
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
    return Group(table, Text("\n".join(lines), style="dim"))


def evaluation(result: Mapping[str, Any]) -> RenderableType:
    """Show models row by row: the task, the support, and the gains over the reference."""
    shown = [part for part in ("task", "support") if result[part]]
    table = Table()
    table.add_column("model")
    for part in shown:
        table.add_column(f"{part}\n{_metric_name(result[part]['metric'])}", justify="right")
        if result["against"]:
            table.add_column("\ngain", justify="right")
    for row in result["models"]:
        cells: list[str | Text] = [Text(row["model"])]
        for part in shown:
            metric = result[part]["metric"]
            bounds = [_metric_value(metric, one, 1) for one in row[part].get("interval") or ()]
            score = Text(_metric_value(metric, row[part]["value"]))
            cells.append(score.append("\n" + "–".join(bounds), style="dim") if bounds else score)
            if result["against"]:
                itself = row["model"] == result["against"]
                interval = (row.get("gain_interval") or {}).get(part)
                cells.append(Text("") if itself else _gain(metric, row["gain"][part], interval))
        table.add_row(*cells)
    lines = [_about(part, result[part]) for part in shown]
    falling = [result[part]["metric"] in FALLING for part in shown]
    if result["against"]:
        points = "" if all(falling) else ", in points for rates"
        lines.append(f"Gains are over {result['against']}{points}.")
    lines.append("Below each number: its 95 % confidence interval, over examples.")
    if result["against"] and any(falling):
        lines.append("Of a loss and a perplexity less is better, and a negative gain is the good one.")
    return Group(table, Text("\n".join(lines), style="dim"))


FALLING = ("loss", "perplexity")
"""Metrics where less is better."""


def _metric_name(metric: str) -> str:
    return metric if metric in FALLING else f"{metric} %"


def _metric_value(metric: str, value: float, digits: int = 2) -> str:
    return f"{value:.4f}" if metric in FALLING else f"{100 * value:.{digits}f}"


def _gain(metric: str, gain: float, interval: list[float] | None) -> Text:
    """Return a gain with its sign and interval: green if better, red if worse, neither if it may be 0."""
    text = Text(f"{gain:+.4f}" if metric in FALLING else f"{gain:+.2f}")
    low, high = interval or (gain, gain)
    if low <= 0 <= high:
        text.stylize("dim")
    else:
        text.stylize("green" if (gain > 0) != (metric in FALLING) else "red")
    if interval:
        bounds = [f"{one:+.4f}" if metric in FALLING else f"{one:+.1f}" for one in interval]
        text.append("\n" + " to ".join(bounds), style="dim")
    return text


def _about(part: str, info: dict[str, Any]) -> str:
    classes = f" of {info['classes']}" if info["classes"] else ""
    count = counted(info["examples"])
    return f"{part.capitalize()}: {info['question']}{classes}, on {count} of {info['data']}."


def counted(examples: int) -> str:
    """Return a number of examples, in the singular or plural."""
    return "1 example" if examples == 1 else f"{examples} examples"


# ── sweep and fewshot ─────────────────────────────────────────────────────────────────────────


def sweep(result: Mapping[str, Any]) -> RenderableType:
    """Show the gains over B for every α, curve by curve; the best on the task is bold."""
    curves = result["curves"]
    parts = [part for part in ("task", "support") if result[part] is not None]
    table = Table()
    table.add_column("\nα", justify="right")
    for curve in curves:
        for place, part in enumerate(parts):
            table.add_column(Text(f"{curve['label'] if place == 0 else ''}\n{part}"), justify="right")
            table.add_column("\ngain", justify="right")
    zero = result["at_zero"]
    first = [curve["points"][0] for curve in curves]
    begins = first[0]["alpha"] == 0
    info = begins and all(point[part]["value"] == zero[part]["value"] for point in first for part in parts)
    empty = [cell for part in parts for cell in (_score(zero[part], result[part]["metric"]), "")]
    table.add_row("B" if begins and not info else "0", *(empty * len(curves)), style="dim")
    for row in zip(*(curve["points"][info:] for curve in curves), strict=True):
        cells: list[Text] = []
        for curve, point in zip(curves, row, strict=True):
            style = "bold" if point["alpha"] == curve["best"] else ""
            for part in parts:
                metric = result[part]["metric"]
                cells += [
                    Text(_score(point[part], metric), style=style),
                    _small_gain(point["gain"][part], metric),
                ]
        table.add_row(f"{row[0]['alpha']:.3g}", *cells)
    best = ", ".join(f"{curve['label']} {_best(curve, result['task']['metric'])}" for curve in curves)
    lines = [*(_measured_on(part, result[part]) for part in parts), f"Best α on the task: {best}."]
    return Group(table, Text("\n".join(lines), style="dim"))


def _best(curve: Mapping[str, Any], metric: str) -> str:
    """Return the best α, if it gains anything."""
    gain = next(point["gain"]["task"] for point in curve["points"] if point["alpha"] == curve["best"])
    better = gain < 0 if metric in FALLING else gain > 0
    return f"{curve['best']:.3g}" if better else "– (none is better than B)"


def fewshot(result: Mapping[str, Any]) -> RenderableType:
    """Show B, every curve with α = 1 and with the learned coefficients, and the coefficients."""
    metric = result["task"]["metric"]
    table = Table()
    for column in ("", metric if metric in FALLING else f"{metric} in %", "gain", "α by layer"):
        table.add_column(column, justify="right" if column and "α" not in column else "left")
    table.add_row("B as it is", _score(result["zero"], metric), "", "", style="dim")
    for curve in result["curves"]:
        what = f"B + α·π(τ), {curve['label']}" if curve["method"] else "B + α·τ"
        learned = _coefficients(curve["coefficients"])
        for how, alphas in (("plain", "1"), ("learned", learned)):
            gain = _small_gain(curve["gain"][how], metric)
            table.add_row(f"{what}, {_HOW[how]}", _score(curve[how], metric), gain, alphas)
    training = result["training"]
    lines = [
        f"Learned from {counted(training['examples'])} of {training['data']}, {result['shots']} shots, seed"
        f" {result['seed']}.",
        _measured_on("test", result["task"]) + f" They are {training['test']}.",
    ]
    return Group(table, Text("\n".join(lines), style="dim"))


def _coefficients(info: Mapping[str, float]) -> str:
    """Return the coefficients of the layers in their order, then the one outside of blocks."""
    layers = " ".join(f"{value:.2f}" for pattern, value in info.items() if pattern != _OUTSIDE)
    if _OUTSIDE not in info:
        return layers
    return f"{layers}{', ' * bool(layers)}outside blocks {info[_OUTSIDE]:.2f}"


_OUTSIDE = "default"
_HOW = {"plain": "α = 1", "learned": "α learned"}


def _measured_on(part: str, data: Mapping[str, Any]) -> str:
    metric = data["metric"]
    how = "less is better, gains are plain differences" if metric in FALLING else "gains in points"
    return (
        f"{part.capitalize()}: {metric} ({data['question']}) on {counted(data['examples'])} of"
        f" {data['data']}; {how}."
    )


def _score(score: Mapping[str, Any], metric: str) -> str:
    return f"{score['value']:.4f}" if metric in FALLING else f"{100 * score['value']:.1f}"


def _small_gain(value: float, metric: str) -> Text:
    less, least = metric in FALLING, 0.0005 if metric in FALLING else 0.05
    if abs(value) < least:
        return Text(f"{value:+.3f}" if less else f"{value:+.1f}", style="dim")
    return Text(f"{value:+.3f}" if less else f"{value:+.1f}", style="green" if (value < 0) == less else "red")


# ── inspect and verify ───────────────────────────────────────────────────────────────────────────


def size(count: int) -> str:
    """Return a number of parameters or bytes with a unit."""
    value = float(count)
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {unit}".strip()
        value /= 1000
    return f"{value:.3g} T"


def model(description: dict[str, Any]) -> RenderableType:
    """Show a model as a tree: its axes, and below each the tensors that have it."""
    tree = Tree(Text(description["model"], style="bold"))
    tree.add(f"family      {description['family']} ({description['library']})")
    tree.add(Text(f"recognised  {description['recognised_by']}"))
    files = len(description["files"])
    tree.add(
        f"size        {size(description['parameters'])} parameters, {size(description['bytes'])}B"
        f" in {files} file{'s' if files > 1 else ''} ({', '.join(description['dtypes'])})"
    )
    if description["heads"]:
        heads = list(dict.fromkeys(name.rsplit(".", 1)[0] for name in description["heads"]))
        tree.add(Text(f"heads       {', '.join(heads)}"))
    if about := description.get("vocabulary"):
        tree.add(Text(f"vocabulary  compared with {about['with']}: {about['text']}"))
        if about.get("digits"):
            tree.add(Text(f"digits      split differently: {about['digits']}"))
    groups = {
        "[green]axes that may move[/]": ("permutation",),
        "[green]axes whose units rotate in pairs[/]": ("rotary", "interleaved"),
        "[yellow]axes that stay[/]": ("fixed",),
    }
    for title, group in groups.items():
        if axes := [axis for axis in description["axes"] if axis["group"] in group]:
            _branch(tree.add(title), axes)
    return tree


def _branch(tree: Tree, axes: list[dict[str, Any]]) -> None:
    for axis in axes:
        title = Text(axis["axis"], style="bold")
        title.append(f"  {axis['size']}", style="cyan")
        if axis["count"] > 1:
            title.append(f" × {axis['count']}", style="cyan")
        if axis["within"]:
            title.append(f"  within {axis['within']}")
        if axis["stream"]:
            title.append("  on the residual stream", style="magenta")
        if axis["why"]:
            title.append(f"  {axis['why']}", style="dim")
        node = tree.add(title)
        for tensor, layout in axis["tensors"].items():
            node.add(Text.assemble(tensor, "  ", (layout, "dim")))


def prediction(axes: Mapping[str, Mapping[str, float]]) -> RenderableType:
    """Show the share of B's activations that is predicted, by axis: by π, with nothing moved, by chance."""
    shown = {"found": "predicted", "identity": "nothing moved", "null": "by chance"}
    if not any(quality["identity"] for quality in axes.values()):  # between different shapes
        del shown["identity"]
    table = Table("axis", *shown.values(), box=None, header_style="bold")
    for id, quality in axes.items():
        shares = [quality[key] for key in shown]
        table.add_row(id, *(Text(f"{round(share, 2) + 0.0:.0%}", justify="right") for share in shares))
    return table


def described(description: dict[str, Any]) -> RenderableType:
    """Show a model, an adapter, or a π of either kind."""
    for key, view in (("model", model), ("lora", lora), ("adapter", adapter)):
        if key in description:
            return view(description)
    return rectangular(description) if "paths" in description else alignment(description)


def lora(description: dict[str, Any]) -> RenderableType:
    """Show a LoRA file: what it is, what it is for, and the blocks and kinds of modules that it changes."""
    training = ", ".join(f"{name} {text}" for name, text in description["training"].items())
    rows = {
        "LoRA": description["lora"],
        "format": f"{description['format']}: {', '.join(description['kinds'])}",
        "fits": " or ".join(description["fits"]) or "no known model has modules of these names",
        "trained on": ", ".join(f"{text} ({key})" for key, text in description["trained_on"].items()),
        "moved onto": (description["moved_onto"] or {}).get("name", ""),
        "training": training,
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


def adapter(description: dict[str, Any]) -> RenderableType:
    """Show a PEFT adapter: its kind, the base that it is for, and the kinds of modules that it changes."""
    fits, alpha = description["fits"], description["alpha"]
    if fits is None:
        told = "not tried; --with BASE tries a base by names and shapes"
    else:
        told = fits["base"] if fits["fits"] else f"not {fits['base']}: {fits['reason']}"
    base = description["base"] or "not recorded"
    rows = {
        "adapter": description["adapter"],
        "kind": ", ".join(filter(None, (description["kind"], description["task"]))),
        "trained on" if description["moved_onto"] is None else "moved onto": base
        + (f" ({description['class']})" if description["class"] else ""),
        "fits": told,
        "rank": _counts(description["ranks"]),
        "alpha": "" if alpha is None else f"{alpha:g}",
        "tokens": f"{count} virtual tokens" if (count := description["virtual_tokens"]) else "",
        "stored whole": ", ".join(description["whole"]),
        "size": _stored(description),
    }
    return _changes(rows, description)


def _stored(description: dict[str, Any]) -> str:
    return (
        f"{size(description['parameters'])} parameters, {size(description['bytes'])}B in"
        f" {description['tensors']} tensors ({', '.join(description['dtypes'])})"
    )


def _changes(rows: dict[str, str], description: dict[str, Any]) -> RenderableType:
    """Show what an adapter is, and below it how many modules of each kind it changes."""
    about = Table.grid(padding=(0, 2))
    for block, numbers in description["blocks"].items():
        rows[block] = f"{len(numbers)} block{'s' if len(numbers) > 1 else ''}: {_ranges(numbers)}"
    for name, value in rows.items():
        if value:
            about.add_row(Text(name, style="bold"), Text(value))
    if not description["kinds_of_modules"]:
        return about
    modules = Table("kind of module", "number", box=None, header_style="bold")
    for name, count in description["kinds_of_modules"].items():
        modules.add_row(Text(name), Text(str(count), justify="right"))
    return Group(about, "", modules)


def _counts(values: Mapping[str, int]) -> str:
    """Return values with their numbers, if there are several: ``16 (in 304), 32 (in 20)``."""
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(f"{value} (in {count})" for value, count in values.items())


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers with neighbours joined: ``0–18, 20``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def rectangular(description: dict[str, Any]) -> RenderableType:
    """Show a π between models of different shapes: the blocks that correspond, and every map."""
    from transfusion.model.vocabulary_map import describe_vocabulary

    about = Table.grid(padding=(0, 2))
    source, target, advice = (description[key] for key in ("source", "target", "advice"))
    rows = {
        "π": f"between different shapes, method {description['method']}, seed {description['seed']}",
        "from": f"{source['name']}  {source['fingerprint'][:12]}",
        "to": f"{target['name']}  {target['fingerprint'][:12]}",
    }
    if description["vocabulary"]:
        rows["tokens"] = describe_vocabulary(description["vocabulary"])
    if advice:
        rows["advice"] = f"{advice['verdict']}: {advice['text']}"
    rows["room"] = f"B has room for {description['kept_share']:.0%} of A's directions, mean over all axes"
    for name, value in rows.items():
        about.add_row(Text(name, style="bold"), Text(value))
    parts: list[RenderableType] = [about, ""]
    for stack, path in description["paths"].items():
        parts += [_blocks(stack, path, (advice or {}).get("blocks", {}).get(stack)), ""]
    axes = Table("axis of B <- axis of A", "units of B", "of A", "predicted", box=None, header_style="bold")
    predicted = (advice or {}).get("axes", {})
    for name, (ours, theirs) in description["maps"].items():
        share = predicted.get(name, {}).get("found")
        axes.add_row(name, str(ours), str(theirs), "" if share is None else f"{share:.0%}")
    return Group(*parts, axes)


def _blocks(stack: str, path: list[list[int]], quality: list[list[float]] | None) -> Table:
    """Show how well every block of A predicts every block of B; pairs that correspond are in brackets."""
    depths = [1 + max(cell[side] for cell in path) for side in (0, 1)]
    title = Text(f"{stack}: share of B's block that A's predicts; those in brackets correspond")
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column("")
    for j in range(depths[1]):
        table.add_column(f"B {j}", justify="right")
    for i in range(depths[0]):
        cells = []
        for j in range(depths[1]):
            value = "" if quality is None else f"{quality[i][j]:.0%}"
            cells.append(Text(f"[{value}]", style="bold") if [i, j] in path else Text(f"{value} "))
        table.add_row(f"A {i}", *cells)
    return table


def alignment(description: dict[str, Any]) -> RenderableType:
    """Show a π: its models, what moved, and where the heads went."""
    from transfusion.model.vocabulary_map import describe_vocabulary

    about = Table.grid(padding=(0, 2))
    source, target = description["source"], description["target"]
    for name, value in (
        ("π", f"{description['family']}, method {description['method']}, seed {description['seed']}"),
        (
            "axes",
            f"stream {description['residual']}, heads {description['heads_policy']},"
            f" q·k and v·o inside a head {description['inner']}",
        ),
        ("from", f"{source['name']}  {source['fingerprint'][:12]}"),
        ("to", f"{target['name']}  {target['fingerprint'][:12]}"),
        ("objective", _objective(description["objective"])),
    ):
        about.add_row(Text(name, style="bold"), Text(value))
    if vocabulary := description["vocabulary"]:
        about.add_row(Text("tokens", style="bold"), Text(describe_vocabulary(vocabulary)))
    parts: list[RenderableType] = [about, ""]
    if advice := description["advice"]:
        about.add_row(Text("advice", style="bold"), Text(f"{advice['verdict']}: {advice['text']}"))
        if margins := advice.get("margins"):
            parts += [_margins(margins), ""]
        if predicted := advice.get("axes"):
            parts += [prediction(predicted), ""]
    axes = Table("axis", "kind", "size", "maps", "stays in place", box=None, header_style="bold")
    for id, axis in description["axes"].items():
        share = axis["stays"]
        bar = "" if share is None else f"{share:6.1%} {'█' * round(20 * share)}"
        kind = f"{axis['kind']}, writes apart" if axis.get("writes_apart") else axis["kind"]
        axes.add_row(id, kind, str(axis["size"]), str(axis["maps"]), bar)
    heads = Table("heads", "B's place ← A's head", box=None, header_style="bold")
    for id, places in description["heads"].items():
        heads.add_row(id, " ".join(f"{to}←{source}" for to, source in enumerate(places)))
    parts.append(axes)
    return Group(*parts, "", heads) if description["heads"] else Group(*parts)


def _margins(margins: dict[str, dict[str, float | None]]) -> Table:
    """Show the agreement of each kind of axis, beside nothing moved and beside chance."""
    table = Table("kind of axis", box=None, header_style="bold")
    for title in ("unmoved", "above chance", "agreement found", "in a null", "beyond the null"):
        table.add_column(title, justify="right")
    for kind, margin in margins.items():
        found, null, beyond = margin["found"], margin["null"], margin["beyond"]
        table.add_row(
            kind,
            f"{margin['home']:.0%}",
            f"{margin['identity']:.1f} sd",
            f"{found:.3f}",
            "" if null is None else f"{null:.3f}",
            "" if beyond is None else f"{beyond:.1f} sd",
        )
    return table


def _objective(trace: list[float]) -> str:
    if not trace:
        return "not measured"
    sweeps = len(trace) - 1
    return f"{trace[0]:.6g} with nothing moved → {trace[-1]:.6g} after {sweeps} sweep{'s' * (sweeps != 1)}"

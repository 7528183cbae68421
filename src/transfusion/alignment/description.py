"""What a π is and what it moves: as plain data, and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from transfusion.alignment.alignment import Alignment, fixed_points
from transfusion.model.vocabulary_map import describe_vocabulary
from transfusion.runtime.tables import columns, facts


def describe_alignment(alignment: Alignment) -> dict[str, Any]:
    """Describe a π: the share of units in place per axis, the heads, the objective.

    Between models of different shapes: the blocks that correspond, and the sizes of every map.
    """
    made, maps = alignment.provenance, alignment.maps
    about = {
        "family": made.family,
        "method": made.method,
        "seed": made.seed,
        "options": dict(made.options),
        "source": {"name": made.source, "fingerprint": made.source_fingerprint},
        "target": {"name": made.target, "fingerprint": made.target_fingerprint},
        "version": made.version,
        "blake3": alignment.digest,
        "advice": dict(made.advice) or None,
        "vocabulary": dict(made.vocabulary) or None,
    }
    if alignment.other_shape:
        return about | {
            "paths": {stack: [[i, j] for i, j, _ in path] for stack, path in alignment.paths.items()},
            "kept_share": fmean(min(1.0, one.size / one.source_size) for one in maps.values()),
            "maps": {name: [one.size, one.source_size] for name, one in maps.items()},
        }
    axes: dict[str, dict[str, Any]] = {}
    moved = {id: maps[id] for id in alignment.sizes if id in maps}
    for id, map_ in moved.items():
        stays = list(fixed_points(map_))
        shape = {
            "kind": map_.kind,
            "size": map_.size,
            "maps": map_.blocks,
            "within": alignment.parents.get(id),
        }
        axes[id] = {**shape, "stays": fmean(stays) if stays else None}
    parents = set(alignment.parents.values())
    return about | {
        "residual": made.policy.residual,
        "inner": made.policy.inner,
        "heads_policy": made.policy.heads,
        "objective": list(made.objective),
        "axes": axes,
        "heads": {id: one.index[0].tolist() for id, one in moved.items() if id in parents and one.permutes},
    }


def alignment_tables(description: Mapping[str, Any]) -> RenderableType:
    """Show a π: its models, the advice on it, and what it moves."""
    other_shape = "paths" in description
    source, target, advice = description["source"], description["target"], description["advice"] or {}
    about = f"method {description['method']}, seed {description['seed']}"
    tokens = describe_vocabulary(description["vocabulary"]) if description["vocabulary"] else ""
    rows = {"π": f"{'between different shapes' if other_shape else description['family']}, {about}"}
    if not other_shape:
        rows["axes"] = (
            f"stream {description['residual']}, heads {description['heads_policy']},"
            f" q·k and v·o inside a head {description['inner']}"
        )
    rows["from"] = f"{source['name']}  {source['fingerprint'][:12]}"
    rows["to"] = f"{target['name']}  {target['fingerprint'][:12]}"
    rows["objective"] = "" if other_shape else _objective(description["objective"])
    rows["tokens"] = tokens
    rows["advice"] = f"{advice['verdict']}: {advice['text']}" if advice else ""
    if other_shape:
        share = description["kept_share"]
        rows["room"] = f"B has room for {share:.0%} of A's directions, mean over all axes"
    tables = _between_shapes(description, advice) if other_shape else _moves(description, advice)
    return Group(facts(rows), *(part for table in tables for part in ("", table)))


def _objective(trace: Sequence[float]) -> str:
    if not trace:
        return "not measured"
    sweeps = len(trace) - 1
    return f"{trace[0]:.6g} with nothing moved → {trace[-1]:.6g} after {sweeps} sweep{'s' * (sweeps != 1)}"


def _moves(description: Mapping[str, Any], advice: Mapping[str, Any]) -> list[Table]:
    """Show how well axes agree or are predicted, what stays in place, and where the heads went."""
    tables = []
    if margins := advice.get("margins"):
        names = ("unmoved", "above chance", "agreement found", "in a null", "beyond the null")
        tables.append(columns("kind of axis", *names))
        for kind, margin in margins.items():
            null, beyond = margin["null"], margin["beyond"]
            cells = [f"{margin['home']:.0%}", f"{margin['identity']:.1f} sd", f"{margin['found']:.3f}"]
            cells += ["" if null is None else f"{null:.3f}", "" if beyond is None else f"{beyond:.1f} sd"]
            tables[-1].add_row(kind, *cells)
    if predicted := advice.get("axes"):
        tables.append(prediction(predicted))
    axes = Table("axis", "kind", "size", "maps", "stays in place", box=None, header_style="bold")
    for id, axis in description["axes"].items():
        share = axis["stays"]
        bar = "" if share is None else f"{share:6.1%} {'█' * round(20 * share)}"
        kind = axis["kind"]
        axes.add_row(id, kind, str(axis["size"]), str(axis["maps"]), bar)
    heads = Table("heads", "B's place ← A's head", box=None, header_style="bold")
    for id, places in description["heads"].items():
        heads.add_row(id, " ".join(f"{to}←{source}" for to, source in enumerate(places)))
    return [*tables, axes, *([heads] if description["heads"] else [])]


def prediction(axes: Mapping[str, Mapping[str, float]]) -> Table:
    """Show the share of B's activations that is predicted, by axis: by π, with nothing moved, by chance."""
    shown = {"found": "predicted", "identity": "nothing moved", "null": "by chance"}
    if not any(quality["identity"] for quality in axes.values()):  # between different shapes
        del shown["identity"]
    table = columns("axis", *shown.values())
    for id, quality in axes.items():
        table.add_row(id, *(f"{round(quality[key], 2) + 0.0:.0%}" for key in shown))
    return table


def _between_shapes(description: Mapping[str, Any], advice: Mapping[str, Any]) -> list[Table]:
    """Show the blocks that correspond, and the size of every map."""
    tables = []
    for stack, path in description["paths"].items():
        quality = advice.get("blocks", {}).get(stack)
        depths = [1 + max(cell[side] for cell in path) for side in (0, 1)]
        table = columns("", *(f"B {j}" for j in range(depths[1])))
        table.title = Text(f"{stack}: share of B's block that A's predicts; those in brackets correspond")
        table.title_justify = "left"
        for i in range(depths[0]):
            values = ["" if quality is None else f"{quality[i][j]:.0%}" for j in range(depths[1])]
            cells = [
                Text(f"[{value}]", style="bold") if [i, j] in path else Text(f"{value} ")
                for j, value in enumerate(values)
            ]
            table.add_row(f"A {i}", *cells)
        tables.append(table)
    axes = Table("axis of B <- axis of A", "units of B", "of A", "predicted", box=None, header_style="bold")
    for name, (ours, theirs) in description["maps"].items():
        share = advice.get("axes", {}).get(name, {}).get("found")
        axes.add_row(name, str(ours), str(theirs), "" if share is None else f"{share:.0%}")
    return [*tables, axes]

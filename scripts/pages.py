"""Write the generated parts of the pages: python scripts/pages.py [--check]

A generated part stands between ``<!-- generated: WHAT -->`` and ``<!-- end -->``. WHAT is one of

- ``verbs``: every verb with its arguments and options, from the command line itself;
- ``demo KIND``: the tables of the demo, from benchmarks/results, which scripts/measure_demo.py writes;
- ``growth``: time and memory of the verbs by size, from benchmarks/growth/measured.json;
- ``transfer PART``, ``arrives``: tables of the benchmark of transfer, from benchmarks/transfer/measured.json;
- ``zoo PART``, ``refining PART``: the same of models that others made, and of refinement by answers;
- ``recommendation``: what to do with two bases of which nothing is known, as errors and ``--help`` say it.

With ``--check`` nothing is written; stale pages are listed, and the exit code is 1. docs/families.md, which
takes minutes to measure, is written by scripts/family_table.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from statistics import mean
from typing import Any, get_args, get_type_hints

import typer

ROOT = Path(__file__).parent.parent
Row = tuple[str, str, str]
_PART = re.compile(r"<!-- generated: (\w+) ?(\S*) -->\n.*?<!-- end -->", re.DOTALL)


# ── the command line ─────────────────────────────────────────────────────────────────────────


def commands() -> Mapping[str, Any]:
    """Return the commands of the command line by name."""
    from transfusion.cli.app import app

    found: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return found


def verbs() -> str:
    """Return the reference of all verbs: each with its own options, and a table of those that many share."""
    rows = {name: list(_rows(command)) for name, command in commands().items()}
    count = Counter(row for found in rows.values() for row in found if row[0].startswith("`-"))
    shared: dict[str, Row] = {}
    for row, verbs in count.most_common():
        if verbs > 1:
            shared.setdefault(row[0], row)  # its most common meaning; others stand with their verbs
    parts = [_verb(name, command.help, rows[name], shared) for name, command in commands().items()]
    return "\n".join([*parts, "## Shared options\n", _table(_HEAD, sorted(shared.values()))])


_HEAD = ("", "default", "meaning")
_NEEDED = "**required**"


def _verb(verb: str, about: str, rows: Sequence[Row], shared: Mapping[str, Row]) -> str:
    own = [row for row in rows if shared.get(row[0]) != row]
    others = ", ".join(row[0].split(",")[0] for row in rows if row not in own)
    names = [row[0].split("`")[1] for row in rows if row[1] == _NEEDED or not row[0].startswith("`-")]
    needed = [f"{name} {name[2:].upper()}" if name.startswith("-") else name for name in names]
    text = "\n\n".join(" ".join(part.split()) for part in about.split("\n\n"))
    usage = " ".join(["transfusion", verb, *needed])
    return f"## {verb}\n\n`{usage}`\n\n{text}\n\n{_table(_HEAD, own)}\n[Shared](#shared-options): {others}.\n"


def _rows(command: Any) -> Iterator[Row]:
    """Yield how an argument or option is written, its default and its meaning; arguments first."""
    hints = get_type_hints(command.callback)
    for one in sorted(command.params, key=lambda one: bool(one.param_type_name != "argument")):
        if one.name != "help" and not getattr(one, "hidden", False):
            yield _written(one), _default(one), _about(one, hints)


def _written(one: Any) -> str:
    if one.param_type_name == "argument":
        name = one.name.upper() + (" …" if one.nargs == -1 else "")
        return f"`{name}`"
    names = "`, `".join(sorted(one.opts, key=len, reverse=True))
    return f"`{names}`" + (f" / `{one.secondary_opts[0]}`" if one.secondary_opts else "")


def _default(one: Any) -> str:
    if one.required:
        return _NEEDED
    if isinstance(one.show_default, str):
        return one.show_default
    if one.default is None or one.default is False or one.show_default is False:
        return ""
    return "yes" if one.default is True else f"`{one.default}`"


def _about(one: Any, hints: Mapping[str, Any]) -> str:
    text = " ".join((one.help or "").split()).replace("|", "\\|")
    choices = list(_choices(hints.get(one.name)))
    return text + (f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else "")


def _choices(hint: Any) -> Iterator[str]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        yield from (str(member.value) for member in hint)
    for inner in get_args(hint):
        yield from _choices(inner)


# ── measured ─────────────────────────────────────────────────────────────────────────────────


def demo(kind: str) -> str:
    """Return the tables of the demo: mean accuracy and gain, and the share of the gap by seed."""
    found = _demo(kind)
    keys = [key for key in ("onto_b", "onto_successor") if key in found[0]]
    return "\n".join(_over_seeds([one[key]["models"] for one in found]) for key in keys)


def _over_seeds(results: list[Any]) -> str:
    rows = []
    for models in zip(*results, strict=True):
        shares = [100 * one["share"] for one in models if one["share"] is not None]
        each = ", ".join(str(round(share)) for share in shares)
        cells = [_accuracy(models, part) for part in ("task", "support")]
        rows.append((models[0]["name"], *cells, f"{round(mean(shares))} % ({each})" if shares else ""))
    return _minus(_table(("", "task", "support", "of the gap (each seed)"), rows))


def _accuracy(models: Sequence[Any], part: str) -> str:
    gains = [one["gain"][part] for one in models if one["gain"]]
    gain = f" ({mean(gains):+.1f})" if gains else ""
    return f"{100 * mean(one[part]['value'] for one in models):.1f}{gain}"


TASKS = ("before", "now", "now, 1,000 steps")


def transfer(part: str) -> str:
    """Return a table of the benchmark of transfer: the mean share of the gap, ± over seeds."""
    info = json.loads((ROOT / "benchmarks/transfer/measured.json").read_text())
    if part == "refined":
        rows = [(name, *map(_spread, row.values())) for name, row in info["refined"].items()]
        return _minus(_table(("", *next(iter(info["refined"].values()))), rows, numbers=True))
    if part == "tasks":
        rows = [
            (name, one["group"], *(_share_and_support(one[when]) if when in one else "" for when in TASKS))
            for name, one in info["tasks"].items()
        ]
        return _minus(_table(("task", "group", *TASKS), rows))
    means = {
        pair: row for pair, row in info["means"].items() if (pair == "successors") == (part == "successors")
    }
    methods = list(next(iter(means.values())))
    rows = [(pair, *(_spread(row[method]) for method in methods)) for pair, row in means.items()]
    return _minus(_table(("pair", *methods), rows, numbers=True))


def _share_and_support(value: Mapping[str, float]) -> str:
    return f"{value['share']:.0f} %, {value['support']:+.1f}; {value['seconds']:.0f} s"


def _spread(value: Sequence[float]) -> str:
    return f"{value[0]:.1f} ± {value[1]:.1f}"


def arrives(_: str) -> str:
    """Return the README's table: the share of the gap that arrives, by kind of base and method."""
    info = json.loads((ROOT / "benchmarks/transfer/measured.json").read_text())
    means, refined = info["means"], info["refined"]["share of the gap, ± over seeds"]
    methods = ("naive", "guarded", "functional")

    def measured(pair: str) -> list[float | None]:
        return [*(means[pair][method][0] for method in methods), refined.get(pair, [None])[0]]

    def digits(key: str) -> list[float | None]:
        found: dict[str, list[float]] = {}
        for one in (model for result in _demo("digits") for model in result[key]["models"]):
            method = one["model"].rpartition("-")[2]
            if one["share"] is not None:
                found.setdefault(method, []).append(one["share"])
        return [100 * mean(found[name]) if name in found else None for name in (*methods, "refined")]

    rows: list[tuple[str, list[float | None]]] = [
        ("**B was trained on from A**", []),
        ("ViT, MNIST and Fashion-MNIST", measured("successors")),
        ("ViT, digits; B's units also shuffled", digits("onto_successor")),
        ("**trained apart: other seed, other data**", []),
        ("ViT, digits", digits("onto_b")),
        ("ViT, MNIST and Fashion-MNIST", measured("mnist")),
        ("ViT, CIFAR-10", measured("cifar")),
        ("BERT, sentiment of reviews", measured("text")),
    ]
    head = ("A and B", "τ added unchanged", "permuted", "`--method functional`", "`--refine`")
    cells = [
        (name, *("" if share is None else f"{round(share)} %" for share in shares or [None] * 4))
        for name, shares in rows
    ]
    return _minus(_table(head, cells, numbers=True))


_DOOR = "model kind from parameters planted_π functional seconds"


def zoo(part: str) -> str:
    """Return a table of models that others made: how they came through the door, or what arrives."""
    info = json.loads((ROOT / "benchmarks/zoo/measured.json").read_text())
    if part == "door":
        titles = [word.replace("_", " ") for word in _DOOR.split()]
        return _table(titles, [(name, *_through(one)) for name, one in info["door"].items()])
    ways = ["unchanged", "default", "functional", "refined"]
    if part == "readme":
        titles = ["A → B", "the fine-tune", "τ unchanged", *ways[1:]]
        moved = [one for one in info["trials"].values() if one["finetune"] != "none"]
        return _minus(_table(titles, [_row(one, ways, short=True) for one in moved]))
    titles = ["trial", "A → B", "the fine-tune, and what was measured", *ways]
    return _minus(_table(titles, [(name, *_row(one, ways)) for name, one in info["trials"].items()]))


def _through(one: Any) -> tuple[str, ...]:
    origin = f"`{one['package']}`: {one['made_by']}; {one['licence']}"
    if one["refused"]:
        return one["kind"], origin, "", f"refused: {one['refused']}", "", ""
    found = "found" if one["found"] and one["equal"] else "not found"
    size = f"{one['parameters'] / 1e6:.1f} M"
    kind = f"{one['kind']}, {one['family']}"
    return kind, origin, size, found, f"{one['predicted']:.0%}", f"{one['seconds']:.0f}"


def _row(one: Any, ways: Sequence[str], *, short: bool = False) -> tuple[str, ...]:
    """Return the cells of a trial: what each way brought and, unless ``short``, its cost."""
    cells = []
    for way in ways:
        found = one["ways"].get(way)
        if found is None:
            cells.append("")
        elif found["share"] is None:
            cells.append("refused")
        else:
            change = "" if found["support"] is None else f", {found['support']:+.1f}"
            more = "" if short else f"{change}; {found['seconds']:.0f} s"
            cells.append(f"{round(100 * found['share'])} %{more}")
    models = f"{one['a']} → {one['b']}"
    about = one["finetune"] if short else f"{one['finetune']}; measured: {one['measured']}"
    return (models if short else f"{models}: {one['relation']}", about, *cells)


def growth(_: str) -> str:
    """Return the table of the benchmark of growth."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from growth.tables import about, summary

    info = json.loads((ROOT / "benchmarks/growth/measured.json").read_text())
    return f"{about(info)}\n{summary(info)}"


def refining(part: str) -> str:
    """Return a table of the benchmark of refinement by answers: its memory and time, or what arrives."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from refining import tables

    made = getattr(tables, part)
    return _minus(made(json.loads((ROOT / "benchmarks/refining/measured.json").read_text())))


def recommendation(_: str) -> str:
    """Return the recommendation with its parameters as options."""
    from transfusion.cli.console import in_options
    from transfusion.matching.methods import RECOMMENDATION

    return re.sub(r"`[^`]+`", lambda found: f"`{in_options(found[0])}`", RECOMMENDATION) + "\n"


def _demo(kind: str) -> list[Any]:
    found: list[Any] = json.loads((ROOT / f"benchmarks/results/demo-{kind}.json").read_text())
    return found


def _minus(table: str) -> str:
    """Return a table with true minus signs before numbers."""
    return re.sub(r"(?<![\w-])-(?=\d)", "−", table)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], *, numbers: bool = False) -> str:
    """Return a table; with ``numbers``, all columns but the first stand on the right."""
    titles = list(head)
    lines = [titles, ["---", *["--:" if numbers else "---"] * (len(titles) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ── pages ────────────────────────────────────────────────────────────────────────────────────


def filled(text: str) -> str:
    """Return a page with its generated parts up to date."""
    makers = {
        "verbs": lambda _: verbs(),
        "demo": demo,
        "growth": growth,
        "transfer": transfer,
        "arrives": arrives,
        "zoo": zoo,
        "refining": refining,
        "recommendation": recommendation,
    }

    def fill(found: re.Match[str]) -> str:
        what = f"{found[1]} {found[2]}".strip()
        return f"<!-- generated: {what} -->\n\n{makers[found[1]](found[2])}\n<!-- end -->"

    return _PART.sub(fill, text)


def stale() -> Iterator[tuple[Path, str]]:
    """Yield every stale page with its text as it should be."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        if (now := filled(text)) != text:
            yield page, now


def main() -> None:
    check = "--check" in sys.argv[1:]
    found = list(stale())
    for page, text in found:
        print(page.relative_to(ROOT))
        if not check:
            page.write_text(text)
    if check and found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Write the generated parts of the pages: python scripts/pages.py [--check]

A generated part stands between ``<!-- generated: WHAT -->`` and ``<!-- end -->``. WHAT is one of

- ``options VERB``: the arguments and options of a verb, from the command line itself;
- ``verbs``: all verbs with their first sentence;
- ``result FILE``: the numbers of a result that a verb or a benchmark wrote as JSON.

With ``--check`` nothing is written; stale pages are listed, and the exit code is 1. docs/families.md, which
takes minutes to measure, is written by scripts/family_table.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

ROOT = Path(__file__).parent.parent
_PART = re.compile(r"<!-- generated: (\w+) ?(\S*) -->\n.*?<!-- end -->", re.DOTALL)


# ── the command line ─────────────────────────────────────────────────────────────────────────


def commands() -> Mapping[str, Any]:
    """Return the commands of the command line by name."""
    from transfusion.cli.app import app

    found: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return found


def verbs() -> str:
    """Return a table of all verbs, with the first sentence of each."""
    rows = (
        (f"[`{name}`]({name}.md)" if (ROOT / "docs/verbs" / f"{name}.md").exists() else f"`{name}`", about)
        for name, about in ((name, _first(command.help)) for name, command in commands().items())
    )
    return _table(("verb", "what it does"), rows)


def options(verb: str) -> str:
    """Return the arguments and options of one verb, one table for each panel of its help."""
    command = commands().get(verb)
    if command is None:
        raise SystemExit(f"a page asks for the options of {verb}, which is no verb")
    hints = get_type_hints(command.callback)
    panels: dict[str, list[tuple[str, str, str]]] = {}
    for one in sorted(command.params, key=lambda one: bool(one.param_type_name != "argument")):
        if one.name != "help" and not getattr(one, "hidden", False):
            panel = getattr(one, "rich_help_panel", None) or ""
            panels.setdefault(panel, []).append((_written(one), _default(one), _about(one, hints)))
    parts = []
    for panel, rows in panels.items():
        title = f"\n**{panel}**\n\n" if panel else ""
        parts.append(title + _table(("", "default", "meaning"), rows))
    return "".join(parts)


def _written(one: Any) -> str:
    if one.param_type_name == "argument":
        name = one.name.upper() + (" …" if one.nargs == -1 else "")
        return f"`{name}`"
    names = "`, `".join(sorted(one.opts, key=len, reverse=True))
    return f"`{names}`" + (f" / `{one.secondary_opts[0]}`" if one.secondary_opts else "")


def _default(one: Any) -> str:
    if one.required:
        return "**required**"
    if isinstance(one.show_default, str):
        return one.show_default
    if one.default is None or one.default is False or one.show_default is False:
        return ""
    return "yes" if one.default is True else f"`{one.default}`"


def _about(one: Any, hints: Mapping[str, Any]) -> str:
    text = _first(one.help, whole=True)
    choices = list(_choices(hints.get(one.name)))
    return text + (f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else "")


def _choices(hint: Any) -> Iterator[str]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        yield from (str(member.value) for member in hint)
    for inner in get_args(hint):
        yield from _choices(inner)


def _first(text: str | None, *, whole: bool = False) -> str:
    plain = " ".join((text or "").split("\n\n")[0].split())
    return (plain if whole else plain.split("; exit")[0]).replace("|", "\\|")


# ── results ──────────────────────────────────────────────────────────────────────────────────


def result(file: str) -> str:
    """Return the table of a result, chosen by the keys of the file."""
    info = json.loads((ROOT / file).read_text())
    if "curves" in info and "at_zero" in info:
        return _swept(info)
    if "curves" in info and "shots" in info:
        return _few(info)
    if "curves" in info:
        return _barrier(info)
    if "models" in info:
        return _evaluated(info)
    raise SystemExit(f"{file}: not a result of sweep, fewshot, barrier or evaluate")


def _barrier(info: Any) -> str:
    rows = []
    for curve in info["curves"]:
        points = {point["alpha"]: point for point in curve["points"]}
        half = points[min(points, key=lambda alpha: abs(alpha - 0.5))]
        star = "" if curve["faithful"] else "*"
        losses = (curve["points"][0]["loss"], half["loss"], curve["points"][-1]["loss"])
        rows.append((curve["label"], f"{curve['height']:.2f}{star}", *(f"{loss:.2f}" for loss in losses)))
    return _table(("way", "barrier", "loss at α = 0", "halfway", "at α = 1"), rows)


def _evaluated(info: Any) -> str:
    support = info.get("support") is not None
    head = ("model", info["task"]["metric"], "gain", *(("support", "gain") if support else ()))
    rows = []
    for one in info["models"]:
        gain = one["gain"] or {}
        row = [one["model"], _score(one["task"]), _gain(gain.get("task"))]
        if support:
            row += [_score(one["support"]), _gain(gain.get("support"))]
        rows.append(tuple(row))
    return _table(head, rows)


def _swept(info: Any) -> str:
    rows = []
    for curve in info["curves"]:
        best = next(point for point in curve["points"] if point["alpha"] == curve["best"])
        rows.append(
            (curve["label"], f"{curve['best']:g}", *(_gain(best["gain"][of]) for of in ("task", "support")))
        )
    return _table(("", "best α", "gain on the task", "on the support"), rows)


def _few(info: Any) -> str:
    rows = [
        (curve["label"], _gain(curve["gain"]["plain"]), _gain(curve["gain"]["learned"]))
        for curve in info["curves"]
    ]
    return _table(("", "gain at α = 1", f"with α learned from {info['shots']} a class"), rows)


def _score(score: Any) -> str:
    return f"{score['value']:.4f}" if score["accuracy"] is None else f"{100 * score['value']:.1f}"


def _gain(gain: float | None) -> str:
    return "" if gain is None else f"{gain:+.2f}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ── pages ────────────────────────────────────────────────────────────────────────────────────


def filled(text: str) -> str:
    """Return a page with its generated parts up to date."""
    makers = {"verbs": lambda _: verbs(), "options": options, "result": result}

    def fill(found: re.Match[str]) -> str:
        what = f"{found[1]} {found[2]}".strip()
        return f"<!-- generated: {what} -->\n\n{makers[found[1]](found[2])}\n<!-- end -->"

    return _PART.sub(fill, text)


def stale() -> Iterator[tuple[Path, str]]:
    """Yield every stale page with its text as it should be."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
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

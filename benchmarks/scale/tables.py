"""The results as tables, for people and for the pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scale.comparing import growth, in_phases, ratios

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = {"scale": DOCS / "scale.md", "plan": DOCS / "verbs" / "plan.md"}


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def about(info: dict[str, Any]) -> str:
    """Where and when."""
    machine = info["machine"]
    return (
        f"{machine['cores']} cores ({machine['processor']}), torch {machine['torch']}, load of"
        f" {machine['load']:.1f} before it began; made by `{info['command']}`.\n"
    )


def threads(info: dict[str, Any]) -> str:
    """Runs on threads: time by phase, memory, and the floor."""
    rows = []
    for one in info["local"]:
        run, floor = one["run"], one["floor"]["seconds"]
        sweeps = {name: s for name, s in run["seconds"].items() if name.startswith("sweep")}
        limit = run["task"]["memory"]
        rows.append(
            (
                f"{one['size']} {one['what']}",
                *(_s(run["seconds"].get(name)) for name in ("hashing", "in place", "identity")),
                ", ".join(f"{seconds:.1f}" for seconds in sweeps.values()),
                _s(run["seconds"].get("advice")),
                _gb(run["peak"]),
                _gb(limit) if limit else _gb(run["planned"]) + " planned",
                f"{floor:.1f} s",
                f"{floor / max(sweeps.values()):.0%}" if run["found"] is None else "",
                f"{run['found']:.1%}" if run["found"] is not None else "",
            )
        )
    head = "pair, hashing, in place, identity, sweeps (s), advice, peak memory, limit, floor of a sweep"
    return table([*head.split(", "), "share of the floor, dearest sweep", "units found"], rows)


def grown(info: dict[str, Any]) -> str:
    """By which power of the number of parameters every phase grows."""
    plain = [one for one in info["local"] if one["what"] == "unrelated" and not one["run"]["task"]["memory"]]
    names = [name for name in plain[0]["run"]["seconds"] if name != "opening"] if plain else []
    rows = []
    for name in names:
        points = [
            (one["parameters"], one["run"]["seconds"][name]) for one in plain if name in one["run"]["seconds"]
        ]
        power = growth(points)
        rows.append((name, "" if power is None else f"{power:.2f}"))
    sizes = ", ".join(one["size"] for one in plain)
    return table((f"phase, over {sizes}", "seconds grow by the power"), rows)


def cluster(info: dict[str, Any]) -> str:
    """Runs on Ray, beside the same on threads."""
    rows = []
    for one in info["ray"]:
        run = one["run"]
        sweeps = [s for name, s in run["seconds"].items() if name.startswith("sweep")]
        rows.append(
            (
                f"{one['size']} {one['what']}",
                run["task"]["jobs"],
                ", ".join(f"{seconds:.1f}" for seconds in sweeps),
                f"{run['total']:.1f} s",
                _gb(run["worker"]),
                _gb(run["workers"]),
                "yes" if one["same"] else "NO",
                f"{one['lost']:+.1f} s" if one["lost"] is not None else "",
            )
        )
    head = "pair, workers, sweeps (s), all, most memory of a worker, of all workers, π as on threads, lost"
    return table(head.split(", "), rows)


def compared(info: dict[str, Any]) -> str:
    """Return estimates beside measurements: seconds that passed, and seconds of one core's work."""
    rows = []
    for one in info["local"]:
        run, plan = one["run"], one["predicted"]
        measured = in_phases(run["seconds"])
        wall = ratios(plan["seconds"], measured)
        busy = ratios(plan["busy"], in_phases(run["busy"]))
        for name in wall:
            estimated, real = (
                sum(times[each] for each in wall if each != "all") if name == "all" else times[name]
                for times in (plan["seconds"], measured)
            )
            what = f"{one['size']} {one['what']}"
            rows.append((what, name, _s(estimated), _s(real), f"{wall[name]:.2f}", f"{busy[name]:.2f}"))
        rows.append((what, "memory", _gb(plan["memory"]), _gb(run["peak"]), _ratio(plan, run), ""))
    head = ("pair", "phase", "estimated", "measured", "ratio", "ratio of processor seconds")
    return table(head, rows)


def everything(info: dict[str, Any]) -> str:
    """All tables but the comparison with plans."""
    parts = [about(info), threads(info), grown(info)]
    return "\n".join([*parts, cluster(info)] if info["ray"] else parts)


def write_docs(info: dict[str, Any]) -> None:
    """The tables, between the markers of their pages."""
    for name, text in (("scale", everything(info)), ("plan", f"{about(info)}\n{compared(info)}")):
        between_markers(PAGES[name], name, text)
        print(f"{PAGES[name]} written")


def between_markers(page: Path, name: str, text: str) -> None:
    """Replace what stands between the two markers of a page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = page.read_text()
    if begin not in old or end not in old:
        raise SystemExit(f"{page}: no {begin} … {end}")
    before, after = old.split(begin)[0], old.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _ratio(plan: dict[str, Any], run: dict[str, Any]) -> str:
    return f"{plan['memory'] / run['peak']:.2f}"

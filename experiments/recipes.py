"""The recipes: one for every table and figure of the paper, with its rows and ours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from experiments import paper
from experiments.paper import Table
from transfusion.errors import SettingError

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


_EVERY = paper.VISUAL.tasks
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
            paper.VISUAL,
        ),
        Recipe(
            "table-2",
            "Table 2: language tasks",
            Kind.TEXTS,
            paper.LANGUAGE.tasks,
            ("naive", "ot", "git-rebasin", "transfusion"),
            ("functional", "auto"),
            paper.LANGUAGE,
        ),
        Recipe(
            "table-3",
            "Table 3: how heads are matched",
            Kind.IMAGES,
            paper.HEADS.tasks,
            ("brute-force", "no-attention", "transfusion"),
            ("guarded",),
            paper.HEADS,
        ),
        Recipe(
            "table-4",
            "Table 4: ten examples of every class",
            Kind.SHOTS,
            _EVERY,
            ("naive", "transfusion"),
            ("functional",),
            paper.FEW_SHOTS,
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

"""The choice of α by running models on probes, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transfusion.errors import ArchitectureError, LibraryError, SettingError, UselessResultError
from transfusion.transport.alpha import Alpha, AlphaArgument
from transfusion.transport.balanced_alpha import AUTO
from transfusion.transport.output_shift import RELATED, SAME, UNRELATED, AlphaSearch


@dataclass(frozen=True)
class ChosenAlpha:
    """An α, and what was measured in B's outputs."""

    alpha: AlphaArgument | None
    output_shift: dict[str, Any]


@dataclass(frozen=True)
class AlphaChooser:
    """Chooses α, or refuses to."""

    rotates: bool
    """Whether π has maps from activations, whose errors are spread over all units."""
    least_direction: float = UNRELATED
    """The cosine between the changes of B's and A's outputs below which none is chosen, but refused."""
    must_measure: bool = False
    """Whether an α is chosen only if the change of B's outputs can be measured."""

    def choose(
        self,
        asked: AlphaArgument | None,
        keep_support: float | None,
        search: Callable[[], AlphaSearch],
        *,
        anyway: bool = False,
        refinable: bool = True,
    ) -> ChosenAlpha:
        """Choose α by running models on probes.

        Where models cannot be run, and there is no ``keep_support``, the weights alone decide. An α that was
        not asked for is lowered where it would do harm, or refused unless ``anyway``. ``refinable`` says
        whether a refinement could be asked for instead.
        """
        self._require_sensible(asked, keep_support)
        try:
            alpha_search = search()
        except (ArchitectureError, LibraryError) as error:
            if keep_support is not None or (self.must_measure and not anyway):
                raise
            return ChosenAlpha(asked, {"not_tried": str(error)})
        info: dict[str, Any] = {"probes": alpha_search.probes.about}
        whole = alpha_search.best() if asked == AUTO else alpha_search.at(Alpha.of(asked or 1.0).default)
        found, ours = whole, self.rotates and asked in (AUTO, None)
        if ours:
            found = alpha_search.harmless(whole, RELATED if asked == AUTO else SAME)
        if found.alpha < whole.alpha:
            info["lowered"] = whole.as_dict()
        if keep_support is not None:
            found = alpha_search.within(keep_support, found.alpha)
        if ours and found.direction < self.least_direction and not anyway:
            raise UselessResultError(
                f"with this π, B's outputs would not move as A's did (cosine {found.direction:.2f}):"
                " the fine-tune would not arrive, and B would lose some of what it can do",
                hint=("add `refine`, which starts from B then; or " if refinable else "")
                + "give a number for `alpha`, and measure; or insist with `anyway`",
            )
        return ChosenAlpha(round(found.alpha, 4), {**found.as_dict(), **info})

    @staticmethod
    def _require_sensible(asked: AlphaArgument | None, keep_support: float | None) -> None:
        if keep_support is not None and not 0 < float(keep_support) < float("inf"):
            raise SettingError(
                f"`keep_support` = {keep_support}: it must be a number above 0",
                hint="give the share of their own spread that B's outputs may move by, such as 0.2",
            )
        if asked not in (AUTO, None) and Alpha.of(asked).patterns:
            raise SettingError("`keep_support`: α was given for every layer", hint="give one number, or auto")

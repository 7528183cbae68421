"""Methods: named presets, each a choice of what counts as evidence and of policies."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from transfusion.architecture import Policy
from transfusion.errors import SettingError


class Start(StrEnum):
    """What the first sweep makes of axes that it has not visited yet."""

    IDENTITY = "identity"
    """They count as they are, as in the paper."""
    SETTLED = "settled"
    """They do not count, where there is anything else to go by: their order means nothing yet."""


@dataclass(frozen=True)
class Method:
    """How an alignment is found."""

    name: str
    about: str
    policy: Policy = field(default_factory=Policy)
    produced_only: bool = True
    """Whether o stays out of the matching of heads and of the units inside them, as in the paper."""
    vectors: bool = False
    """Whether biases and norm weights take part in the gain."""
    start: Start = Start.SETTLED
    max_sweeps: int = 100

    def options(self) -> dict[str, Any]:
        """What to remember in the provenance."""
        return {key: value for key, value in asdict(self).items() if key not in ("name", "about", "policy")}


METHODS = {
    method.name: method
    for method in (
        Method(
            "transfusion",
            "the paper's: heads by their singular values, then assignments, sweep after sweep",
        ),
        Method("naive", "nothing moves: the task vector is added as it is"),
        Method("random", "a random exact move of every free axis, for tests and for planting truths"),
    )
}


def preset(name: str) -> Method:
    """The preset of this name."""
    try:
        return METHODS[name]
    except KeyError:
        raise SettingError(
            f"there is no method {name!r}", hint=f"choose one of {', '.join(METHODS)}"
        ) from None

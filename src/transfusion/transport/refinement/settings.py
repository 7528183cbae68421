"""The settings of a refinement, and the record of what it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transfusion.errors import SettingError
from transfusion.transport.settings import TransportSettings, seconds

MOVED, BASE = "moved", "base"
"""The starts of a refinement: B + α·π(τ), or B."""
STARTS_FROM_B = "the change makes B's answers less like the fine-tune's, so the refinement starts from B"

CHANGE = "change"
"""What agreement means where an adapter learns how far the fine-tune has changed answers: their cosine."""

STEPS, OF_IMAGES = 600, 1000
"""The most steps where users name no number; those of images, of which each says less than a text."""
MANY = 20_000
"""The most steps where the time decides."""

REFINEMENT = "refinement"
"""The key of the settings and of the record in the metadata."""


@dataclass(frozen=True)
class RefinementSettings:
    """How a refinement is run."""

    steps: int | None = None
    """The most steps; None for as many as such inputs usually take."""
    keep: float = 0.3
    """The weight of B's own outputs, beside the fine-tune's."""
    rank: int | None = None
    """The rank of a LoRA to train instead of all weights."""
    calibrate: str | None = None
    """The user's unlabelled inputs."""
    time: float | None = None
    """The seconds that it may take, about, from which the number of steps follows."""
    seed: int = 0
    batch: int | None = None
    """The texts of a step and process, of a language model; None for as many as have 2,048 tokens. The
    latents of an adapter of a denoiser; None for 8.
    """
    threads: int | None = None
    """How many threads train, which may change the last digits; None to try how many are fastest."""

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning."""
        if self.steps is not None and self.steps < 1:
            raise SettingError(
                f"`refine_steps` = {self.steps}: there must be at least one step",
                hint="give a number above 0",
            )
        if self.time is not None and not 0 < self.time < float("inf"):
            raise SettingError(
                f"`refine_time` = {self.time}: the time must be above 0", hint="give 10m for example"
            )
        if self.batch is not None and self.batch < 1:
            raise SettingError(
                f"`refine_batch` = {self.batch}: a step has a text at least", hint="leave it out"
            )
        if self.rank is not None and self.rank < 1:
            raise SettingError(
                f"`refine_rank` = {self.rank}: a rank is at least 1", hint="give a rank such as 16"
            )
        if not 0 <= self.keep < float("inf"):
            raise SettingError(
                f"`refine_keep` = {self.keep}: the weight of B's outputs must be 0 or more",
                hint="1 weighs them like those of the fine-tune, 0 keeps nothing",
            )

    @property
    def most(self) -> int:
        """The most steps."""
        return STEPS if self.steps is None else self.steps


@dataclass(frozen=True)
class RefinementRecord:
    """What a refinement did."""

    settings: RefinementSettings
    start: str
    """The start that was taken."""
    inputs: Sequence[str]
    """Descriptions of the inputs."""
    measure: str
    """What agreement means: ``"answers"``, the share of equal answers, ``"cosine"``, or `CHANGE`."""
    before: Mapping[str, float]
    """The agreement with the fine-tune before the first step, by kind of held-out inputs."""
    after: Mapping[str, float]
    """The same after the last step."""
    divergence: tuple[float, float]
    """The mean loss on all held-out inputs, before and after."""
    kept: float
    """The agreement with B itself on synthetic inputs, after the last step."""
    steps: int
    """The step whose state was kept."""
    share: float = 1.0
    """The share of the way from B to that state at which the output is."""

    def added_to(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metadata of an output with this record, and with all settings that a rerun needs."""
        settings = {**metadata["settings"], REFINEMENT: asdict(self.settings)}
        return {**metadata, "settings": settings, REFINEMENT: asdict(self)}


def refinement_settings(asked: TransportSettings) -> RefinementSettings | None:
    """Return the settings as users give them; None without ``refine``, where no setting of it is taken."""
    given = {name: getattr(asked, f"refine_{name}") for name in ("steps", "time", "rank", "keep", "batch")}
    given = {name: value for name, value in given.items() if value is not None}
    if asked.refine:
        if isinstance(given.get("time"), str):
            given["time"] = seconds(given["time"])
        if "time" in given:
            given.setdefault("steps", MANY)
        own = None if asked.calibrate is None else str(Path(asked.calibrate).resolve())
        return RefinementSettings(**given, calibrate=own, seed=asked.seed)
    names = [*(f"refine_{name}" for name in given), *(["answers"] if asked.answers is not None else [])]
    if names:
        raise SettingError(f"`{names[0]}`: nothing is refined", hint="add `refine`")
    return None


def describe_refinement(info: Mapping[str, Any] | None) -> str:
    """Return the record of a refinement as a sentence; nothing, if there is none."""
    if not info:
        return ""
    kinds = {"synthetic": "synthetic", "corrupted": "corrupted", "blended": "blended", "own": "your"}
    start = "B" if info["start"] == BASE else "B + α·π(τ)"
    agrees = info["measure"] == "answers"
    form, of = (".0%", "of") if agrees else (".2f", "on")
    changes = ", ".join(
        f"{info['before'][kind]:{form}} → {info['after'][kind]:{form}} {of} {name} inputs"
        for kind, name in kinds.items()
        if kind in info["before"]
    )
    if agrees:
        agreement = f"agrees with the fine-tune on {changes}; with B on {info['kept']:.0%}"
    else:
        what = "the fine-tune's change of outputs" if info["measure"] == CHANGE else "the fine-tune's outputs"
        agreement = f"cosine with {what} {changes}; with B's {info['kept']:.2f}"
    return f"refined from {start}, best after {info['steps']} steps: {agreement}"

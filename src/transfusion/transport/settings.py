"""The settings of `transport`, `merge` and `apply`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transfusion.errors import SettingError
from transfusion.matching.settings import MatchingSettings
from transfusion.runtime.progress import BARS, SILENT, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.settings import MODELS, A, B, argument, setting

if TYPE_CHECKING:
    import torch

    from transfusion.alignment.alignment import Alignment
    from transfusion.model.model import Model, Reference
    from transfusion.model.pair import ConfigArgument
    from transfusion.transport.alpha import AlphaArgument
    from transfusion.transport.finetunes import Finetune

DTYPES = ("float64", "float32", "float16", "bfloat16")
FATES = ("refuse", "keep", "drop")
HOWS = ("sum", "mean", "ties", "dare")
REFINING = "Refinement"


def counted_from_one(text: str) -> int:
    """Return the index of what is counted from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(f"{text!r} is not a number of 1 or more", hint="1 is the first fine-tune")
    return int(text) - 1


def seconds(text: str) -> float:
    """Return the seconds of a duration such as 90s, 10m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if found is None:
        raise SettingError(f"{text!r} is not a duration", hint="give 90s, 10m or 2h for example")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def numbers(text: str) -> tuple[float, ...]:
    """Return numbers with commas between them."""
    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise SettingError(f"{text!r} is not a list of numbers", hint="give 0.5,1,2 for example") from error


@dataclass(frozen=True, kw_only=True)
class MovingSettings(MatchingSettings):
    """What `transport` and `merge` have in common."""

    base: Model | Reference | None = setting(None, A, metavar="A")
    onto: Model | Reference | None = setting(None, B, metavar="B")
    output: str | Path | None = setting(
        None,
        "The folder, or single .safetensors file, to write. An interrupted run with the same output resumes.",
        kind=Path,
        flag="--output,-o",
        recorded=False,
    )
    via: Alignment | str | Path | None = setting(
        None, "π, or its file; without it, A and B are aligned first.", metavar="PI"
    )
    alpha: AlphaArgument | None = setting(
        None,
        "How much of the change to add: a number, a file with one number per layer, or auto: as much as"
        " changes B's outputs on synthetic inputs the way the fine-tune changed A's.",
        shown="1; less where a functional π would do harm",
    )
    full: bool = setting(False, "Of adapters: write the whole model, with the adapter in it.", kind=bool)
    repeat: str | Path | None = setting(
        None,
        "Repeat the run of this transfusion.json, or of this moved LoRA file.",
        kind=Path,
        flag="--from",
        recorded=False,
    )
    push: str | None = setting(
        None,
        "Then upload the output to this repository of the hub, which becomes a private one if it is new.",
        metavar="ORG/NAME",
        recorded=False,
    )
    dry_run: bool = setting(False, "Say what would be done, and do nothing.", kind=bool, recorded=False)
    force: bool = setting(False, "Replace an existing output.", kind=bool, recorded=False)
    dtype: torch.dtype | str | None = setting(
        None, f"The type to store: {', '.join(DTYPES)}.", choices=DTYPES, shown="B's", panel=MODELS
    )
    new_tokens: str = setting(
        "refuse", "Tokens that the fine-tune added.", choices=FATES, shown=True, panel=MODELS
    )
    other_parts: str = setting(
        "refuse",
        "Parts of a LoRA file that change another model than A, such as a text encoder.",
        choices=FATES,
        shown=True,
        panel=MODELS,
    )
    trust_base: bool = setting(
        False, "Do not check that the fine-tune descends from A.", kind=bool, panel=MODELS
    )


@dataclass(frozen=True)
class TransportSettings(MovingSettings):
    """The settings of `transport`."""

    finetuned: Finetune | Reference | None = setting(
        None, "The fine-tune of A: a model, a PEFT adapter, or a LoRA file.", metavar="FINETUNED"
    )
    _: KW_ONLY
    keep_support: float | None = setting(
        None,
        "Protect what B could do before: take a smaller α, so that B's outputs on synthetic inputs move by no"
        " more than this share of their own spread.",
        kind=float,
        shown="no bound",
    )
    refine: bool = setting(
        False,
        "Then train the result to answer like the fine-tune, on synthetic inputs and without data; of an"
        " adapter, only the adapter.",
        kind=bool,
    )
    refine_steps: int | None = setting(
        None,
        "The largest number of training steps.",
        kind=int,
        least=1,
        shown="1000 for images, 600 else",
        panel=REFINING,
    )
    refine_time: float | str | None = setting(
        None,
        "About how long the refinement may take: 90s, 10m or 2h; in Python also seconds. It sets the steps.",
        metavar="TIME",
        shown="no limit",
        panel=REFINING,
    )
    refine_rank: int | None = setting(
        None,
        "Leave B untouched, train a LoRA of this rank, and write it as an adapter.",
        kind=int,
        least=1,
        shown="all weights",
        panel=REFINING,
    )
    refine_keep: float | None = setting(
        None,
        "The weight of keeping B's own outputs, beside answering like the fine-tune.",
        kind=float,
        least=0,
        shown="0.3",
        panel=REFINING,
    )
    refine_batch: int | None = setting(
        None,
        "Of a language model, the texts of a step, for each process; of a LoRA for images or videos, the"
        " latents.",
        kind=int,
        least=1,
        shown="texts of 2,048 tokens, at most 16; 8 latents",
        panel=REFINING,
    )
    answers: str | Path | None = setting(
        None,
        "Of a language model, or a LoRA for images or videos: the fine-tune's answers, which ask wrote. With"
        " PI, a LoRA then needs no A.",
        kind=Path,
        metavar="FILE",
        panel=REFINING,
    )


@dataclass(frozen=True)
class MergeSettings(MovingSettings):
    """The settings of `merge`."""

    finetuned: Sequence[Finetune | Reference] = setting(
        (), "The fine-tunes of A: models, PEFT adapters or LoRA files.", metavar="FINETUNED…", many=True
    )
    _: KW_ONLY
    how: str = setting("sum", "How to combine them.", choices=HOWS, shown=True)
    weights: Sequence[float] = setting(
        (), "One for each fine-tune: 0.5,1,2.", parse=numbers, shown="all alike"
    )
    density: float | None = setting(
        None, "The share of each change that ties and dare keep.", kind=float, shown="0.2"
    )
    head: int | None = setting(
        None,
        "Keep the heads of this fine-tune, counted from 0 in Python and from 1 here.",
        parse=counted_from_one,
        metavar="NUMBER",
    )
    rank: int | None = setting(
        None, "Of adapters: the rank of the result.", kind=int, least=1, shown="the sum of theirs"
    )


@dataclass(frozen=True)
class AskSettings:
    """The settings of `ask`."""

    finetuned: Finetune | Reference = argument(
        "The fine-tune of A: a language model, or a PEFT adapter or LoRA file for one, or for a model of"
        " images or videos.",
        metavar="FINETUNED",
    )
    _: KW_ONLY
    base: Model | Reference = argument(A, metavar="A", flag="--base")
    output: str | Path | None = setting(
        None, "The .safetensors file to write.", kind=Path, flag="--output,-o"
    )
    calibrate: str | Path | None = setting(
        None, "Texts of your own to ask about, too, without labels.", kind=Path, shown="synthetic texts"
    )
    seed: int = setting(0, "The seed of everything that is drawn at random.", kind=int, least=0)
    force: bool = setting(False, "Replace an existing output.", kind=bool)
    config: ConfigArgument = setting(
        None, "The config.json of weights that come without one.", kind=Path, panel=MODELS
    )
    architecture: str | Path | None = setting(
        None, "A file with a table of your own.", kind=Path, panel=MODELS
    )
    resources: Resources = setting(LOCAL, "The device.", kind=Resources, only=("device",))
    progress: Progress = setting(SILENT, "Follows the run.", shown=BARS, typed=False)


@dataclass(frozen=True)
class ApplySettings:
    """The settings of `apply`."""

    via: Alignment | str | Path = argument("The file of π.", metavar="PI")
    a: Model | Reference = argument(A, metavar="A")
    _: KW_ONLY
    output: str | Path | None = setting(None, "The folder or file to write.", kind=Path, flag="--output,-o")
    force: bool = setting(False, "Replace an existing output.", kind=bool)
    config: ConfigArgument = setting(
        None, "The config.json of weights that come without one.", kind=Path, panel=MODELS
    )
    architecture: str | Path | None = setting(
        None, "A file with a table of your own.", kind=Path, panel=MODELS
    )
    resources: Resources = setting(
        LOCAL,
        "Threads and memory.",
        kind=Resources,
        only=("jobs", "memory"),
    )
    progress: Progress = setting(SILENT, "Follows the run.", shown=BARS, typed=False)

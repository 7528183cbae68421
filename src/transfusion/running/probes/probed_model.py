"""The model that probes are made for: its inputs, and the settings in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import exists
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from transfusion.model.model import Model
from transfusion.model.recognition import Number, Side, Sides
from transfusion.running.probes.inputs import flat_settings, in_dtype, random_inputs
from transfusion.runtime.untrusted_files import read_json, validate

BATCH = 32
WINDOW = 48
"""Tokens of a text, if the model has more positions than `NARROW`."""
NARROW = 80
"""A model with at most so many positions gets texts that fill them: its last position may be special."""
_SPECIAL = ("bos", "cls", "eos", "sep", "pad", "unk", "mask", "decoder_start")


@dataclass(frozen=True)
class Probes:
    """Batches of inputs by name, and a description."""

    batches: list[dict[str, Tensor]]
    about: str


class Preprocessor(TypedDict, total=False):
    """The settings of image preparation in a file."""

    do_resize: bool | None
    do_center_crop: bool | None
    do_rescale: bool | None
    do_normalize: bool | None
    size: Sides | dict[str, Side] | None
    crop_size: Sides | dict[str, Side] | None
    resample: int | None
    rescale_factor: Number | None
    image_mean: Number | list[Number] | None
    image_std: Number | list[Number] | None
    image_processor_type: str | None
    feature_extractor_type: str | None
    image_processor: dict[str, Any]


def one_by_one(run: Callable[[int], None], count: int) -> None:
    """Call ``run(number)`` for every number below ``count``."""
    for number in range(count):
        run(number)


@dataclass(frozen=True)
class ProbedModel:
    """A model, and its module in memory."""

    model: Model
    module: nn.Module
    each: Callable[[Callable[[int], None], int], None] = one_by_one
    """How several passes through the module are made."""
    tokens: int | None = None
    """Probes have only the first so many tokens, if other models that read them have no more."""
    natural: bool = False
    """Whether half of its images show photographs."""
    window: int | None = None
    """The tokens of a text where it is as long as the model's own texts, which may end within it."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings on one level, with the defaults of the library's configuration."""
        return flat_settings(self._whole)

    @property
    def _whole(self) -> Mapping[str, Any]:
        config: Any = getattr(self.module, "config", None)
        return config.to_dict() if hasattr(config, "to_dict") else config or self.model.config

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def folder(self) -> Path | None:
        """The folder with the model's tokenizer and image settings, if there is one."""
        root = self.model.checkpoint.root
        return root if root.is_dir() else self.model.checkpoint.auxiliary_folder

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder with the tokenizer whose ids the model reads: B's, if it is read in B's vocabulary."""
        return self.folder if self.model.vocabulary is None else self.model.vocabulary.folder

    def info(self, file: str) -> dict[str, Any]:
        """Read a file of JSON in the folder; empty, if there is none."""
        if self.folder is None or not exists(self.folder / file):
            return {}
        content = read_json(self.folder / file)
        for part in (content, content.get("image_processor")):
            if part is not None:
                validate(
                    part, Preprocessor, self.folder / file, hint="fetch the file that belongs to the model"
                )
        return content

    def template(
        self, batch: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Return random inputs, for their names and shapes."""
        return in_dtype(random_inputs(self.model.family, self._whole, batch=batch, seed=seed), dtype)

    def takes(self, kind: str) -> bool:
        return kind in self.model.family.inputs

    # ── text ─────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def vocabulary(self) -> int:
        """The size of the vocabulary."""
        found = vocabulary(self.module) if self.takes("tokens") or self.takes("spectrogram") else None
        known = found or int(self.settings.get("vocab_size", 49408))
        return known if self.tokens is None else min(known, self.tokens)

    def token(self, *names: str) -> int | None:
        """Return the first of these special tokens that the configuration names and the vocabulary holds."""
        first = (found[0] for name in names if (found := self._tokens(name)))
        return next((one for one in first if one not in self.unknown), None)

    def _tokens(self, name: str) -> list[int]:
        info = self.settings.get(f"{name}_token_id")
        ids = info if isinstance(info, list) else [info]
        return [one for one in ids if isinstance(one, int) and 0 <= one < self.vocabulary]

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end a text: chat models have several."""
        return [one for one in self._tokens("eos") if one not in self.unknown]

    @cached_property
    def unknown(self) -> frozenset[int]:
        """The tokens that only one of A and B has; no probe may have them."""
        if (found := self.model.vocabulary) is None:
            return frozenset()
        return found.unshared | frozenset(range(found.size, self.vocabulary))

    @cached_property
    def special(self) -> frozenset[int]:
        """The special tokens that the configuration names."""
        return frozenset(one for name in _SPECIAL for one in self._tokens(name))

    @cached_property
    def length(self) -> int:
        """The number of tokens of its probes."""
        room = self.positions
        if self.model.family.library == "open_clip" and room is not None:
            return room
        if self.window is not None:
            return self.window
        return room if room is not None and room <= NARROW else WINDOW

    @cached_property
    def positions(self) -> int | None:
        """The largest number of tokens of a text; None if it is not known."""
        if self.model.family.library == "open_clip":
            return int(self.settings.get("context_length", 77))
        names = ("max_target_positions", "max_position_embeddings", "n_positions")
        info = next((info for name in names if (info := self.settings.get(name) or 0) > 0), None)
        return None if info is None else int(info) - self._skipped_positions()

    def _skipped_positions(self) -> int:
        """Return how many positions are skipped: some models count from behind the padding token."""
        tables = [part for name, part in self.module.named_modules() if name.endswith("position_embeddings")]
        padding = [part.padding_idx for part in tables if isinstance(part, nn.Embedding)]
        return max((one + 1 for one in padding if one is not None), default=0)

    @property
    def writes(self) -> bool:
        """Whether the model continues texts and takes nothing else."""
        can = getattr(self.module, "can_generate", None)
        alone = self.model.family.inputs == ("tokens",) and not self.settings.get("is_encoder_decoder")
        return alone and callable(can) and bool(can())


def vocabulary(module: nn.Module) -> int | None:
    """Return the size of a module's vocabulary, if it reads tokens."""
    try:
        embeddings = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else None


def seeded_generator(seed: int, purpose: int) -> torch.Generator:
    """Return a generator of random numbers for one purpose."""
    return torch.Generator().manual_seed(1000 * seed + purpose)


def batched(inputs: Mapping[str, Tensor], size: int = BATCH) -> Iterator[dict[str, Tensor]]:
    """Iterate over the inputs in batches."""
    count = len(next(iter(inputs.values())))
    for start in range(0, count, size):
        yield {name: one[start : start + size] for name, one in inputs.items()}


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join batches of inputs; those of a name that one part lacks are left out."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts]) for name in names}

"""Adapters that are yet to be made, for B: in memory, or in the files that PEFT loads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.adapter import CONFIG
from transfusion.engines.means import HERE, Means
from transfusion.errors import AdapterError, OutputError
from transfusion.model import Model
from transfusion.transportation.account import Account
from transfusion.transportation.bounds import Bound
from transfusion.transportation.saved import Saved, nobody_watching
from transfusion.writer import Parcel, Workshop, write_json, write_shard, write_text

WEIGHTS = "adapter_model.safetensors"


class AdapterOutput(Saved):
    """An adapter that is made when it is asked for."""

    onto: Model
    dtype: torch.dtype | None
    account: Account

    @abstractmethod
    def tensors(self) -> Mapping[str, Callable[[], Tensor]]:
        """For every stored tensor, by its key, how to get it."""

    @abstractmethod
    def amounts(self) -> dict[str, int]:
        """How much there is to do, known from the headers alone, and the memory that it takes."""

    def plan(self, means: Means = HERE) -> dict[str, int]:
        """How much there is to do, and with how much memory."""
        return {**self.amounts(), **self.bound().as_dict(replace(means, engine="local", jobs=1))}

    def bound(self) -> Bound:
        """How much memory it takes; it is made on one thread."""
        return Bound(self.amounts()["memory"])

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The adapter's configuration, but for the base that it is for."""

    @abstractmethod
    def story(self) -> dict[str, Any]:
        """What was done."""

    def config(self) -> dict[str, Any]:
        """The adapter's configuration: for B."""
        reference, _, revision = self.onto.label.partition("@")
        local = Path(self.onto.label).expanduser()
        return {
            **self.settings(),
            "base_model_name_or_path": str(local.resolve()) if local.exists() else reference,
            "revision": None if local.exists() else revision or None,
        }

    def module(self) -> Any:
        """Refused: an adapter is no module."""
        raise AdapterError(
            "an adapter is no module of its own",
            hint="full=True makes a model of it; or save it, and load it with PEFT on B",
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The adapter in memory, under its keys."""
        return {key: get() for key, get in self.tensors().items()}

    def write(
        self,
        shop: Workshop,
        on_tensor: Callable[[str], None] = nobody_watching,
        means: Means = HERE,
    ) -> None:
        """Write the adapter in a workshop; it is too small to share the work out."""
        self.bound().require(replace(means, engine="local"))
        if shop.path.suffix == ".safetensors":
            raise OutputError(
                f"{shop.path}: an adapter is a folder with a configuration beside its weights",
                hint="give a name without .safetensors",
            )
        shop.begin()
        made: dict[str, Parcel] = {}
        for key, get in self.tensors().items():
            on_tensor(key)
            made[key] = Parcel.of(get())
        shop.planned = {key: (parcel.shape, parcel.dtype) for key, parcel in made.items()}
        digest = write_shard(shop.output / WEIGHTS, made)
        write_json(shop.output / CONFIG, self.config())
        for name, text in self.account.texts({**self.story(), "files": {WEIGHTS: digest}}).items():
            write_text(shop.output / name, text)

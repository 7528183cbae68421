"""Adapters that are yet to be made, for B: in memory, or in the files that PEFT loads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.checkpoint.publishing import write_json, write_text
from transfusion.checkpoint.shard_writer import LazyTensor, write_shard
from transfusion.checkpoint.staging import StagingFolder
from transfusion.errors import AdapterError, OutputError
from transfusion.model.model import Model
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transportation.adapters.adapter import CONFIG
from transfusion.transportation.output_memory import OutputMemory
from transfusion.transportation.output_record import OutputRecord
from transfusion.transportation.saved_output import SavedOutput, ignore_tensor

WEIGHTS = "adapter_model.safetensors"


class AdapterOutput(SavedOutput):
    """An adapter that is made when it is asked for."""

    onto: Model
    dtype: torch.dtype | None
    output_record: OutputRecord

    @abstractmethod
    def tensors(self) -> Mapping[str, Callable[[], Tensor]]:
        """For every stored tensor, by its key, how to get it."""

    @abstractmethod
    def amounts(self) -> dict[str, int]:
        """How much there is to do, known from the headers alone, and the memory that it takes."""

    def plan(self, resources: Resources = LOCAL) -> dict[str, int]:
        """How much there is to do, and with how much memory."""
        return {**self.amounts(), **self.bound().as_dict(replace(resources, engine="local", jobs=1))}

    def bound(self) -> OutputMemory:
        """How much memory it takes; it is made on one thread."""
        return OutputMemory(self.amounts()["memory"])

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The adapter's configuration, but for the base that it is for."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
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
        staging: StagingFolder,
        on_tensor: Callable[[str], None] = ignore_tensor,
        resources: Resources = LOCAL,
    ) -> None:
        """Write the adapter in a workshop; it is too small to share the work out."""
        self.bound().require(replace(resources, engine="local"))
        if staging.path.suffix == ".safetensors":
            raise OutputError(
                f"{staging.path}: an adapter is a folder with a configuration beside its weights",
                hint="give a name without .safetensors",
            )
        staging.begin()
        made: dict[str, LazyTensor] = {}
        for key, get in self.tensors().items():
            on_tensor(key)
            made[key] = LazyTensor.of(get())
        staging.planned = {key: (lazy_tensor.shape, lazy_tensor.dtype) for key, lazy_tensor in made.items()}
        digest = write_shard(staging.output / WEIGHTS, made)
        write_json(staging.output / CONFIG, self.config())
        for name, text in self.output_record.texts({**self.metadata(), "files": {WEIGHTS: digest}}).items():
            write_text(staging.output / name, text)

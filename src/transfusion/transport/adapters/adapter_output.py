"""Adapters computed on demand, in memory or in the files that they are loaded from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.errors import AdapterError, OutputError
from transfusion.files.staging import StagingFolder
from transfusion.files.tensor_content import all_finite
from transfusion.model.model import Model
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transport.adapters.adapter_files import AdapterFiles, PeftFiles
from transfusion.transport.output_record import OutputRecord
from transfusion.transport.saved_output import SavedOutput, ignore_tensor


class AdapterOutput(SavedOutput):
    """An adapter whose tensors are computed on demand."""

    onto: Model
    dtype: torch.dtype | None
    output_record: OutputRecord

    @property
    def files(self) -> AdapterFiles:
        """How the adapter is stored."""
        return PeftFiles()

    @property
    @abstractmethod
    def pi(self) -> Alignment:
        """The alignment that it was moved by."""

    @property
    def unsaved_pi(self) -> Alignment | None:
        return self.pi if self.output_record.keeps_pi else None

    @abstractmethod
    def tensors(self) -> Mapping[str, Callable[[], Tensor]]:
        """Return, for the key of every stored tensor, the function that computes it."""

    @abstractmethod
    def amounts(self) -> dict[str, int]:
        """Return counts of tensors, and bytes to read and write, from headers alone."""

    def plan(self) -> dict[str, int]:
        """Return counts of tensors, and bytes to read and write, from headers alone."""
        return self.amounts()

    def within_memory(self, resources: Resources) -> Resources:
        """Refuse a memory that is too small for the adapter, which is computed whole, on one thread."""
        return resources.within_memory(3 * self.amounts()["bytes_to_write"], "the adapter")

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the adapter's configuration without its base."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Return the run record."""

    def config(self) -> dict[str, Any]:
        """Return the adapter's configuration, with B as its base: as the user named it, as PEFT does."""
        reference, _, revision = self.onto.label.partition("@")
        local = Path(self.onto.label).expanduser()
        return {
            **self.settings(),
            "base_model_name_or_path": str(local) if local.exists() else reference,
            "revision": None if local.exists() else revision or None,
        }

    def module(self) -> Any:
        """Refuse: an adapter is not a module."""
        raise AdapterError(
            "an adapter is not a module",
            hint="full=True returns a model; or save the adapter, and load it on B with PEFT",
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Compute the adapter in memory, under its keys."""
        return {key: get() for key, get in self.tensors().items()}

    def write(
        self,
        staging: StagingFolder,
        on_tensor: Callable[[str], None] = ignore_tensor,
        resources: Resources = LOCAL,
    ) -> None:
        """Write the adapter into a staging folder, on one thread."""
        self.within_memory(replace(resources, engine="local"))
        self.files.require_path(staging.path)
        staging.begin()
        made: dict[str, Tensor] = {}
        for key, get in self.tensors().items():
            on_tensor(key)
            made[key] = tensor = get()
            if tensor.is_floating_point() and not all_finite(tensor):
                raise OutputError(
                    f"{key} has values that {str(tensor.dtype).removeprefix('torch.')} cannot hold",
                    hint="choose a wider `dtype`, or a smaller `alpha`",
                )
        staging.planned = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in made.items()}
        self.files.write(staging, made, self)

"""An adapter on its way from A to B; it stays an adapter of the same rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.adapter import CONFIG, Adapter, Factor
from transfusion.alignment import Alignment
from transfusion.errors import OutputError
from transfusion.model import Model
from transfusion.task_vector import working
from transfusion.transportation.story import nobody_watching, story_of
from transfusion.writer import staged_folder, write_json, write_shard


@dataclass
class AdapterTransport:
    """A LoRA adapter, moved factor by factor when asked for."""

    adapter: Adapter
    base: Model
    onto: Model
    alignment: Alignment
    alpha: float = 1.0
    dtype: torch.dtype | None = None

    @cached_property
    def factors(self) -> list[Factor]:
        return self.adapter.factors(self.base)

    def plan(self) -> dict[str, int]:
        """How much there is to do, known from the headers alone."""
        infos = [self.adapter.checkpoint.tensors[factor.key] for factor in self.factors]
        return {
            "tensors": len(infos),
            "moved": sum(not factor.whole for factor in self.factors),
            "carried": sum(factor.whole for factor in self.factors),
            "bytes": sum(info.nbytes for info in infos),
        }

    def tensor(self, factor: Factor) -> Tensor:
        """One tensor of the adapter, moved."""
        stored = self.adapter.read(factor.key)
        result = working(stored)
        if factor.whole:
            result = self._whole(factor, result)
        else:
            result = self.alignment.move(result, factor.layout)
            if factor.scaled:
                result = result * self.alpha
        return result.to(self.dtype or stored.dtype).contiguous()

    def _whole(self, factor: Factor, trained: Tensor) -> Tensor:
        """A tensor that was trained as a whole: its change moves, as in a dense task vector."""
        name = factor.tensor
        in_both = all(
            name in model.architecture.tensors and model.info(name).shape == tuple(trained.shape)
            for model in (self.base, self.onto)
        )
        if not in_both:
            return self.alignment.move(trained, factor.layout)
        difference = trained - working(self.base.read(name))
        return working(self.onto.read(name)) + self.alpha * self.alignment.move(difference, factor.layout)

    def state_dict(self) -> dict[str, Tensor]:
        """The moved adapter, under its own keys."""
        return {factor.key: self.tensor(factor) for factor in self.factors}

    def config(self) -> dict[str, Any]:
        """The adapter's configuration, changed only in the base that it is for."""
        reference, _, revision = self.onto.label.partition("@")
        local = Path(self.onto.label).expanduser()
        return {
            **self.adapter.config,
            "base_model_name_or_path": str(local.resolve()) if local.exists() else reference,
            "revision": None if local.exists() else revision or None,
        }

    def save(
        self, path: str | Path, *, force: bool = False, on_tensor: Callable[[str], None] = nobody_watching
    ) -> Path:
        """Write an adapter folder that PEFT loads on B."""
        path = Path(path)
        if path.suffix == ".safetensors":
            raise OutputError(
                f"{path}: an adapter is a folder with a configuration beside its weights",
                hint="give a name without .safetensors",
            )
        with staged_folder(path, force=force) as staged:
            tensors: dict[str, Tensor] = {}
            for factor in self.factors:
                on_tensor(factor.key)
                tensors[factor.key] = self.tensor(factor)
            write_shard(staged / "adapter_model.safetensors", tensors)
            write_json(staged / CONFIG, self.config())
            write_json(staged / "transfusion.json", self.story())
        return path

    def story(self) -> dict[str, Any]:
        return {
            **story_of(self.adapter.label, self.base, self.onto, self.alignment, self.alpha),
            "moved": sum(not factor.whole for factor in self.factors),
            "carried": sorted(factor.tensor for factor in self.factors if factor.whole),
        }

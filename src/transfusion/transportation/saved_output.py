"""What every output has in common: it is written in a workshop, and appears whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from transfusion.checkpoint.staging import StagingFolder, open_staging
from transfusion.runtime.resources import LOCAL, Resources


def ignore_tensor(name: str) -> None:
    """The default for those who want to hear of every tensor."""


class SavedOutput(ABC):
    """Something that is made when it is asked for, and can be kept in files."""

    @property
    def notes(self) -> list[str]:
        """What the user should know, and is no reason to refuse anything."""
        return []

    @abstractmethod
    def write(
        self,
        staging: StagingFolder,
        on_tensor: Callable[[str], None] = ignore_tensor,
        resources: Resources = LOCAL,
    ) -> None:
        """Write the output in a workshop, by the given means."""

    def save(
        self,
        path: str | Path,
        *,
        force: bool = False,
        jobs: int | None = None,
        engine: str = "local",
        address: str | None = None,
        memory: int | None = None,
        on_tensor: Callable[[str], None] = ignore_tensor,
    ) -> Path:
        """Write the output; all of it or nothing.

        A model whose path ends in ``.safetensors`` becomes that single file. What an interrupted run of the
        same inputs and settings had finished is taken over.

        ``jobs`` is the number of threads; with ``engine="ray"``, of worker processes, which write the files
        of a model side by side, on the cluster at ``address`` or on one that is started here. ``memory`` is
        how many bytes this process, or each worker, may take. None of them changes what is written.
        """
        with open_staging(Path(path), force=force) as staging:
            self.write(staging, on_tensor, Resources(engine, jobs, address, memory))
        return Path(path)

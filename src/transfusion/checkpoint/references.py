"""Resolve references to models.

A reference is an existing path, or else a hub id: ``org/name`` or ``org/name@revision``.
"""

from __future__ import annotations

import re
from pathlib import Path

from transfusion.errors import CheckpointError

PICKLES = {".bin", ".pt", ".pth", ".ckpt"}

_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*(/[\w][\w.-]*)?)(@(?P<revision>[\w][\w./-]*))?")


def resolve(reference: str | Path) -> Path:
    """Return the path of a reference; download a hub id, unless a path of that name exists."""
    if not str(reference):
        raise CheckpointError("the name of a model is empty", hint="give a path or a hub id")
    try:
        path = Path(reference).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{reference}: the path cannot be read ({getattr(error, 'strerror', None) or error})",
            hint="give a path that exists, or a hub id such as org/name or org/name@revision",
        ) from error
    match = _HUB_ID.fullmatch(str(reference))
    if match is None or path.suffix in PICKLES | {".safetensors", ".json"}:
        raise CheckpointError(
            f"{reference}: no such file or folder",
            hint="give a path that exists, or a hub id such as org/name or org/name@revision",
        )
    return _fetch(str(reference), match["repo"], match["revision"])


def _fetch(reference: str, repo: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def snapshot(patterns: list[str]) -> Path:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))

    beside = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = snapshot([*beside, "*.safetensors"])
        if not any(folder.glob("*.safetensors")):
            folder = snapshot([*beside, "*.bin"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{reference}: no such file or folder here, and the hub could not provide it ({reason})",
            hint="check the spelling, the network and your access, or give a local path",
        ) from error
    return folder

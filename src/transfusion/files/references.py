"""Resolve references to models.

A reference is an existing path, or else a hub id: ``org/name`` or ``org/name@revision``. Of a pipeline of
diffusers, the model that denoises is meant; ``org/name/transformer`` fetches nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path

from transfusion.errors import CheckpointError
from transfusion.runtime.untrusted_files import path_inside

PICKLES = {".bin", ".pt", ".pth", ".ckpt"}

DENOISERS = ("transformer", "transformer_2", "unet")
"""The folders of the models in a pipeline that denoise."""
_HUB_ID = re.compile(
    rf"(?P<repo>[\w][\w.-]*(/[\w][\w.-]*?)?)(/(?P<part>{'|'.join(DENOISERS)}))?(@(?P<revision>[\w][\w./-]*))?"
)


def resolve(reference: str | Path) -> Path:
    """Return the path of a reference; download a hub id, unless a path of that name exists."""
    if not str(reference):
        raise CheckpointError("the name of a model is empty", hint="give a path or a hub id")
    try:
        path = Path(reference).expanduser()
        if path.exists():
            return _denoiser(path)
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
    folder = _fetch(str(reference), match["repo"], match["revision"], match["part"])
    return _denoiser(folder) if match["part"] is None else path_inside(folder, folder / match["part"])


def _denoiser(root: Path) -> Path:
    """Return the folder of the model that denoises, if the root is a pipeline of diffusers."""
    if not (root / "model_index.json").is_file() or (root / "config.json").exists():
        return root
    found = [root / name for name in DENOISERS if (root / name / "config.json").is_file()]
    if len(found) != 1:
        held = " and ".join(part.name for part in found) or "none of " + ", ".join(DENOISERS)
        raise CheckpointError(
            f"{root}: a pipeline, with {held}",
            hint=f"give the folder of one model, such as {root / (found[0].name if found else DENOISERS[0])}",
        )
    return path_inside(root, found[0])


def _fetch(reference: str, repo: str, revision: str | None, part: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def snapshot(patterns: list[str]) -> Path:
        within = [f"{part}/{pattern}" for pattern in patterns] if part else patterns
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=within))

    beside = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = snapshot([*beside, "*.safetensors"])
        if not any(folder.rglob("*.safetensors")):
            folder = snapshot([*beside, "*.bin"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        offline = isinstance(error, LocalEntryNotFoundError)
        text = "it cannot be reached" if offline else str(error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        raise CheckpointError(
            f"{reference}: no such file or folder here, and the hub could not provide it ({reason})",
            hint="check the spelling, the network and your access, or give a local path",
        ) from error
    return folder

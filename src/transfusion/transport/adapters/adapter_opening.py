"""Opening adapters: a folder of PEFT, or a LoRA file as programs for images and videos write it."""

from __future__ import annotations

from pathlib import Path

from transfusion.errors import CheckpointError
from transfusion.files.checkpoint import CONFIGS
from transfusion.files.lora_keys import is_lora
from transfusion.files.references import PICKLES, resolve
from transfusion.files.tensor_files import headers
from transfusion.runtime.untrusted_files import require_closed
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.adapter_config import CONFIG
from transfusion.transport.adapters.lora_file import LoraFile, OtherParts

_FILES = PICKLES | {".safetensors"}
_DIFFUSERS = "pytorch_lora_weights"
"""The name of the file that diffusers writes, without its ending."""
_PEFT = "base_model.model."


def is_adapter(reference: str | Path) -> bool:
    """Whether a reference is an adapter's folder, local or on the hub, or a LoRA file."""
    root = resolve(reference)
    return (root / CONFIG).exists() or lora_file_in(root) is not None


def open_adapter(
    reference: str | Path, others: OtherParts | str = OtherParts.REFUSE, *, exact: bool = False
) -> Adapter:
    """Read the headers of an adapter; refuse kinds that cannot be moved.

    ``others`` says what becomes of the parts of a LoRA file that belong to another model than the base. A
    LoKr becomes a LoRA: of full rank if ``exact``.
    """
    root = resolve(reference)
    file = None if (root / CONFIG).exists() else lora_file_in(root)
    if file is None:
        return Adapter.open(reference, exact=exact)
    return LoraFile.of_file(str(reference), root, file, OtherParts(others), exact=exact)


def is_lora_file(reference: str | Path) -> bool:
    """Whether a reference is a LoRA file, or a folder that holds one and no configuration."""
    root = resolve(reference)
    return not (root / CONFIG).exists() and lora_file_in(root) is not None


def lora_file_in(root: Path) -> Path | None:
    """Return the LoRA file that a path is, or that its folder holds; None if there is none."""
    file = root if root.is_file() else _only_file(root) if root.is_dir() else None
    if file is None or file.suffix not in _FILES:
        return None
    try:
        names = headers(file)
    except CheckpointError:
        return None  # opened as a model, it is refused with the reason
    return file if is_lora(names) and not any(name.startswith(_PEFT) for name in names) else None


def _only_file(folder: Path) -> Path | None:
    """Return the file of diffusers, or the only file with weights in a folder that is no model's."""
    if any((folder / name).exists() for name in CONFIGS):
        return None
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _FILES]
    named = [path for path in files if path.stem == _DIFFUSERS]
    if named or len(files) == 1:
        require_closed(folder)
        return (named or files)[0]
    return None

"""Everything that the verbs are run on, of one size: two bases, fine-tunes, an adapter, and π.

A and B are drawn apart. The fine-tunes of A are A with noise; the second one is also the related B, since a
base that was trained on from A is just that. Ten folders of fine-tunes are hard links of two.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from functional.models import add_tokenizer
from growth.llamas import Size, drawn, pair, write_model
from transfusion.files.publishing import write_json

NOISE = 0.1
"""The size of a fine-tune's change, relative to the weights."""
MERGED = 10
"""Fine-tunes that are merged."""
RANK = 8
COPIES = 6
"""Models of a size that are on the disk at the same time: A, B, two fine-tunes, an output, and π."""


@dataclass(frozen=True)
class Made:
    """The folders and files of one size."""

    size: Size
    a: Path
    b: Path
    tuned: Path
    related: Path
    adapter: Path
    pi: Path
    merged: tuple[Path, ...]


def make(folder: Path, size: Size) -> Made:
    """Make what is not there yet."""
    require_space(folder, size)
    a, b = pair(folder, size, related=False)
    tuned, related = (_finetune(folder / f"{size.name}-{name}", size) for name in ("tuned", "related"))
    for place in (a, b, tuned, related):
        add_tokenizer(place, size.vocabulary)
    adapter, pi = _adapter(folder / f"{size.name}-lora", a, size), folder / f"{size.name}-pi.safetensors"
    if not pi.exists():
        command = [sys.executable, "-m", "transfusion", "align", a, b, "-o", pi, "--method", "random", "-q"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
    merged = tuple(
        _linked((tuned, related)[number % 2], folder / f"{size.name}-merged-{number}")
        for number in range(MERGED)
    )
    return Made(size, a, b, tuned, related, adapter, pi, merged)


def remove(folder: Path, size: Size) -> None:
    """Remove all models of a size."""
    for place in folder.glob(f"{size.name}-*"):
        shutil.rmtree(place) if place.is_dir() else place.unlink()


def require_space(folder: Path, size: Size) -> None:
    """Refuse to begin where the disk has no room."""
    folder.mkdir(parents=True, exist_ok=True)
    there = sum(file.stat().st_size for file in folder.glob(f"{size.name}-*/*.safetensors"))
    needed, free = COPIES * 2 * size.parameters, shutil.disk_usage(folder).free
    if free + there < needed:
        raise SystemExit(f"{folder}: {size.name} needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")


def _finetune(folder: Path, size: Size) -> Path:
    """A with noise on every matrix, in proportion to its weights."""
    if not (folder / "config.json").exists():
        write_model(folder, size, partial(_changed, folder.name))
    return folder


def _changed(who: str, name: str, shape: tuple[int, ...]) -> Tensor:
    base = drawn("a", name, shape)
    return base if len(shape) == 1 else base + NOISE * drawn(who, name, shape)


def _adapter(folder: Path, base: Path, size: Size) -> Path:
    """A LoRA on all linear modules of all layers, as PEFT saves it."""
    if (folder / "adapter_config.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    modules = [
        (name.removesuffix(".weight"), shape)
        for name, shape in size.shapes().items()
        if len(shape) == 2 and size.vocabulary not in shape
    ]
    tensors = {}
    for name, (rows, columns) in modules:
        kept = f"base_model.model.{name}"
        tensors[f"{kept}.lora_A.weight"] = drawn("lora A", name, (RANK, columns))
        tensors[f"{kept}.lora_B.weight"] = NOISE * drawn("lora B", name, (rows, RANK))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name, _ in modules})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    config = {**settings, "target_modules": targets, "base_model_name_or_path": str(base)}
    write_json(folder / "adapter_config.json", config)
    return folder


def _linked(origin: Path, folder: Path) -> Path:
    """A folder with the files of another one."""
    folder.mkdir(exist_ok=True)
    for file in origin.iterdir():
        if not (folder / file.name).exists():
            os.link(file, folder / file.name)
    return folder

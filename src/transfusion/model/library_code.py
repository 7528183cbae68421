"""Which settings of a configuration a library reads: those whose names are in its code for the model.

Configurations of others have keys of training programs, of older releases and of their authors. If no line
of the code that builds and runs a model has the name of a key, nothing that the model computes depends on it.
The code is searched as text; nothing of it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SHARED = (
    *("modeling_*.py", "masking_utils.py", "activations.py", "pytorch_utils.py", "cache_utils.py"),
    *("backbone_utils.py", "configuration_utils.py", "integrations/*attention*.py", "integrations/moe.py"),
)
"""The files of transformers that all its models use."""
_WORD = re.compile(r"[A-Za-z_]\w*")


def is_unread(key: str, library: str, name: str) -> bool:
    """Whether no code of the library for a model names a key; not if its code is not known.

    ``name`` is the model_type of transformers, or the class of diffusers.
    """
    words = _words(library, name)
    return words is not None and key not in words


@cache
def _words(library: str, name: str) -> frozenset[str] | None:
    """Return every word in a library's code for a model."""
    found = find_spec(library) if library in ("transformers", "diffusers") else None
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(found.submodule_search_locations[0])
    own = list(_of_transformers(root, name) if library == "transformers" else _of_diffusers(root, name))
    shared = [file for pattern in _SHARED for file in root.glob(pattern)]
    if not own:
        return None
    return frozenset(word for file in (*own, *shared) for word in _WORD.findall(_text(file)))


def _of_transformers(root: Path, name: str) -> Iterator[Path]:
    """Yield the files of the folder whose configuration has this model_type."""
    states = re.compile(rf'model_type\s*(?::\s*\w+\s*)?=\s*"{re.escape(name)}"')
    likely = root / "models" / name.replace("-", "_")
    folders = [likely, *sorted((root / "models").iterdir())]
    for folder in folders:
        if any(states.search(_text(file)) for file in folder.glob("configuration_*.py")):
            yield from (*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py"))
            return


def _of_diffusers(root: Path, name: str) -> Iterator[Path]:
    """Yield the file that defines a class."""
    defines = re.compile(rf"^class {re.escape(name)}\(", re.MULTILINE)
    return (file for file in sorted((root / "models").rglob("*.py")) if defines.search(_text(file)))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")

"""Import optional libraries where they are needed, with a hint where one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transfusion.errors import LibraryError

DISTRIBUTION = "transfusion-rebasin"
"""The name of this package for pip. The name ``transfusion`` belongs to another project on PyPI."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_library(name: str, extra: str | None = None) -> Any:
    """Import an optional library. Refuse with a hint how to install it where it is missing.

    ``extra`` is the extra of this package that installs the library; by default it has the library's name.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise LibraryError(
            f"this needs {name}, which cannot be imported ({error})",
            hint=install_hint(extra or name.replace("_", "-")),
        ) from error

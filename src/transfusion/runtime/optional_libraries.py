"""Optional libraries: imported on use, with a hint if one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transfusion.errors import LibraryError


def require_library(name: str, extra: str | None = None) -> Any:
    """Import an optional library, or say how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        extra = extra or name.replace("_", "-")
        raise LibraryError(
            f"this needs {name}, which cannot be imported ({error})",
            hint=f"pip install 'transfusion[{extra}]'",
        ) from error

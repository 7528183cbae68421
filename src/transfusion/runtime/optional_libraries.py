"""Libraries that are optional: imported when they are needed, with a hint where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transfusion.errors import LibraryError


def require_library(name: str, extra: str | None = None) -> Any:
    """An optional library, or a hint how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        extra = extra or name.replace("_", "-")
        raise LibraryError(
            f"this needs {name}, which cannot be imported ({error})",
            hint=f"pip install 'transfusion[{extra}]'",
        ) from error

"""Import optional libraries where they are needed, with a hint where one is missing."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from transfusion.errors import LibraryError

DISTRIBUTION = "transfusion-rebasin"
"""The name of this package for pip. The name ``transfusion`` belongs to another project on PyPI."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this package, from where the package came from."""
    return f"pip install '{DISTRIBUTION}[{extra}]{_source()}'"


def _source() -> str:
    """Return the folder that this package was installed from, as pip reads it; nothing if it was an index."""
    try:
        told = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ""
    is_folder = "dir_info" in told and not told["dir_info"].get("editable")
    return f" @ {told['url']}" if is_folder else ""


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

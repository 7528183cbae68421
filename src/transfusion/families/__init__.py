"""The tables, one file per family. A file in this folder that defines ``FAMILIES`` is registered.

An installed package may add modules with ``FAMILIES`` under the entry point
``transfusion.families``, and `register_file` adds a single file.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from transfusion.architecture.table import Component, Config, Family
from transfusion.errors import ArchitectureError
from transfusion.families._shared import HARMLESS, NO_CONFIG

__all__ = ["ENTRY_POINT", "HARMLESS", "NO_CONFIG", "all_families", "family_of_component", "register_file"]

ENTRY_POINT = "transfusion.families"
_registered: list[Family] = []


def all_families() -> tuple[Family, ...]:
    """Return every family; later registrations come first, and so may replace built-in families."""
    return (*reversed(_registered), *_installed())


def family_of_component(component: Component, section: Config, name: str) -> Family:
    """Return the family of a part of a model, by the section of the configuration that describes the part."""
    if component.family is not None:
        return component.family
    kind = section.get("model_type", component.model_type)
    found = next((family for family in all_families() if kind in family.model_types), None)
    if found is None:
        raise ArchitectureError(
            f"{name} is of the kind {kind!r:.60}, which is not supported",
            hint="'transfusion inspect MODEL --propose' drafts a table for a model of that kind alone",
        )
    return found


@cache
def _installed() -> tuple[Family, ...]:
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    ours = [import_module(f"{__name__}.{name}") for name in names if not name.startswith("_")]
    theirs = [point.load() for point in entry_points(group=ENTRY_POINT)]
    return tuple(family for module in (*theirs, *ours) for family in module.FAMILIES)


def register_file(file: str | Path) -> ModuleType:
    """Run a file of Python that defines ``FAMILIES``, and use its tables from now on."""
    path = Path(file)
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ArchitectureError(f"{path}: not a file of Python", hint="give a .py file that defines FAMILIES")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ArchitectureError(
            f"{path}: running it failed ({type(error).__name__}: {error})",
            hint="set TRANSFUSION_DEBUG=1 for the traceback",
        ) from error
    found = getattr(module, "FAMILIES", None)
    if not found or not all(isinstance(family, Family) for family in found):
        raise ArchitectureError(
            f"{path}: it defines no FAMILIES",
            hint="end the file with FAMILIES = (Family(...),); docs/your-own.md has an example",
        )
    _registered.extend(family for family in found if family not in _registered)
    return module

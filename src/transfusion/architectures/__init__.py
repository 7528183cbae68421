"""The tables, one file per family. A file that is here and defines ``FAMILIES`` is registered."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from transfusion.tables import Family


@cache
def families() -> tuple[Family, ...]:
    """Every family, in the order of the files' names."""
    modules = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return tuple(
        family
        for name in modules
        if not name.startswith("_")
        for family in import_module(f"{__name__}.{name}").FAMILIES
    )

"""The tables: text in ``*.family`` files, and functions of Python where text cannot say it.

An installed package may add modules with ``FAMILIES`` under the entry point ``transfusion.families``, and
`register_file` adds a single file, of text or of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from transfusion.architecture.family_library import Library
from transfusion.architecture.table import Component, Config, Family
from transfusion.errors import ArchitectureError
from transfusion.families import functions, inputs, unet
from transfusion.runtime.untrusted_files import read_text

ENTRY_POINT = "transfusion.families"
SUFFIX = ".family"
_registered: list[Family] = []
_files: dict[Path, tuple[int, ModuleType]] = {}
"""Files that were read, by path: when each was written, and its tables."""


def all_families() -> tuple[Family, ...]:
    """Return every family; later registrations come first, and so may replace built-in families."""
    return (*reversed(_registered), *_installed())


def family_of_component(component: Component, section: Config, name: str) -> Family:
    """Return the family of a part of a model, by the section of the configuration that describes the part.

    A whole model that is another one as this part has a family of its own, such as ``trocr-decoder``.
    """
    if component.family is not None:
        return component.family
    kind = section.get("model_type", component.model_type)
    if component.whole and (own := f"{kind}-{name}") in library()[0].own:
        return library()[0].family(own)
    found = next((family for family in all_families() if kind in family.model_types), None)
    if found is None:
        raise ArchitectureError(
            f"{name} is of the kind {kind!r:.60}, which is not supported",
            hint="'transfusion inspect MODEL --propose' drafts a table for a model of that kind alone",
        )
    return found


def with_whole_parts(family: Family, config: Config) -> Family:
    """Return a family with those of its parts that are whole models, as a configuration names them."""
    whole = {
        component.prefix: family_of_component(component, config.get(section) or {}, section)
        for section, component in family.components.items()
        if component.whole
    }
    return replace(family, whole_parts=whole) if whole else family


@cache
def library() -> tuple[Library, tuple[Family, ...]]:
    """Return what the texts of this folder define, and their families."""
    called = {
        name: one
        for module in (functions, inputs, unet)
        for name, one in vars(module).items()
        if callable(one) and getattr(one, "__module__", "") == module.__name__
    }
    read = Library(called, family_of_component)
    files = sorted(Path(__file__).parent.glob(f"*{SUFFIX}"), key=lambda file: (file.stem != "common", file))
    names = [name for file in files for name in read.read(file.read_text(encoding="utf-8"), file.name)]
    return read, read.families(names)


@cache
def _installed() -> tuple[Family, ...]:
    theirs = [point.load() for point in entry_points(group=ENTRY_POINT)]
    return (*(family for module in theirs for family in module.FAMILIES), *library()[1])


def known_keys(name: str) -> frozenset[str]:
    """Return a list of keys that the texts name, such as ``harmless``."""
    return library()[0].keys[name]


def read_families(
    text: str,
    file: str,
    *,
    build: Callable[[Config], Any] | None = None,
    make_inputs: Callable[[Config, int, Any], Mapping[str, Any]] | None = None,
) -> tuple[Family, ...]:
    """Return the families of a text, which may refer to all that the texts of this folder define.

    ``build`` returns the module of a configuration, so that models of these families can be run, and
    ``make_inputs`` some inputs for it, by name: it gets the configuration, their number and a random
    generator of torch.
    """
    own = library()[0].extended()
    found = own.families(own.read(text, file))
    return tuple(replace(family, build=build, make_inputs=make_inputs) for family in found)


def register_file(file: str | Path) -> ModuleType:
    """Use the tables of a text from now on, or those of a file of Python that defines ``FAMILIES``.

    >>> transfusion.register_file("mine.py").FAMILIES[0].name
    'tiny_talker'
    """
    path = Path(file).resolve()
    if path not in _files or not path.exists() or _files[path][0] != path.stat().st_mtime_ns:
        module = ModuleType(path.stem) if path.suffix == SUFFIX else python_module(path)
        if path.suffix == SUFFIX:
            module.FAMILIES = read_families(read_text(path, ArchitectureError), str(file))  # type: ignore[attr-defined]
        found = getattr(module, "FAMILIES", None)
        if not found or not all(isinstance(family, Family) for family in found):
            raise ArchitectureError(
                f"{file}: it defines no FAMILIES",
                hint="docs/your-own.md has an example of a text, and of a file of Python",
            )
        _files[path] = path.stat().st_mtime_ns, module
    _, module = _files[path]
    _registered.extend(family for family in module.FAMILIES if family not in _registered)
    return module


def python_module(path: Path) -> ModuleType:
    """Run a file of Python of the user's own, and return what it defines."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ArchitectureError(
            f"{path}: not a file of Python", hint=f"give a {SUFFIX} text, or a .py file that defines FAMILIES"
        )
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ArchitectureError(
            f"{path}: running it failed ({type(error).__name__}: {error})",
            hint="set TRANSFUSION_DEBUG=1 for the traceback",
        ) from error
    return module

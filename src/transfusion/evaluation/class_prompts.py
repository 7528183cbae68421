"""Class names, and the prompts that zero-shot models read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from os.path import exists, expanduser
from pathlib import Path
from typing import Any

from transfusion.errors import DataError, listing
from transfusion.runtime.untrusted_files import parse_json, read_text

SUPPLIED = ("eurosat", "dtd", "gtsrb", "svhn", "imagenet-r")
PLACE = "{}"
_HOW = 'write {"classes": ["cat", …], "templates": ["a photo of a {}.", …]} as JSON'


@dataclass(frozen=True)
class Classes:
    """Class names in order, the folder names of a dataset, and templates of prompts."""

    label: str
    names: tuple[str, ...]
    templates: tuple[str, ...]
    folders: tuple[str, ...] = ()
    """The names in the dataset, if they differ."""

    @classmethod
    def of(cls, given: str | Path, templates: tuple[str, ...] = ()) -> Classes:
        """Read the classes of a file, or those that ship with the package under this name."""
        label = str(given)
        supplied = not exists(label) and label.lower() in SUPPLIED
        if supplied:
            place = files("transfusion.evaluation").joinpath("prompts", f"{label.lower()}.json")
            text = place.read_text(encoding="utf-8")
        else:
            try:
                text = read_text(Path(expanduser(label)), DataError)
            except DataError as error:
                raise DataError(
                    f"{label}: no file of classes ({error.message})",
                    hint=f"give a file, or one of {', '.join(SUPPLIED)}",
                ) from error
        try:
            info = parse_json(text, label, DataError)
        except DataError as error:
            raise DataError(f"{label}: not JSON ({error.message})", hint=_HOW) from error
        info = {"classes": info} if isinstance(info, list) else info
        found = cls(label, *(_words(label, info, key) for key in ("classes", "templates", "folders")))
        if templates:
            found = cls(label, found.names, templates, found.folders)
        found.check()
        return found

    def check(self) -> None:
        """Refuse classes with equal names, and templates without exactly one placeholder."""
        if len(self.names) < 2:
            raise DataError(f"{self.label}: {len(self.names)} classes", hint="give two or more; " + _HOW)
        for names in (self.names, self.folders):
            twice = [name for name, count in Counter(map(plain, names)).items() if count > 1]
            if twice:
                info = [name for name in names if plain(name) in twice]
                raise DataError(
                    f"{self.label}: classes of the same name: {listing(info)}", hint="name every class once"
                )
        if self.folders and len(self.folders) != len(self.names):
            raise DataError(
                f"{self.label}: {len(self.names)} classes and {len(self.folders)} folders",
                hint="give one folder for every class, or none at all",
            )
        for template in self.templates:
            if template.count(PLACE) != 1:
                raise DataError(
                    f"{self.label}: the template {template!r} has no place for the class, or several",
                    hint=f"write {PLACE} once, where the name of the class belongs",
                )

    def require_templates(self) -> None:
        """Refuse classes without templates."""
        if not self.templates:
            raise DataError(f"{self.label}: no templates in it", hint=_HOW)

    def prompts(self) -> list[tuple[str, ...]]:
        """Return all prompts, class by class."""
        return [(template.replace(PLACE, name),) for name in self.names for template in self.templates]


def plain(name: object) -> str:
    """Return a name without case, spaces, hyphens and underscores."""
    info = str(name).casefold()
    return "".join(one for one in info if one.isalnum()) or info.strip()


def _words(label: str, info: Any, key: str) -> tuple[str, ...]:
    found = info.get(key, []) if isinstance(info, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, str) and one.strip() for one in found):
        raise DataError(f"{label}: {key} must be a list of texts", hint=_HOW)
    return tuple(found)

"""Classes: their names, the prompts that zero-shot models read, and the number of every example's class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import exists, expanduser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.data.examples import Examples
from transfusion.errors import DataError, listing
from transfusion.runtime.untrusted_files import parse_json, read_text

PROMPTS = Path(__file__).parent / "prompts"
SUPPLIED = ("eurosat", "dtd", "gtsrb", "svhn", "imagenet-r")
PLACE = "{}"
SHOWN = 12
"""The largest number of names in an error."""
_GENERIC = re.compile(r"(label)?0*(\d+)")
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
        path = PROMPTS / f"{label.lower()}.json" if supplied else Path(expanduser(label))
        try:
            text = read_text(path, DataError)
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


# ── labels ───────────────────────────────────────────────────────────────────────────────────


def class_numbers(examples: Examples, classes: Sequence[Sequence[str]], count: int, owner: str) -> Tensor:
    """Return the class number of every example.

    ``classes`` are lists of class names, each in the order of the ``count`` classes. Labels are matched by
    name; without names, numbers are the numbers of the model's classes.
    """
    if examples.labels is None:
        raise DataError(f"{examples.label}: no labels in it", hint="name the column of classes with `label`")
    lists = [names for names in classes if not generic(names)]
    labels = _named_labels(examples)
    if all(isinstance(one, int) for one in labels):
        numbers = {str(one): int(one) for one in labels if 0 <= int(one) < count}
    else:
        places = _places(classes)
        numbers = {str(one): places[plain(one)] for one in labels if plain(one) in places}
        if unknown := [name for name in dict.fromkeys(map(str, labels)) if name not in numbers]:
            numbers = _by_order(examples, unknown, bool(numbers), lists, count, owner)
    for place, one in enumerate(labels, 1):
        if str(one) not in numbers:
            shown = one if isinstance(one, int) else f'"{one}"'
            raise DataError(
                f"{examples.label}: example {place} has label {shown}, which is none of the {count} classes,"
                f" counted from 0, of {owner}",
                hint="the labels must be those that the model was trained with",
            )
    return torch.tensor([numbers[str(one)] for one in labels])


def generic(names: Sequence[str]) -> bool:
    """Whether names are just numbers, such as LABEL_0."""
    found = [_GENERIC.fullmatch(plain(name)) for name in names]
    return all(one is not None and int(one[2]) == place for place, one in enumerate(found))


def class_names(own: Sequence[str], classes: Classes | None, count: int, owner: str) -> list[tuple[str, ...]]:
    """Return the lists of names of a model's classes: its own, and those of a file that agrees."""
    if classes is not None and len(classes.names) != count:
        raise DataError(
            f"{classes.label}: {len(classes.names)} classes, and {owner} has {count}",
            hint="give the classes that the model was trained with",
        )
    theirs = [names for names in (classes.names, classes.folders) if names] if classes else []
    if len(own) != count:
        return theirs
    if generic(own):
        return [*theirs, tuple(own)]
    if classes is None or {plain(name) for name in own} != {plain(name) for name in classes.names}:
        return [tuple(own)]
    places = {plain(name): place for place, name in enumerate(classes.names)}
    return [tuple(own), *(tuple(names[places[plain(name)]] for name in own) for names in theirs)]


def _named_labels(examples: Examples) -> list[int | str]:
    """Return the labels by name if the data names its classes; otherwise as they are."""
    assert examples.labels is not None
    names = examples.names
    if names is None or generic(names):
        return list(examples.labels)
    labels: list[int | str] = []
    for number, one in enumerate(examples.labels, 1):
        if isinstance(one, int) and not 0 <= one < len(names):
            raise DataError(
                f"{examples.label}: example {number} has label {one}, and there are {len(names)} classes,"
                " counted from 0",
                hint="an unlabelled split cannot be measured on; choose another with `split`",
            )
        labels.append(names[one] if isinstance(one, int) else one)
    return labels


def _places(lists: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the class of every name that belongs to one class only."""
    meant: dict[str, set[int]] = {}
    for names in lists:
        for place, name in enumerate(names):
            meant.setdefault(plain(name), set()).add(place)
    return {name: next(iter(places)) for name, places in meant.items() if len(places) == 1}


def _by_order(
    examples: Examples,
    unknown: Sequence[str],
    some: bool,
    lists: Sequence[Sequence[str]],
    count: int,
    owner: str,
) -> dict[str, int]:
    """Match names that are numbers by number, and others by order if the model's classes have no names."""
    names = examples.names or ()
    every = list(names) or sorted(set(map(str, examples.labels or ())))
    numbers = {name: int(name) for name in every if _is_number(name) and int(name) < count}
    if not some and numbers and (len(numbers) == len(every) or not names):
        return numbers
    if not lists and len(names) == count:
        return {name: place for place, name in enumerate(names)}
    known = lists[0] if lists else ()
    if known:
        raise DataError(
            f"{examples.label}: class names that {owner} does not know: {listing(unknown, SHOWN)}; it knows"
            f" {listing(known, SHOWN)}",
            hint="give a file with `classes` whose names, or folders, are those of the data",
        )
    raise DataError(
        f"{examples.label}: {len(every)} class names ({listing(every, SHOWN)}), and {owner} has {count}"
        " classes without names",
        hint="give the names in the model's order with `classes`",
    )


def _is_number(name: str) -> bool:
    """Whether a name is a whole number of fewer than 19 digits."""
    return name.isdecimal() and len(name) < 19

"""Read examples from a folder, a file, or the hub."""

from __future__ import annotations

import logging
import re
from os.path import exists, expanduser, isdir
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from transfusion.data.examples import Columns, Examples, ImageFile, find_images
from transfusion.data.tables import TABLES, examples_of, read_table
from transfusion.errors import DataError, listing, reason_of
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.untrusted_files import (
    path_inside,
    read_json,
    require_closed,
    require_regular,
    validate,
)

SPLITS = ("train", "training", "valid", "validation", "val", "dev", "test", "testing")
_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>\w[\w.-]*))?(@(?P<revision>\w[\w./-]*))?")
_HOW = "give a folder of images, a .csv, .tsv, .jsonl, .parquet or .txt, a folder of datasets, or a hub id"


class _DataFile(TypedDict):
    """An entry of a saved dataset's list of files."""

    filename: str


def read_examples(
    reference: str | Path, split: str | None = None, columns: Columns | None = None
) -> Examples:
    """Read raw examples; an existing path takes precedence over a hub id."""
    path, asked = Path(expanduser(reference)), columns or Columns()
    if isdir(path):
        return _folder(path, split, asked)
    if exists(path):
        require_regular(path, DataError)
        if path.suffix not in TABLES:
            raise DataError(f"{path}: not a kind of file that holds examples", hint=_HOW)
        if split is not None:
            raise DataError(f"{path}: a file has no splits, and {split} was asked for", hint="leave it out")
        return _file(path, asked)
    found = _HUB_ID.fullmatch(str(reference))
    if found is None or path.suffix in (*TABLES, ".safetensors", ".npz"):
        raise DataError(f"{reference}: no such file or folder", hint=_HOW)
    dataset = fetch_dataset(str(reference), found["repo"], found["config"], found["revision"])
    return _of_library(str(reference), dataset, split, asked)


def _file(path: Path, asked: Columns) -> Examples:
    table = read_table(path, asked.all)
    return examples_of(str(path), list(table), table.__getitem__, asked, beside=path.parent)


# ── folders ──────────────────────────────────────────────────────────────────────────────────


def _folder(path: Path, split: str | None, asked: Columns) -> Examples:
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _saved(path, split, asked)
    places = sorted(one.name for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    tables = {file.stem: file for file in sorted(path.iterdir()) if file.suffix in TABLES}
    if tables and not places:
        return _file(path_inside(path, tables[_split_of(path, list(tables), split)], DataError), asked)
    splits = [name for name in places if name.lower() in SPLITS]
    if split is not None or (splits and len(splits) == len(places)):
        path = path_inside(path, path / _split_of(path, splits, split), DataError)
    return _classes(path)


def _split_of(path: Path, splits: list[str], asked: str | None) -> str:
    """Return the split that was asked for, or the only one."""
    if asked in splits:
        return str(asked)
    if asked is None and len(splits) == 1:
        return splits[0]
    wanted = "which split?" if asked is None else f"no split {asked};"
    there = f"there are {listing(splits, 20)}" if splits else "it has no splits"
    hint = "name one of them with `split`" if splits else "leave `split` out"
    raise DataError(f"{path}: {wanted} {there}", hint=hint)


def _classes(path: Path) -> Examples:
    """Read one folder per class, in the order of the names."""
    places = sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    found = {place.name: files for place in places if (files := find_images(place, path))}
    if not found:
        beside = ", only images without a folder" if find_images(path) else ""
        raise DataError(
            f"{path}: no images in folders of classes{beside}",
            hint="put the images of every class into a folder of its own",
        )
    return Examples(
        str(path),
        images=[ImageFile.at(file, path) for files in found.values() for file in files],
        labels=[name for name, files in found.items() for _ in files],
        names=tuple(found),
    )


# ── the library datasets ─────────────────────────────────────────────────────────────────────


def _datasets() -> Any:
    datasets = require_library("datasets", "data")
    datasets.disable_progress_bars()
    return datasets


def _saved(path: Path, split: str | None, asked: Columns) -> Examples:
    datasets = _datasets()
    _require_inside(path)
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many types for a damaged folder
        raise DataError(
            f"{path}: cannot be read as a folder of datasets ({reason_of(error)})", hint="save it again"
        ) from error
    return _of_library(str(path), found, split, asked, path)


def _require_inside(path: Path) -> None:
    """Refuse a saved dataset that names files outside of its folder: the library would read them."""
    for folder in (path, *(one for one in path.iterdir() if one.is_dir())):
        require_closed(folder, DataError)
        if (state := folder / "state.json").exists():
            named = read_json(state, DataError).get("_data_files", [])
            for file in validate(named, list[_DataFile], state, hint="save it again", error=DataError):
                path_inside(path, folder / file["filename"], DataError)


def _of_library(
    label: str, found: Any, split: str | None, asked: Columns, beside: Path | None = None
) -> Examples:
    datasets = _datasets()
    if isinstance(found, datasets.DatasetDict):
        found = found[_split_of(Path(label), list(found), split)]
    elif split is not None:
        _split_of(Path(label), [], split)
    classes: dict[str, tuple[str, ...]] = {}
    images: list[str] = []
    for name, feature in found.features.items():
        if isinstance(feature, datasets.ClassLabel):
            classes[name] = tuple(feature.names)
        elif isinstance(feature, datasets.Image):
            found = found.cast_column(name, datasets.Image(decode=False))
            images.append(name)
    return examples_of(
        label,
        found.column_names,
        lambda name: found[name][:],
        asked,
        beside=beside,
        classes=classes,
        images=images,
    )


# ── the hub ──────────────────────────────────────────────────────────────────────────────────

SECONDS = 10
"""The time limit of the first request."""


def fetch_dataset(label: str, repo: str, config: str | None, revision: str | None) -> Any:
    """Load a dataset of the hub with ``datasets``; if the hub does not answer once, from its cache."""
    datasets = _datasets()
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    switches: tuple[Any, Any] = (datasets.config, huggingface_hub.constants)
    before, disabled = [one.HF_HUB_OFFLINE for one in switches], logging.root.manager.disable
    reason: Exception | None = None
    logging.disable(logging.WARNING)  # the libraries tell of every retry
    try:
        try:
            huggingface_hub.dataset_info(repo, revision=revision, timeout=SECONDS)
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
            raise
        except Exception as error:  # the network library raises many types
            reason = error
            for one in switches:
                one.HF_HUB_OFFLINE = True
        return datasets.load_dataset(repo, config, revision=revision)
    except Exception as error:  # the library raises many types
        raise DataError(
            f"{label}: no such file or folder here, and the hub could not provide it"
            f" ({reason_of(reason or error)})",
            hint="check the spelling, the network and your access, or give local examples",
        ) from error
    finally:
        logging.disable(disabled)
        for one, value in zip(switches, before, strict=True):
            one.HF_HUB_OFFLINE = value

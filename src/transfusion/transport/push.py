"""Uploading: a written output becomes a repository of the hub. Nothing else in the package sends anything.

Only the word ``push`` uploads, and only what is complete and in its place. What is uploaded tells no paths
of this machine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transfusion.alignment.alignment import Alignment
from transfusion.errors import OutputError, SettingError, reason_of
from transfusion.files.publishing import contents
from transfusion.runtime.progress import Progress, phase
from transfusion.runtime.run_record import shareable, shareable_text
from transfusion.transport.adapters.settings import CONFIG
from transfusion.transport.record import FILE, PI_FILE

if TYPE_CHECKING:
    from transfusion.transport.output import Output

_WITH_PATHS = (FILE, CONFIG)
"""The files of an output that may name places of this machine."""
_LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"


def require_repository(repository: str, output: object, progress: Progress) -> None:
    """Refuse, before any work, a name that no repository can have, and a result that is in no file.

    Without a token, warn: there is time to log in until the result is written.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    hint = "give ORG/NAME, such as my-name/my-model-on-b"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise SettingError(f"`push`: not the name of a repository: {reason_of(error)}", hint=hint) from error
    if "/" not in repository:
        raise SettingError(f"`push`: {repository!r} does not say whose repository it is", hint=hint)
    if output is None:
        raise SettingError("`push` without `output`: what is written is uploaded", hint="give `output`")
    if get_token() is None:
        progress.warn(f"no token of the hub is here: {_LOG_IN}, or the upload at the end will fail")


def push(output: Output, path: Path, repository: str) -> str:
    """Upload a written output, in one commit, to a repository that is private if it is new; return its
    address.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    with tempfile.TemporaryDirectory() as folder, _reported(path, repository):
        files = _shareable_files(output, path, Path(folder))
        with phase(f"uploading to {repository}"), _without_bars():
            api = HfApi()
            url = api.create_repo(repository, private=True, exist_ok=True)
            added = [CommitOperationAdd(name, str(file)) for name, file in files.items()]
            api.create_commit(repository, added, commit_message=shareable_text(output.label)[:200])
    return str(url)


def _shareable_files(output: Output, path: Path, folder: Path) -> dict[str, Path]:
    """Return the files to upload, by their names there. Of those that name places here, copies do not."""
    if path.is_dir():
        files = {name: path / name for name in contents(path)}
    else:  # a single file, whose card is nowhere yet
        files = {path.name: path}
        for name, text in output.texts(output.metadata()).items():
            (folder / name).write_text(text, encoding="utf-8")
            files[name] = folder / name
    for name in files.keys() & set(_WITH_PATHS):
        told = shareable(json.loads(files[name].read_text(encoding="utf-8")))
        files[name] = folder / name
        files[name].write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if PI_FILE in files:
        pi = Alignment.load(files[PI_FILE])
        files[PI_FILE] = folder / Path(PI_FILE).name
        names = ("source", "target", "options", "advice", "vocabulary")  # own inputs are named in two of them
        told = {name: shareable(getattr(pi.provenance, name)) for name in names}
        replace(pi, provenance=replace(pi.provenance, **told)).save(files[PI_FILE])
    return files


@contextmanager
def _reported(path: Path, repository: str) -> Iterator[None]:
    """Report what stops an upload in one line; the output stays where it was written."""
    from huggingface_hub import get_token

    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # of which the library says less
            cause = cause.__cause__
        status = getattr(getattr(cause, "response", None), "status_code", None)
        reason, remedy = f"it did not answer, or refused: {reason_of(cause)}", "check the network"
        if get_token() is None:
            reason, remedy = "no token of the hub is here", _LOG_IN
        elif status == 401:
            reason, remedy = "the hub does not know the token", _LOG_IN
        elif status == 403:
            reason = "the token has no right to write there"
            remedy = f"use a token that may write to {repository.partition('/')[0]}"
        without = f" --exclude {FILE}" if path.is_dir() else ""
        raise OutputError(
            f"{path} is written, but was not uploaded to {repository} ({reason})",
            hint=f"{remedy}; then 'hf upload {repository} {path} --private{without}' uploads it",
        ) from error
    except BaseException as interrupt:
        interrupt.written = path  # type: ignore[attr-defined]
        raise


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the hub's library from drawing bars of its own."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()

"""Every failure a user can meet, as one small tree.

    TransfusionError
    ├── LayoutError        a layout string, or a tensor that does not fit its layout
    ├── ArchitectureError  a model that no table describes, or a wrong table
    ├── CheckpointError    a file or folder that cannot be read as a model
    ├── MismatchError      two inputs that do not belong together
    ├── AlignmentError     a file of π that is damaged, or made for something else
    ├── AdapterError       an adapter that cannot be moved
    ├── DataError          examples that a model cannot be measured on
    ├── OutputError        a path that cannot, or must not, be written
    ├── SettingError       an argument that is wrong
    ├── LibraryError       an optional library that is needed and not installed
    ├── ClusterError       workers that cannot be started, or that died
    ├── VerificationError  two computations that should agree and do not
    └── UselessResultError a result that would not be worth writing

The command line prints the message and the hint, never a traceback (unless
``TRANSFUSION_DEBUG=1``), and exits with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Iterable


class TransfusionError(Exception):
    """A known failure: one line that says what is wrong, and a hint that says what to do.

    >>> try:
    ...     transfusion.inspect("models/a/notes.txt")
    ... except transfusion.TransfusionError as error:
    ...     print(error)
    models/a/notes.txt: not a kind of file that holds weights
    hint: give a .safetensors, .bin or .pt file, or a folder
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class LayoutError(TransfusionError):
    """A layout string that cannot be parsed, or a tensor that does not fit its layout."""


class ArchitectureError(TransfusionError):
    """A model that no table describes, or that a table describes wrongly."""


class CheckpointError(TransfusionError):
    """A file or folder that cannot be read as a model."""


class MismatchError(TransfusionError):
    """Two inputs that do not belong together: other shapes, another base, another vocabulary."""


class AlignmentError(TransfusionError):
    """A file of π that is damaged, or was made for other models."""


class AdapterError(TransfusionError):
    """An adapter that cannot be moved."""


class DataError(TransfusionError):
    """Examples that cannot be read, or that a model cannot be measured on."""


class OutputError(TransfusionError):
    """A path that cannot, or must not, be written."""


class SettingError(TransfusionError):
    """An argument that is wrong, whatever the models."""

    exit_code = 2


class LibraryError(TransfusionError):
    """An optional library that is needed here and is not installed."""


class ClusterError(TransfusionError):
    """Workers in other processes or on other machines that cannot be started, or that died."""


class VerificationError(TransfusionError):
    """Two computations that should agree and do not."""

    exit_code = 3


class UselessResultError(TransfusionError):
    """A result that would not be worth writing, unless the user insists with ``force_unrelated``.

    ``command`` is what to type next, if the user typed a command.
    """

    exit_code = 4

    def __init__(self, message: str, *, hint: str | None = None, command: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.command = command


def reason_of(error: BaseException) -> str:
    """Return the first line of an error of another library, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(": ")


def listing(items: Iterable[object], limit: int = 8) -> str:
    """Join the first few of ``items`` for an error message, and say how many were left out."""
    texts = [str(item) for item in items]
    shown = ", ".join(texts[:limit])
    return f"{shown} and {len(texts) - limit} more" if len(texts) > limit else shown

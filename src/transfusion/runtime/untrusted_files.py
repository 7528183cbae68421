"""Reading files that are not trusted: regular files inside their folder, bounded JSON, validated values.

Every text file of a model's folder is read through this module, so that all values have been checked once.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar, cast

from transfusion.errors import CheckpointError, TransfusionError

LARGEST_TEXT = 2**28
"""Text files of more bytes are refused unread."""

Value = TypeVar("Value")


def path_inside(folder: Path, path: Path, error: type[TransfusionError] = CheckpointError) -> Path:
    """Return the path, or refuse one that leads outside the folder, unless to a blob of its own repository
    in the hub's cache.
    """
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as reason:  # such as a circle of links
        raise error(
            f"{path}: the link cannot be resolved ({_reason(reason)})", hint="put the file itself there"
        ) from reason
    if not (target.is_relative_to(home) or _is_own_blob(home, target)):
        raise error(
            f"{path}: the link leads outside {folder} (to {target}), and is not followed",
            hint="put the file itself into the folder, or give the path of the file that you mean",
        )
    return path


def require_closed(folder: Path, error: type[TransfusionError] = CheckpointError) -> Path:
    """Return the folder, or refuse irregular files and links that lead outside: libraries follow them."""
    for path in folder.iterdir():
        if not path.is_dir():
            require_regular(path_inside(folder, path, error), error)
    return folder


def _is_own_blob(folder: Path, target: Path) -> bool:
    """Return whether a folder is a snapshot in the hub's cache, and the file a blob of that repository."""
    blobs, repository = target.parent, target.parent.parent
    cached = blobs.name == "blobs" and repository.name.startswith("models--")
    return cached and folder.is_relative_to(repository / "snapshots")


def require_regular(path: Path, error: type[TransfusionError] = CheckpointError) -> Path:
    """Return the path, or refuse what is not a regular file: a pipe or a device may never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as reason:
        raise error(f"{path}: it cannot be read ({_reason(reason)})", hint="check the path") from reason
    if not S_ISREG(mode):
        raise error(
            f"{path}: not a regular file", hint="give a file on disk, not a folder, a pipe or a device"
        )
    return path


def read_text(path: Path, error: type[TransfusionError] = CheckpointError, limit: int = LARGEST_TEXT) -> str:
    """Return the text of a regular file of at most ``limit`` bytes."""
    try:
        size = require_regular(path, error).stat().st_size
        if size > limit:
            raise error(f"{path}: {size} bytes, and at most {limit} are read", hint="is this the right file?")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise error(
            f"{path}: not readable as text ({_reason(reason)})", hint="fetch the file again"
        ) from reason


def parse_json(text: str, where: object, error: type[TransfusionError] = CheckpointError) -> Any:
    """Return a JSON value; refuse a key that occurs twice. ``where`` names the origin in errors."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
        if "\\ud" in text.lower():  # half a surrogate pair can be neither printed nor written
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as reason:
        raise error(
            f"{where}: not readable as JSON ({_reason(reason)})", hint="fetch the file again"
        ) from reason


def read_json(path: Path, error: type[TransfusionError] = CheckpointError) -> dict[str, Any]:
    """Return the JSON object in a file."""
    value = parse_json(read_text(path, error), path, error)
    if not isinstance(value, dict):
        raise error(f"{path}: a JSON object was expected", hint="fetch the file again")
    return value


def validate(
    value: object,
    schema: type[Value],
    where: object,
    *,
    hint: str,
    error: type[TransfusionError] = CheckpointError,
    from_text: bool = False,
) -> Value:
    """Return the value, or refuse one that does not fit the schema: a model, or any other annotation.

    Nothing is converted: a string is not a number. For a pydantic model, an instance of it is returned; else
    the value itself, with the keys that the schema does not name. With ``from_text``, the value is JSON, and
    what the schema makes of it is returned.
    """
    from pydantic import BaseModel, ValidationError

    try:
        adapter = _adapter(cast(Any, schema))
        if from_text:
            return cast(Value, adapter.validate_json(value, strict=True))
        found = adapter.validate_python(value, strict=True)
    except ValidationError as reason:
        first, *others = reason.errors(include_url=False, include_input=False)
        place = "".join(f"{part}: " for part in (".".join(map(str, first["loc"])),) if part)
        more = f", and {len(others)} more" if others else ""
        raise error(f"{where}: {place}{_lower(first['msg'])}{more}", hint=hint) from reason
    return cast(Value, found if isinstance(found, BaseModel) else value)


def require_finite(
    value: object, where: object, *, hint: str, error: type[TransfusionError] = CheckpointError
) -> None:
    """Refuse NaN and infinity anywhere in a value: JSON cannot hold them."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError as reason:
        raise error(f"{where}: a number in it is NaN or infinite", hint=hint) from reason


@cache
def _adapter(schema: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
